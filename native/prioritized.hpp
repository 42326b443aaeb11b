// Prioritized replay (Schaul et al., 2016) on a sum tree, one pass for each batch: draws with importance
// weights and generations, and updates of priorities that compare generations. No Python here.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>

#include "memory.hpp"
#include "platform.hpp"
#include "sum_tree.hpp"
#include "vector_pow.hpp"

namespace ostinato {

/// The generation of each slot: the serial number of the write that filled it. From an array, or, while rows
/// are written in ring order, from the cursor.
struct Generations {
    const std::int64_t* array;  // null in ring order
    std::int64_t rows;          // length of the array
    std::int64_t cursor;
    std::int64_t before_cursor;  // in ring order: generation minus slot, before the cursor
    std::int64_t from_cursor;    // and from the cursor on
    std::int64_t none_up_to;     // no row has a generation up to this one

    std::int64_t of(std::int64_t slot) const {
        if (array != nullptr) return slot < rows ? array[slot] : 0;
        return slot + (slot < cursor ? before_cursor : from_cursor);
    }
};

/// Draw slots, with importance weights `(leaf / smallest leaf above zero) ** -beta` and generations.
template <typename Weight>
void sample(const SumTree& tree, const double* uniforms, std::int64_t n, double beta,
            const Generations& generations, std::int64_t* slots, Weight* weights, std::int64_t* out) {
    constexpr std::int64_t kChunk = 256;
    std::array<double, kChunk> leaves{};
    const double smallest = tree.minimum();
    for (std::int64_t first = 0; first < n; first += kChunk) {
        const std::int64_t k = std::min(kChunk, n - first);
        tree.draw(uniforms + first, k, slots + first, leaves.data());
        for (double& leaf : leaves) leaf /= smallest;
        pow_in_place(leaves.data(), k, -beta);
        std::copy_n(leaves.data(), k, weights + first);
        for (std::int64_t i = first; i < first + k; ++i) out[i] = generations.of(slots[i]);
    }
}

/// The priorities of all rows, and how a priority becomes a leaf of the tree.
struct Priorities {
    double* values;      // as they were given, one for each leaf
    const Flag* hidden;  // rows whose leaf stays 0; null: none
    std::int64_t rows;   // slots from here on hold no row
    double eps;
    double alpha;

    /// Replace priorities by leaves `(p + eps) ** alpha`, 0 where `p + eps` is 0, also for `alpha = 0`.
    void to_leaves(double* p, std::int64_t n) const {
        for (std::int64_t i = 0; i < n; ++i) p[i] += eps;
        if (alpha == 0) {
            std::transform(p, p + n, p, [](double sum) { return sum > 0 ? 1.0 : 0.0; });
        } else {
            pow_in_place(p, n, alpha);
        }
    }
};

/// The outcome of an update.
struct UpdateResult {
    std::int64_t stale = 0;     // rows that were not updated: they have another generation by now
    double largest_given = 0;   // largest priority that was set
    double largest_before = 0;  // largest priority of the updated rows before (with `want_largest`)
    double largest_after = 0;   // and after (with `want_largest`)
};

/// Sets priorities in order: of equal slots the last one wins. With expected generations only rows that still
/// have them are updated. Raises before anything is written, also for negative slots: Python knows whether -1
/// stands for a row that was not kept.
template <typename Priority>
class PriorityUpdate {
public:
    PriorityUpdate(SumTree& tree, const Priorities& priorities, const std::int64_t* slots,
                   const Priority* given, std::int64_t n)
        : tree_(tree),
          priorities_(priorities),
          slots_(slots),
          given_(given),
          n_(n),
          kept_(std::make_unique_for_overwrite<std::int64_t[]>(static_cast<std::size_t>(n))),
          values_(std::make_unique_for_overwrite<double[]>(static_cast<std::size_t>(n))) {}

    UpdateResult run(const std::int64_t* expected, const Generations& generations, bool want_largest) {
        if (expected != nullptr) {
            keep_current(expected, generations);
        } else {
            keep_present();
        }
        check();
        if (want_largest) result_.largest_before = largest();
        write();
        if (want_largest) result_.largest_after = largest();
        return result_;
    }

private:
    static constexpr std::int64_t kAhead = 32;
    static constexpr double kMaxLeaf = 0x1p960;  // the sum of 2**36 of them is still finite

    void keep_current(const std::int64_t* expected, const Generations& generations) {
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < n_; ++i) {
            const std::int64_t slot = slots_[i];
            if (slot < 0) throw_out_of_range(slot);
            const bool present = slot < priorities_.rows;
            kept_[static_cast<std::size_t>(count)] = slot;  // overwritten unless it counts
            values_[static_cast<std::size_t>(count)] = static_cast<double>(given_[i]);
            const bool current =
                present && expected[i] > generations.none_up_to && generations.of(slot) == expected[i];
            count += current ? 1 : 0;
        }
        count_ = count;
        result_.stale = n_ - count;
    }

    void keep_present() {
        for (std::int64_t i = 0; i < n_; ++i) {
            const std::int64_t slot = slots_[i];
            if (slot < 0 || slot >= priorities_.rows) throw_out_of_range(slot);
            kept_[static_cast<std::size_t>(i)] = slot;
            values_[static_cast<std::size_t>(i)] = static_cast<double>(given_[i]);
        }
        count_ = n_;
    }

    [[noreturn]] void throw_out_of_range(std::int64_t slot) const {
        throw std::out_of_range("index " + std::to_string(slot) + " is out of range for " +
                                std::to_string(priorities_.rows) + " rows");
    }

    void check() {
        bool good = true;
        double largest = 0;
        for (std::int64_t i = 0; i < count_; ++i) {
            const double priority = values_[static_cast<std::size_t>(i)];
            good &= (priority >= 0) & (priority <= std::numeric_limits<double>::max());  // false for NaN
            largest = priority > largest ? priority : largest;
        }
        result_.largest_given = largest;
        priorities_.to_leaves(&largest, 1);
        if (!good || !(largest <= kMaxLeaf)) {
            throw std::invalid_argument("priorities must be finite, at least 0 and small enough");
        }
    }

    void write() {
        double* const all = priorities_.values;
        for (std::int64_t i = 0; i < count_; ++i) {
            if (i + kAhead < count_) prefetch<true>(all + slot(i + kAhead));
            all[slot(i)] = values_[static_cast<std::size_t>(i)] + 0.0;  // -0.0 becomes 0.0
        }
        priorities_.to_leaves(values_.get(), count_);
        for (std::int64_t i = 0; priorities_.hidden != nullptr && i < count_; ++i) {
            if (priorities_.hidden[slot(i)] != 0) values_[static_cast<std::size_t>(i)] = 0.0;
        }
        tree_.set(kept_.get(), values_.get(), count_);
    }

    std::int64_t slot(std::int64_t i) const { return kept_[static_cast<std::size_t>(i)]; }

    double largest() const {
        double largest = 0;
        for (std::int64_t i = 0; i < count_; ++i) {
            largest = std::max(largest, priorities_.values[slot(i)]);
        }
        return largest;
    }

    SumTree& tree_;
    const Priorities& priorities_;
    const std::int64_t* slots_;
    const Priority* given_;
    std::int64_t n_;
    std::unique_ptr<std::int64_t[]> kept_;  // the slots to update: the first `count_`
    std::unique_ptr<double[]> values_;
    std::int64_t count_ = 0;
    UpdateResult result_;
};

}  // namespace ostinato
