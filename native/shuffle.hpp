// Drawing without replacement: steps of a Fisher-Yates shuffle that go on where the last call stopped.
#pragma once

#include <cstdint>
#include <utility>

#include "platform.hpp"

namespace ostinato {

/// A position in [i, total), from 63 random bits. The top bit is dropped: no input can point outside.
inline std::int64_t shuffle_target(std::int64_t i, std::int64_t total, std::int64_t random) {
    const std::uint64_t bits = static_cast<std::uint64_t>(random) << 1;  // 63 bits, scaled to 64
    return i + static_cast<std::int64_t>(multiply_high(bits, static_cast<std::uint64_t>(total - i)));
}

/// k steps on perm[first, total): each swaps a random one of the rows not drawn yet to the front, and gives
/// it out.
inline void shuffle_draw(std::int64_t* perm, std::int64_t first, std::int64_t total, std::int64_t k,
                         const std::int64_t* randoms, std::int64_t* out) {
    constexpr std::int64_t kAhead = 24;  // a swap takes about 2 ns, a cold line about 50 to 100
    for (std::int64_t step = 0; step < k && step < kAhead; ++step) {
        prefetch<true>(perm + shuffle_target(first + step, total, randoms[step]));
    }
    for (std::int64_t step = 0; step < k; ++step) {
        const std::int64_t ahead = step + kAhead;
        if (ahead < k) prefetch<true>(perm + shuffle_target(first + ahead, total, randoms[ahead]));
        const std::int64_t i = first + step;
        std::swap(perm[i], perm[shuffle_target(i, total, randoms[step])]);
        out[step] = perm[i];
    }
}

}  // namespace ostinato
