// Counts by position, their sum, and the position to which a rank in [0, sum) belongs. No Python here.
//
// A node has eight children, side by side: one step down reads one cache line. Levels grow by chunks that
// never move, so no write waits for a copy of a level.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "platform.hpp"

namespace ostinato {

/// An array that grows by chunks of zeros. Elements never move.
template <typename T>
class Chunks {
public:
    T& operator[](std::int64_t i) { return chunks_[chunk_of(i)][i & kMask]; }
    const T& operator[](std::int64_t i) const { return chunks_[chunk_of(i)][i & kMask]; }

    void require(std::int64_t count) {
        while (static_cast<std::int64_t>(chunks_.size()) << kBits < count) {
            chunks_.push_back(std::make_unique<T[]>(std::size_t{1} << kBits));
        }
    }

    void clear() { chunks_.clear(); }
    std::size_t nbytes() const { return chunks_.size() * (sizeof(T) << kBits); }

private:
    static constexpr int kBits = 9;
    static constexpr std::int64_t kMask = (std::int64_t{1} << kBits) - 1;

    static std::size_t chunk_of(std::int64_t i) { return static_cast<std::size_t>(i >> kBits); }

    std::vector<std::unique_ptr<T[]>> chunks_;
};

class CountTree {
public:
    std::int64_t total() const { return total_; }

    void set(std::int64_t position, std::int64_t number) {
        if (position >= size_) grow(position + 1);
        const std::int64_t change = number - levels_.front()[position];
        if (change == 0) return;
        for (Chunks<std::int64_t>& level : levels_) {
            level[position] += change;
            position /= kFan;
        }
        total_ += change;
    }

    /// The positions of ranks in [0, total). `ranks` becomes the rest of each rank within its position. All
    /// ranks go down together: each level prefetches the lines of the next.
    void find(std::int64_t* ranks, std::int64_t n, std::int64_t* positions) const {
        std::fill_n(positions, n, std::int64_t{0});
        for (std::size_t level = levels_.size(); level-- > 0;) {
            const Chunks<std::int64_t>& from = levels_[level];
            const Chunks<std::int64_t>& next = levels_[level > 0 ? level - 1 : 0];
            for (std::int64_t i = 0; i < n; ++i) {
                const std::int64_t node = positions[i] * kFan;
                positions[i] = node + descend(&from[node], ranks[i]);
                if (level > 0) prefetch<false>(&next[positions[i] * kFan]);
            }
        }
    }

    void clear() { *this = CountTree(); }

    std::size_t nbytes() const {
        std::size_t bytes = 0;
        for (const Chunks<std::int64_t>& level : levels_) bytes += level.nbytes();
        return bytes;
    }

private:
    static constexpr std::int64_t kFan = 8;

    static std::int64_t round_up(std::int64_t count) { return (count + kFan - 1) / kFan * kFan; }

    /// The child to which a rank belongs; the rank becomes its rest within the child.
    static std::int64_t descend(const std::int64_t* line, std::int64_t& rank) {
        std::int64_t before = 0, passed = 0, child = 0;
        for (std::int64_t c = 0; c + 1 < kFan; ++c) {
            before += line[c];
            child += before <= rank ? 1 : 0;
            passed = before <= rank ? before : passed;
        }
        rank -= passed;
        return child;
    }

    void grow(std::int64_t count) {
        size_ = round_up(count);
        std::int64_t nodes = size_;
        for (std::size_t level = 0; level == 0 || nodes > 1; ++level) {
            if (level == levels_.size()) {
                levels_.emplace_back();
                levels_.back().require(kFan);
                levels_.back()[0] = total_;  // everything is below its first node
            }
            levels_[level].require(round_up(nodes));
            nodes = round_up(nodes) / kFan;
        }
    }

    std::int64_t size_ = 0;
    std::int64_t total_ = 0;
    std::vector<Chunks<std::int64_t>> levels_;
};

}  // namespace ostinato
