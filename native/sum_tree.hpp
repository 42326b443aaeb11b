// The priority tree: sums, smallest and largest of all leaves, and draws by prefix sum. No Python here.
//
// Eight children to a node, side by side: one step of a draw reads one cache line. A parent is always
// recomputed from its children, from left to right: equal leaves give equal sums to the last bit, whatever
// happened before. Prefixes are added up in the same order, so a remainder below a node's sum always finds a
// child above zero.
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

#include "fields.hpp"
#include "platform.hpp"

namespace ostinato {

class SumTree {
public:
    static constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 48;

    explicit SumTree(std::int64_t capacity) : SumTree(capacity, nullptr) {}

    /// A tree in memory of the caller's, of `bytes_for(capacity)` bytes in whole lines: zeros, or the tree
    /// that is there. Null takes memory of its own.
    SumTree(std::int64_t capacity, void* memory) : capacity_(capacity) {
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
        auto begin = reinterpret_cast<Address>(memory);
        if (memory == nullptr) {
            memory_.reset(std::calloc(bytes_ + kLine, 1));  // big blocks of it take no memory until written
            if (memory_ == nullptr) throw std::bad_alloc();
            begin = (reinterpret_cast<Address>(memory_.get()) + kLine - 1) / kLine * kLine;
            if (bytes_ >= kHugeBytes) advise_huge_pages(begin, bytes_);
        }
        leaves_ = reinterpret_cast<double*>(begin);
        auto* block = reinterpret_cast<Block*>(begin + leaf_bytes);
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

    /// Everything above the leaves anew, after somebody died in the middle of an update. Takes no memory.
    void rebuild() {
        auto* above_leaves = reinterpret_cast<unsigned char*>(blocks_[0]);
        std::fill_n(above_leaves, bytes_ - static_cast<std::size_t>(nodes_.front()) * kLine, 0);
        update_range(0, capacity_);
    }

    double* leaves() { return leaves_; }

    std::int64_t capacity() const { return capacity_; }
    std::size_t nbytes() const {
        std::size_t bytes = bytes_;
        for (const std::vector<double>& most : mosts_) bytes += most.size() * sizeof(double);
        return bytes;
    }

    double total() const { return blocks_.back()->sum[0]; }

    /// Largest leaf. Kept up to date from the first question on: until then updates need not pay for it.
    double maximum() {
        if (mosts_.empty()) {
            std::vector<std::vector<double>> mosts;
            for (const std::int64_t nodes : nodes_) {
                mosts.emplace_back(static_cast<std::size_t>(above(nodes) * kFan));
            }
            mosts_ = std::move(mosts);
            update_range(0, capacity_);
        }
        return mosts_.back().front();
    }

    /// Smallest leaf above zero; infinity if there is none.
    double minimum() const {
        const double least = blocks_.back()->least[0];
        return least > 0 ? least : std::numeric_limits<double>::infinity();
    }

    /// Leaves take values in order, so of equal slots the last one wins. Nothing is written if an argument is
    /// bad.
    void set(const std::int64_t* slots, const double* values, std::int64_t n) {
        require_count(n);
        require_in_range(slots, n, capacity_);
        require_values(values, n);
        // Few leaves of many share no lines: in parts, so that parents are done while the cache has their
        // children.
        const std::int64_t most = n < capacity_ / kSparse ? std::min(n, kPart) : n;
        std::vector<std::int64_t> touched(static_cast<std::size_t>(most));
        for (std::int64_t first = 0; first < n; first += most) {
            set_part(slots + first, values + first, std::min(most, n - first), touched.data());
        }
    }

    /// `count` leaves from `start` on, round the end, take one value.
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

    /// Leaf `i` with probability leaf[i] / total; never one of zero. `slots` and `values` hold node and
    /// remainder on the way down: each level asks for the lines of the next, for the whole chunk at once.
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
        for (std::vector<double>& most : mosts_) std::fill(most.begin(), most.end(), 0.0);
    }

    /// The first `n` leaves.
    void copy_to(double* out, std::int64_t n) const {
        require_run(0, n);
        std::copy_n(leaves_, n, out);
    }

    /// The first `n` leaves take these values, all others zero.
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
    static constexpr std::int64_t kAhead = 32;   // leaves asked for before they are written
    static constexpr std::int64_t kChunk = 256;  // draws that go down together: their lines stay in the cache
    static constexpr std::int64_t kDense = 16;   // below that many nodes for each one touched, mark and sort
    static constexpr std::int64_t kSparse = 32;  // leaves for each one written, above which parts pay
    static constexpr std::int64_t kPart = 4096;
    static constexpr std::size_t kHugeBytes = std::size_t{4} << 20;

    /// What eight sibling nodes have: each kind fills one line. Zero in `least`: no leaf above zero.
    struct alignas(kLine) Block {
        double sum[kFan];
        double least[kFan];
    };

    /// The sums of a level, by the node that they belong to.
    struct Lines {
        const double* first;
        std::int64_t stride;

        const double* operator[](std::int64_t node) const { return first + node * stride; }
    };

    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };

    /// Where the children of a level's nodes have their sums.
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

    static void require_count(std::int64_t n) {
        if (n < 0) throw std::invalid_argument("n must be at least 0, got " + std::to_string(n));
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

    void fetch_leaf(std::int64_t slot) const {
        const Block* block = blocks_[0] + slot / (kFan * kFan);
        prefetch<true>(leaves_ + slot);
        prefetch<true>(block->sum);
        prefetch<true>(block->least);
    }

    /// What `update_sum` will read and write. (Near the leaves a large batch has lost its first lines by
    /// then.)
    void fetch_family(std::size_t level, std::int64_t node) const {
        prefetch<false>(lines_below(level)[node]);
        prefetch<true>(blocks_[level][node / kFan].sum);
    }

    /// Append, unless the last one is the same. The list may grow over what it is made from: it is never
    /// longer.
    static void push(std::int64_t* list, std::int64_t& count, std::int64_t node) {
        if (count == 0 || list[count - 1] != node) list[count++] = node;
    }

    /// Sorts without repeats, through one bit for each node of the level.
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

    /// `touched` is room for `n` nodes.
    void set_part(const std::int64_t* slots, const double* values, std::int64_t n, std::int64_t* touched) {
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < std::min(n, kAhead); ++i) fetch_leaf(slots[i]);
        for (std::int64_t i = 0; i < n; ++i) {
            if (i + kAhead < n) fetch_leaf(slots[i + kAhead]);
            const double old = std::exchange(leaves_[slots[i]], values[i] + 0.0);  // -0.0 becomes 0.0
            lower(slots[i] / kFan, old, leaves_[slots[i]]);
            push(touched, count, slots[i] / kFan);
        }
        bool sorted = false;
        for (std::size_t level = 0; level < nodes_.size(); ++level) {
            if (!sorted && nodes_[level] / kDense <= count) {
                count = sort_nodes(touched, count, nodes_[level]);
                sorted = true;
            }
            count = update_level(level, touched, count);
        }
    }

    /// Recomputes the listed nodes of a level; the list becomes that of their parents.
    std::int64_t update_level(std::size_t level, std::int64_t* list, std::int64_t count) {
        std::int64_t parents = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t node = list[i];
            if (i + kAhead < count) fetch_family(level, list[i + kAhead]);
            update_sum(level, node);
            push(list, parents, node / kFan);
        }
        return parents;
    }

    /// Recomputes everything above leaves [begin, end).
    void update_range(std::int64_t begin, std::int64_t end) {
        for (std::size_t level = 0; level < nodes_.size(); ++level) {
            begin /= kFan;
            end = above(end);
            for (std::int64_t node = begin; node < end; ++node) update(level, node);
        }
    }

    void update(std::size_t level, std::int64_t node) {
        blocks_[level][node / kFan].least[node % kFan] =
            least_of(level > 0 ? blocks_[level - 1][node].least : leaves_ + node * kFan);
        update_sum(level, node);
    }

    void update_sum(std::size_t level, std::int64_t node) {
        const double* sums = level > 0 ? blocks_[level - 1][node].sum : leaves_ + node * kFan;
        double sum = sums[0];
        for (std::int64_t i = 1; i < kFan; ++i) sum += sums[i];
        blocks_[level][node / kFan].sum[node % kFan] = sum;
        if (mosts_.empty()) return;
        const double* mosts = level > 0 ? mosts_[level - 1].data() + node * kFan : sums;
        mosts_[level][static_cast<std::size_t>(node)] = most_of(mosts);
    }

    /// A child of a node of the lowest level has a new smallest value. Most nodes have a smaller one: there
    /// it ends.
    void lower(std::int64_t node, double old, double value) {
        for (std::size_t level = 0; level < nodes_.size() && value != old; ++level, node /= kFan) {
            double& least = blocks_[level][node / kFan].least[node % kFan];
            const double before = least;
            if (value > 0 && (value < before || before == 0)) {
                least = value;
            } else if (old == before) {  // it was the smallest one: which is it now?
                least = least_of(level > 0 ? blocks_[level - 1][node].least : leaves_ + node * kFan);
            } else {
                return;
            }
            old = before;
            value = least;
        }
    }

    /// Smallest above zero; zero if there is none.
    static double least_of(const double* v) {
        constexpr double none = std::numeric_limits<double>::infinity();
        const auto least = [](double a, double b) { return a < b ? a : b; };
        double w[kFan];
        for (std::int64_t i = 0; i < kFan; ++i) w[i] = v[i] > 0 ? v[i] : none;
        const double found =
            least(least(least(w[0], w[4]), least(w[2], w[6])), least(least(w[1], w[5]), least(w[3], w[7])));
        return found < none ? found : 0.0;
    }

    static double most_of(const double* v) {
        const auto most = [](double a, double b) { return a > b ? a : b; };
        return most(most(most(v[0], v[4]), most(v[2], v[6])), most(most(v[1], v[5]), most(v[3], v[7])));
    }

    static void start_draws(const double* uniforms, std::int64_t n, double sum, std::int64_t* nodes,
                            double* rest) {
        for (std::int64_t i = 0; i < n; ++i) {
            const double at = uniforms[i] * sum;
            nodes[i] = 0;
            rest[i] = below(at > 0 ? at : 0.0, sum);
        }
    }

    /// Each node of a level becomes its child that holds the remainder; that child's line is asked for.
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

    /// `at`, or the largest number below `end` where rounding took it there. (`end` is above zero.)
    static double below(double at, double end) {
        return at < end ? at : std::bit_cast<double>(std::bit_cast<std::uint64_t>(end) - 1);
    }

    std::int64_t capacity_;
    std::size_t bytes_ = 0;
    std::vector<std::int64_t> nodes_;  // of each level above the leaves
    std::unique_ptr<void, Free> memory_;
    double* leaves_ = nullptr;
    std::vector<Block*> blocks_;
    std::vector<std::vector<double>> mosts_;  // of each level above the leaves, once asked for
};

}  // namespace ostinato
