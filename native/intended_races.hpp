// The data races that are intended, declared to ThreadSanitizer. This is the only place.
//
// A gather copies rows outside the caller's lock, while a writer may overwrite them. The copied bytes are not
// used before the caller has compared the generations of the rows after the copy: a batch with a row that was
// written meanwhile is copied again under the lock. A reader of single-copy rows does the same, with the side
// row and its version. (docs/architecture.md, "Concurrency".) Only these reads are exempt. Two writers of one
// row, and two readers that share a batch, are still reported: the accesses that stay checked are reported to
// ThreadSanitizer as whole ranges.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_THREAD__)
#define OSTINATO_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define OSTINATO_THREAD_SANITIZER 1
#endif
#endif

#if defined(OSTINATO_THREAD_SANITIZER)
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void __tsan_read_range(void* address, long bytes);
void __tsan_write_range(void* address, long bytes);
}
#endif

namespace ostinato {

/// While one exists, ThreadSanitizer does not check the memory accesses of this thread. Without
/// ThreadSanitizer it does nothing.
class IntendedRaces {
public:
#if defined(OSTINATO_THREAD_SANITIZER)
    IntendedRaces() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
    ~IntendedRaces() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
#else
    IntendedRaces() {}   // not defaulted: an object that is only constructed
    ~IntendedRaces() {}  // counts as unused otherwise
#endif
    IntendedRaces(const IntendedRaces&) = delete;
    IntendedRaces& operator=(const IntendedRaces&) = delete;
};

/// Report a read of `bytes` bytes that must not race.
inline void check_read([[maybe_unused]] const void* address, [[maybe_unused]] std::size_t bytes) {
#if defined(OSTINATO_THREAD_SANITIZER)
    if (address != nullptr && bytes > 0)
        __tsan_read_range(const_cast<void*>(address), static_cast<long>(bytes));
#endif
}

/// Report a write of `bytes` bytes that must not race.
inline void check_write([[maybe_unused]] void* address, [[maybe_unused]] std::size_t bytes) {
#if defined(OSTINATO_THREAD_SANITIZER)
    if (address != nullptr && bytes > 0) __tsan_write_range(address, static_cast<long>(bytes));
#endif
}

}  // namespace ostinato
