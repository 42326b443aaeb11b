// Sampling without replacement: a Fisher-Yates shuffle that continues where the last call stopped. No Python
// here.
#pragma once

#include <cstdint>
#include <utility>

#include "platform.hpp"

namespace ostinato {

/// A position in [i, total), from 63 random bits. The top bit is dropped: no input leads outside.
inline std::int64_t shuffle_target(std::int64_t i, std::int64_t total, std::int64_t random) {
    const std::uint64_t bits = static_cast<std::uint64_t>(random) << 1;  // 63 bits, scaled to 64
    return i + static_cast<std::int64_t>(multiply_high(bits, static_cast<std::uint64_t>(total - i)));
}

/// k steps on perm[first, total): each swaps a random row that was not drawn yet to the front and returns it.
/// After the last row the next step begins a new pass at 0, on the permutation as it is.
inline void shuffle_draw(std::int64_t* perm, std::int64_t first, std::int64_t total, std::int64_t k,
                         const std::int64_t* randoms, std::int64_t* out) {
    constexpr std::int64_t kAhead = 24;  // a swap takes about 2 ns, a cold line about 50 to 100
    const auto wrapped = [total](std::int64_t i) { return i == total ? 0 : i; };
    std::int64_t far = wrapped(first);  // position of the step that is prefetched next
    const auto prefetch_step = [&](std::int64_t step) {
        prefetch<true>(perm + shuffle_target(far, total, randoms[step]));
        far = wrapped(far + 1);
    };
    for (std::int64_t step = 0; step < k && step < kAhead; ++step) prefetch_step(step);
    std::int64_t i = wrapped(first);
    for (std::int64_t step = 0; step < k; ++step) {
        if (step + kAhead < k) prefetch_step(step + kAhead);
        std::swap(perm[i], perm[shuffle_target(i, total, randoms[step])]);
        out[step] = perm[i];
        i = wrapped(i + 1);
    }
}

}  // namespace ostinato
