// The sum tree of priorities: sums, smallest and largest of all leaves, and draws by prefix sum. No Python
// here.
//
// A node has eight children, side by side: one step of a draw reads one cache line. A parent is always
// recomputed from its children, from left to right: equal leaves give sums that are equal to the last bit,
// whatever was written before. Prefix sums are added in the same order, so a remainder below a node's sum
// always belongs to a child above zero.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "memory.hpp"
#include "platform.hpp"

namespace ostinato {

class SumTree {
public:
    static constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 48;

    explicit SumTree(std::int64_t capacity) : SumTree(capacity, nullptr) {}

    /// A tree in `bytes_for(capacity)` bytes of the caller, aligned to a cache line: zeros, or an existing
    /// tree. Null: the tree allocates its memory.
    SumTree(std::int64_t capacity, Byte* memory) : capacity_(capacity) {
        std::size_t blocks = 0;
        std::vector<std::size_t> firsts;
        for (std::int64_t nodes = above(checked(capacity));; nodes = above(nodes)) {
            nodes_.push_back(nodes);
            firsts.push_back(blocks);
            blocks += static_cast<std::size_t>(above(nodes));
            if (nodes == 1) break;
        }
        const auto leaf_bytes = static_cast<std::size_t>(nodes_.front()) * kLine;
        bytes_ = leaf_bytes + blocks * sizeof(Block);
        if (memory == nullptr) memory = allocate();
        leaves_ = reinterpret_cast<double*>(memory);
        auto* block = reinterpret_cast<Block*>(memory + leaf_bytes);
        for (const std::size_t first : firsts) blocks_.push_back(block + first);
    }

    /// Bytes of a tree of this capacity.
    static std::size_t bytes_for(std::int64_t capacity) {
        std::size_t bytes = static_cast<std::size_t>(above(checked(capacity))) * kLine;
        for (std::int64_t nodes = above(capacity);; nodes = above(nodes)) {
            bytes += static_cast<std::size_t>(above(nodes)) * sizeof(Block);
            if (nodes == 1) return bytes;
        }
    }

    /// Recompute everything above the leaves, after a process died during an update. Allocates no memory.
    void rebuild() {
        auto* above_leaves = reinterpret_cast<unsigned char*>(blocks_[0]);
        std::fill_n(above_leaves, bytes_ - static_cast<std::size_t>(nodes_.front()) * kLine, 0);
        update_range(0, capacity_);
    }

    double* leaves() { return leaves_; }

    std::int64_t capacity() const { return capacity_; }
    std::size_t nbytes() const {
        std::size_t bytes = bytes_;
        for (const std::vector<double>& level : maxima_) bytes += level.size() * sizeof(double);
        return bytes;
    }

    double total() const { return blocks_.back()->sum[0]; }

    /// Largest leaf. Kept up to date from the first call on: earlier updates do not pay for it.
    double maximum() {
        if (maxima_.empty()) {
            std::vector<std::vector<double>> maxima;
            for (const std::int64_t nodes : nodes_) {
                maxima.emplace_back(static_cast<std::size_t>(above(nodes) * kFan));
            }
            maxima_ = std::move(maxima);
            update_range(0, capacity_);
        }
        return maxima_.back().front();
    }

    /// Smallest leaf above zero; infinity if there is none.
    double minimum() const {
        const double smallest = blocks_.back()->min[0];
        return smallest > 0 ? smallest : std::numeric_limits<double>::infinity();
    }

    /// Write leaves in order: of equal slots the last one wins. Raises before anything is written.
    void set(const std::int64_t* slots, const double* values, std::int64_t n) {
        require_count(n);
        require_in_range(slots, n, capacity_);
        require_values(values, n);
        // A few leaves of many share no lines: in parts, so that the children are still in the cache when
        // their parents are recomputed.
        const std::int64_t part = n < capacity_ / kSparse ? std::min(n, kPart) : n;
        std::vector<std::int64_t> changed(static_cast<std::size_t>(part));
        for (std::int64_t first = 0; first < n; first += part) {
            set_part(slots + first, values + first, std::min(part, n - first), changed.data());
        }
    }

    /// Write one value to the leaves `(start + i) % capacity`, `i < count`.
    void set_run(std::int64_t start, std::int64_t count, double value) {
        require_run(start, count);
        require_values(&value, 1);
        if (count == 0) return;
        const std::int64_t end = std::min(start + count, capacity_);
        const std::int64_t wrapped = count - (end - start);
        std::fill(leaves_ + start, leaves_ + end, value + 0.0);
        std::fill(leaves_, leaves_ + wrapped, value + 0.0);
        update_range(start, end);
        if (wrapped > 0) update_range(0, wrapped);
    }

    void get(const std::int64_t* slots, std::int64_t n, double* out) const {
        require_count(n);
        require_in_range(slots, n, capacity_);
        for (std::int64_t i = 0; i < n; ++i) {
            if (i + kAhead < n) prefetch<false>(leaves_ + slots[i + kAhead]);
            out[i] = leaves_[slots[i]];
        }
    }

    /// Draw leaf `i` with probability leaf[i] / total, never a leaf of zero. On the way down `slots` and
    /// `values` hold nodes and remainders; each level prefetches the lines of the next for a whole chunk.
    void draw(const double* uniforms, std::int64_t n, std::int64_t* slots, double* values) const {
        require_count(n);
        const double sum = total();
        if (!(sum > 0 && sum <= std::numeric_limits<double>::max())) {
            throw std::invalid_argument("priorities must sum to a finite number above 0, got " +
                                        std::to_string(sum) + ": there is nothing to draw");
        }
        for (std::int64_t first = 0; first < n; first += kChunk) {
            const std::int64_t k = std::min(kChunk, n - first);
            start_draws(uniforms + first, k, sum, slots + first, values + first);
            for (std::size_t level = nodes_.size(); level-- > 0;) {
                descend(level, k, slots + first, values + first);
            }
            for (std::int64_t i = first; i < first + k; ++i) values[i] = leaves_[slots[i]];
        }
    }

    void clear() {
        std::fill_n(reinterpret_cast<unsigned char*>(leaves_), bytes_, 0);
        for (std::vector<double>& level : maxima_) std::fill(level.begin(), level.end(), 0.0);
    }

    /// Copy the first `n` leaves.
    void copy_to(double* out, std::int64_t n) const {
        require_run(0, n);
        std::copy_n(leaves_, n, out);
    }

    /// Set the first `n` leaves, and all others to zero.
    void load(const double* values, std::int64_t n) {
        require_run(0, n);
        require_values(values, n);
        clear();
        for (std::int64_t i = 0; i < n; ++i) leaves_[i] = values[i] + 0.0;
        if (n > 0) update_range(0, n);
    }

private:
    static constexpr std::int64_t kFan = 8;
    static constexpr std::size_t kLine = 64;
    static constexpr std::int64_t kAhead = 32;   // leaves prefetched before they are written
    static constexpr std::int64_t kChunk = 256;  // draws that go down together: their lines fit the cache
    static constexpr std::int64_t kDense = 16;  // up to that many nodes for each changed one, sort by marking
    static constexpr std::int64_t kSparse = 32;  // from that many leaves for each written one, write in parts
    static constexpr std::int64_t kPart = 4096;
    static constexpr std::size_t kHugeBytes = std::size_t{4} << 20;

    /// Eight sibling nodes: sums fill one line, minima another. A minimum of zero: no leaf above zero.
    struct alignas(kLine) Block {
        double sum[kFan];
        double min[kFan];
    };

    /// The sums of a level, by the parent node.
    struct Lines {
        const double* first;
        std::int64_t stride;

        const double* operator[](std::int64_t node) const { return first + node * stride; }
    };

    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };

    /// The sums of the children of a level's nodes.
    Lines lines_below(std::size_t level) const {
        if (level == 0) return {leaves_, kFan};
        return {blocks_[level - 1]->sum, static_cast<std::int64_t>(sizeof(Block) / sizeof(double))};
    }

    static std::int64_t above(std::int64_t nodes) { return (nodes + kFan - 1) / kFan; }

    static std::int64_t checked(std::int64_t capacity) {
        if (capacity < 1 || capacity > kMaxCapacity) {
            throw std::invalid_argument("capacity must be in [1, 2**48], got " + std::to_string(capacity));
        }
        return capacity;
    }

    /// Memory of zeros, aligned to a line. Large blocks take no pages until written.
    Byte* allocate() {
        memory_.reset(std::calloc(bytes_ + kLine, 1));
        if (memory_ == nullptr) throw std::bad_alloc();
        const auto begin = reinterpret_cast<std::uintptr_t>(memory_.get());
        auto* const aligned = static_cast<Byte*>(memory_.get()) + (kLine - begin % kLine) % kLine;
        if (bytes_ >= kHugeBytes) advise_huge_pages(aligned, bytes_);
        return aligned;
    }

    static void require_values(const double* values, std::int64_t n) {
        bool good = true;
        for (std::int64_t i = 0; i < n; ++i) good &= is_value(values[i]);
        if (good) return;
        const std::int64_t bad = std::find_if_not(values, values + n, is_value) - values;
        throw std::invalid_argument("values must be finite and at least 0, got " +
                                    std::to_string(values[bad]) + " at position " + std::to_string(bad));
    }

    static bool is_value(double v) { return (v >= 0) & (v <= std::numeric_limits<double>::max()); }

    void require_run(std::int64_t start, std::int64_t count) const {
        require_in_range(&start, 1, capacity_);
        if (count < 0 || count > capacity_) {
            throw std::invalid_argument("a run must have 0 to " + std::to_string(capacity_) +
                                        " leaves (capacity), got " + std::to_string(count));
        }
    }

    void prefetch_leaf(std::int64_t slot) const {
        const Block* block = blocks_[0] + slot / (kFan * kFan);
        prefetch<true>(leaves_ + slot);
        prefetch<true>(block->sum);
        prefetch<true>(block->min);
    }

    /// Prefetch the lines that `update_sum` reads and writes. (Near the leaves a large batch has pushed its
    /// first lines out of the cache by then.)
    void prefetch_node(std::size_t level, std::int64_t node) const {
        prefetch<false>(lines_below(level)[node]);
        prefetch<true>(blocks_[level][node / kFan].sum);
    }

    /// Append a node unless it is the last one. The list may overwrite the list that it is made from: it is
    /// never longer.
    static void push(std::int64_t* list, std::int64_t& count, std::int64_t node) {
        if (count == 0 || list[count - 1] != node) list[count++] = node;
    }

    /// Sort a list without repeats, with one bit for each node of the level.
    static std::int64_t sort_nodes(std::int64_t* list, std::int64_t count, std::int64_t nodes) {
        std::vector<std::uint64_t> marks(static_cast<std::size_t>(nodes / 64 + 1));
        for (std::int64_t i = 0; i < count; ++i) {
            marks[static_cast<std::size_t>(list[i] / 64)] |= std::uint64_t{1} << (list[i] % 64);
        }
        std::int64_t found = 0;
        for (std::size_t word = 0; word < marks.size(); ++word) {
            for (std::uint64_t left = marks[word]; left != 0; left &= left - 1) {
                list[found++] = static_cast<std::int64_t>(word) * 64 + std::countr_zero(left);
            }
        }
        return found;
    }

    /// `changed` has room for `n` nodes.
    void set_part(const std::int64_t* slots, const double* values, std::int64_t n, std::int64_t* changed) {
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < std::min(n, kAhead); ++i) prefetch_leaf(slots[i]);
        for (std::int64_t i = 0; i < n; ++i) {
            if (i + kAhead < n) prefetch_leaf(slots[i + kAhead]);
            const double old = std::exchange(leaves_[slots[i]], values[i] + 0.0);  // -0.0 becomes 0.0
            update_min(slots[i] / kFan, old, leaves_[slots[i]]);
            push(changed, count, slots[i] / kFan);
        }
        bool sorted = false;
        for (std::size_t level = 0; level < nodes_.size(); ++level) {
            if (!sorted && nodes_[level] / kDense <= count) {
                count = sort_nodes(changed, count, nodes_[level]);
                sorted = true;
            }
            count = update_level(level, changed, count);
        }
    }

    /// Recompute the listed nodes of a level. The list becomes that of their parents.
    std::int64_t update_level(std::size_t level, std::int64_t* list, std::int64_t count) {
        std::int64_t parents = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t node = list[i];
            if (i + kAhead < count) prefetch_node(level, list[i + kAhead]);
            update_sum(level, node);
            push(list, parents, node / kFan);
        }
        return parents;
    }

    /// Recompute everything above the leaves [begin, end).
    void update_range(std::int64_t begin, std::int64_t end) {
        for (std::size_t level = 0; level < nodes_.size(); ++level) {
            begin /= kFan;
            end = above(end);
            for (std::int64_t node = begin; node < end; ++node) update(level, node);
        }
    }

    void update(std::size_t level, std::int64_t node) {
        blocks_[level][node / kFan].min[node % kFan] =
            smallest_of(level > 0 ? blocks_[level - 1][node].min : leaves_ + node * kFan);
        update_sum(level, node);
    }

    void update_sum(std::size_t level, std::int64_t node) {
        const double* sums = level > 0 ? blocks_[level - 1][node].sum : leaves_ + node * kFan;
        double sum = sums[0];
        for (std::int64_t i = 1; i < kFan; ++i) sum += sums[i];
        blocks_[level][node / kFan].sum[node % kFan] = sum;
        if (maxima_.empty()) return;
        const double* maxima = level > 0 ? maxima_[level - 1].data() + node * kFan : sums;
        maxima_[level][static_cast<std::size_t>(node)] = largest_of(maxima);
    }

    /// Update the minima above a leaf that changed from `old` to `value`. Most changes end at a node that has
    /// a smaller leaf.
    void update_min(std::int64_t node, double old, double value) {
        for (std::size_t level = 0; level < nodes_.size() && value != old; ++level, node /= kFan) {
            double& smallest = blocks_[level][node / kFan].min[node % kFan];
            const double before = smallest;
            if (value > 0 && (value < before || before == 0)) {
                smallest = value;
            } else if (old == before) {  // the changed child was the smallest: search all children
                smallest = smallest_of(level > 0 ? blocks_[level - 1][node].min : leaves_ + node * kFan);
            } else {
                return;
            }
            old = before;
            value = smallest;
        }
    }

    /// Smallest above zero; zero if there is none.
    static double smallest_of(const double* v) {
        constexpr double none = std::numeric_limits<double>::infinity();
        const auto min = [](double a, double b) { return a < b ? a : b; };
        double w[kFan];
        for (std::int64_t i = 0; i < kFan; ++i) w[i] = v[i] > 0 ? v[i] : none;
        const double found =
            min(min(min(w[0], w[4]), min(w[2], w[6])), min(min(w[1], w[5]), min(w[3], w[7])));
        return found < none ? found : 0.0;
    }

    static double largest_of(const double* v) {
        const auto max = [](double a, double b) { return a > b ? a : b; };
        return max(max(max(v[0], v[4]), max(v[2], v[6])), max(max(v[1], v[5]), max(v[3], v[7])));
    }

    static void start_draws(const double* uniforms, std::int64_t n, double sum, std::int64_t* nodes,
                            double* rest) {
        for (std::int64_t i = 0; i < n; ++i) {
            const double at = uniforms[i] * sum;
            nodes[i] = 0;
            rest[i] = below(at > 0 ? at : 0.0, sum);
        }
    }

    /// Replace each node of a level by the child to which its remainder belongs, and prefetch its line.
    void descend(std::size_t level, std::int64_t n, std::int64_t* nodes, double* rest) const {
        const Lines from = lines_below(level);
        const Lines next = lines_below(level > 0 ? level - 1 : 0);
        for (std::int64_t i = 0; i < n; ++i) {
            const double* line = from[nodes[i]];
            const double at = rest[i];
            double before[kFan];
            before[0] = 0;
            std::int64_t child = 0;
            for (std::int64_t c = 1; c < kFan; ++c) {
                before[c] = before[c - 1] + line[c - 1];
                child += before[c] <= at ? 1 : 0;
            }
            nodes[i] = nodes[i] * kFan + child;
            rest[i] = below(at - before[child], line[child]);
            if (level > 0) prefetch<false>(next[nodes[i]]);
        }
    }

    /// `at`, or the largest number below `end` if rounding reached it. (`end` is above zero.)
    static double below(double at, double end) {
        return at < end ? at : std::bit_cast<double>(std::bit_cast<std::uint64_t>(end) - 1);
    }

    std::int64_t capacity_;
    std::size_t bytes_ = 0;
    std::vector<std::int64_t> nodes_;  // of each level above the leaves
    std::unique_ptr<void, Free> memory_;
    double* leaves_ = nullptr;
    std::vector<Block*> blocks_;
    std::vector<std::vector<double>> maxima_;  // of each level above the leaves, after maximum()
};

}  // namespace ostinato
