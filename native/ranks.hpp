// Priorities around the tree, a whole batch in one pass: draws with weights and stamps, and updates that
// stamps and checks let through. No Python here.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>

#include "platform.hpp"
#include "powers.hpp"
#include "sum_tree.hpp"

namespace ostinato {

/// Which write filled each slot: from an array, or, while rows are written in ring order, from the cursor.
struct Stamps {
    const std::int64_t* array;  // null in ring order
    std::int64_t rows;          // length of the array
    std::int64_t cursor;
    std::int64_t below;  // in ring order: stamp minus slot, before the cursor
    std::int64_t above;  // and from the cursor on
    std::int64_t base;   // stamps up to it are those of no row

    std::int64_t of(std::int64_t slot) const {
        if (array != nullptr) return slot < rows ? array[slot] : 0;
        return slot + (slot < cursor ? below : above);
    }
};

/// Draws slots, their importance weights `(value / smallest value) ** -beta`, and their stamps.
template <typename Weight>
void sample(const SumTree& tree, const double* uniforms, std::int64_t n, double beta, const Stamps& stamps,
            std::int64_t* slots, Weight* weights, std::int64_t* out) {
    constexpr std::int64_t kChunk = 256;
    std::array<double, kChunk> values{};
    const double least = tree.minimum();
    for (std::int64_t first = 0; first < n; first += kChunk) {
        const std::int64_t k = std::min(kChunk, n - first);
        tree.draw(uniforms + first, k, slots + first, values.data());
        for (double& value : values) value /= least;
        raise(values.data(), k, -beta);
        std::copy_n(values.data(), k, weights + first);
        for (std::int64_t i = first; i < first + k; ++i) out[i] = stamps.of(slots[i]);
    }
}

/// What the rows of a tree have beside their leaf, and how a priority becomes one.
struct Ranks {
    double* priorities;           // as they were given, one for each leaf
    const unsigned char* hidden;  // where not 0 the leaf stays 0; null: nowhere
    std::int64_t rows;            // slots from here on hold nothing
    double eps;
    double alpha;

    /// Priorities become `(p + eps) ** alpha`; 0 where `p + eps` is, also for `alpha = 0`.
    void to_values(double* p, std::int64_t n) const {
        for (std::int64_t i = 0; i < n; ++i) p[i] += eps;
        if (alpha == 0) {
            std::transform(p, p + n, p, [](double sum) { return sum > 0 ? 1.0 : 0.0; });
        } else {
            raise(p, n, alpha);
        }
    }
};

/// What an update did.
struct Learned {
    std::int64_t stale = 0;  // rows that have been replaced since their stamp
    double given = 0;        // largest priority given to a row
    double gone = 0;         // largest that rows had before (asked for with `within`)
    double left = 0;         // largest that these rows have now (asked for with `within`)
};

/// Gives rows priorities, in order: of equal slots the last one wins. With `given` stamps only rows that
/// still have theirs; without, slots of -1 are left out. Nothing is written if an argument is bad.
template <typename Priority>
class Update {
public:
    Update(SumTree& tree, const Ranks& ranks, const std::int64_t* slots, const Priority* priorities,
           std::int64_t n)
        : tree_(tree),
          ranks_(ranks),
          slots_(slots),
          priorities_(priorities),
          n_(n),
          kept_(std::make_unique_for_overwrite<std::int64_t[]>(static_cast<std::size_t>(n))),
          values_(std::make_unique_for_overwrite<double[]>(static_cast<std::size_t>(n))) {}

    Learned run(const std::int64_t* given, const Stamps& stamps, bool within) {
        if (given != nullptr) {
            keep_fresh(given, stamps);
        } else {
            keep_present();
        }
        check();
        if (within) learned_.gone = most();
        write();
        if (within) learned_.left = most();
        return learned_;
    }

private:
    static constexpr std::int64_t kAhead = 32;
    static constexpr double kMost = 0x1p960;  // the sum of 2**36 of them is still finite

    void keep_fresh(const std::int64_t* given, const Stamps& stamps) {
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < n_; ++i) {
            const std::int64_t slot = slots_[i];
            const bool present = slot >= 0 && slot < ranks_.rows;
            kept_[static_cast<std::size_t>(count)] = slot;  // to stay, if it counts
            values_[static_cast<std::size_t>(count)] = static_cast<double>(priorities_[i]);
            count += present && given[i] > stamps.base && stamps.of(slot) == given[i] ? 1 : 0;
        }
        count_ = count;
        learned_.stale = n_ - count;
    }

    void keep_present() {
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < n_; ++i) {
            const std::int64_t slot = slots_[i];
            if (slot < -1 || slot >= ranks_.rows) {
                throw std::out_of_range("index " + std::to_string(slot) + " is out of range for " +
                                        std::to_string(ranks_.rows) + " rows");
            }
            kept_[static_cast<std::size_t>(count)] = slot;
            values_[static_cast<std::size_t>(count)] = static_cast<double>(priorities_[i]);
            count += slot >= 0 ? 1 : 0;
        }
        count_ = count;
    }

    void check() {
        bool good = true;
        double given = 0;
        for (std::int64_t i = 0; i < count_; ++i) {
            const double priority = values_[static_cast<std::size_t>(i)];
            good &= (priority >= 0) & (priority <= std::numeric_limits<double>::max());  // false of NaN
            given = priority > given ? priority : given;
        }
        learned_.given = given;
        ranks_.to_values(&given, 1);
        if (!good || !(given <= kMost)) {
            throw std::invalid_argument("priorities must be finite, at least 0 and small enough");
        }
    }

    void write() {
        double* kept = ranks_.priorities;
        for (std::int64_t i = 0; i < count_; ++i) {
            if (i + kAhead < count_) prefetch<true>(kept + slot(i + kAhead));
            kept[slot(i)] = values_[static_cast<std::size_t>(i)] + 0.0;  // -0.0 becomes 0.0
        }
        ranks_.to_values(values_.get(), count_);
        for (std::int64_t i = 0; ranks_.hidden != nullptr && i < count_; ++i) {
            if (ranks_.hidden[slot(i)] != 0) values_[static_cast<std::size_t>(i)] = 0.0;
        }
        tree_.set(kept_.get(), values_.get(), count_);
    }

    std::int64_t slot(std::int64_t i) const { return kept_[static_cast<std::size_t>(i)]; }

    double most() const {
        double most = 0;
        for (std::int64_t i = 0; i < count_; ++i) {
            most = std::max(most, ranks_.priorities[slot(i)]);
        }
        return most;
    }

    SumTree& tree_;
    const Ranks& ranks_;
    const std::int64_t* slots_;
    const Priority* priorities_;
    std::int64_t n_;
    std::unique_ptr<std::int64_t[]> kept_;
    std::unique_ptr<double[]> values_;
    std::int64_t count_ = 0;
    Learned learned_;
};

}  // namespace ostinato
