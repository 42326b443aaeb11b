// Differences between compilers and systems: prefetches, processor variants, large pages and the high half of
// a product. No Python here.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

/// Marks a function with loops that wider vector instructions speed up: it is compiled for several
/// processors, and the best variant is chosen when the module is loaded. All variants give the same results.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define OSTINATO_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define OSTINATO_CLONES
#endif

namespace ostinato {

/// Prefetch the cache line at `address` for reading or writing. A hint: it cannot fault.
template <bool ForWrite>
inline void prefetch(const void* address) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch(address, ForWrite ? 1 : 0, 3);
#elif defined(_M_X64) || defined(_M_IX86)
    _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T0);
#elif defined(_M_ARM64)
    __prefetch(address);
#else
    (void)address;
#endif
}

/// Ask the system to back the whole pages inside [memory, memory + size) with huge pages. A hint, ignored
/// where the system does not support it.
inline void advise_huge_pages(void* memory, std::size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t before = (page - begin % page) % page;
    if (size < before) return;
    const std::size_t whole = (size - before) / page * page;
    if (whole > 0) (void)madvise(reinterpret_cast<void*>(begin + before), whole, MADV_HUGEPAGE);
#else
    (void)memory;
    (void)size;
#endif
}

/// The upper 64 bits of the 128-bit product.
inline std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) {
#if defined(__SIZEOF_INT128__)
    // __extension__ avoids a warning of -Wpedantic: the type is not standard.
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint64_t>((static_cast<Wide>(a) * b) >> 64);
#elif defined(_MSC_VER) && (defined(_M_X64) || defined(_M_ARM64))
    return __umulh(a, b);
#else
    const std::uint64_t low = 0xffffffffU;
    const std::uint64_t a0 = a & low, a1 = a >> 32, b0 = b & low, b1 = b >> 32;
    const std::uint64_t carry = ((a0 * b0) >> 32) + ((a1 * b0) & low) + a0 * b1;
    return a1 * b1 + ((a1 * b0) >> 32) + (carry >> 32);
#endif
}

}  // namespace ostinato
