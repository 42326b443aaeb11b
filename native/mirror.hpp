// Next observations that are stored once. The next observation of a row is the observation of the row that
// follows it (`lanes` slots on), or lies apart in a side row of its own; `apart` says which, slot by slot.
//
// One writer at a time (the caller's lock), any number of readers beside it. What a reader relies on:
// - side rows lie in chunks that are never moved or freed, so that no stale number leads out of memory;
// - a slot says kFollows only while the slot that follows it holds the same bytes: before those change, the
//   writer gives the row a side row and says so;
// - a side row that is filled anew first gets another version; a slot lets go of it before that.
// So a reader copies, then looks at the slot and the version again, and copies anew where either has changed.
// A row whose own slot is written meanwhile may still come out torn: that the caller finds out by its stamps.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cover.hpp"
#include "fields.hpp"
#include "gather.hpp"

namespace ostinato {

class Mirror {
public:
    static constexpr std::int32_t kFollows = -1;  // the next observation is the observation that follows
    static constexpr std::int32_t kNothing = -2;  // no row
    static constexpr std::int64_t kLacking = -1;  // compare: a source lies in guarded memory

    Mirror(std::int64_t capacity, std::int64_t lanes, std::int64_t chunk_rows, Address apart)
        : capacity_(capacity),
          lanes_(lanes),
          chunk_rows_(chunk_rows),
          apart_(at_address<std::int32_t>(apart)) {
        const bool fits = capacity >= 1 && capacity <= std::numeric_limits<std::int32_t>::max() &&
                          lanes >= 1 && lanes <= capacity && chunk_rows >= 1 && apart != 0;
        if (!fits) {
            throw std::invalid_argument(
                "capacity must be in [1, 2**31), lanes in [1, capacity], chunk_rows at least 1 and apart an "
                "address");
        }
        versions_.resize(static_cast<std::size_t>((capacity + chunk_rows - 1) / chunk_rows));
    }

    /// Observations that lie side by side: `base` of the first one, and the bytes of them all.
    std::size_t add_group(Address base, std::int64_t stride, std::int64_t bytes) {
        if (base == 0 || bytes < 1 || stride < bytes) {
            throw std::invalid_argument("a group needs an address, bytes and a stride of at least these");
        }
        Group group{
            at_address<Byte>(base), static_cast<std::size_t>(stride), static_cast<std::size_t>(bytes), {}};
        group.chunks.resize(versions_.size());
        groups_.push_back(std::move(group));
        return groups_.size() - 1;
    }

    /// A field of a group; fields are numbered as they come.
    std::size_t add_leaf(std::size_t group, std::int64_t offset, std::int64_t bytes) {
        if (group >= groups_.size() || offset < 0 || bytes < 1 ||
            static_cast<std::size_t>(offset + bytes) > groups_[group].bytes) {
            throw std::invalid_argument("a field must lie in a group");
        }
        leaves_.push_back({group, static_cast<std::size_t>(offset), static_cast<std::size_t>(bytes)});
        return leaves_.size() - 1;
    }

    /// Memory that sources of a write must not lie in.
    void guard(Address base, std::uint64_t bytes) {
        require_address(base, bytes > 0, "base");
        guarded_.add(span_of(base, 1, bytes));
    }

    /// Add `chunk_rows` side rows: memory for each group.
    void add_chunk(const std::vector<Address>& bases) {
        if (bases.size() != groups_.size() ||
            std::find(bases.begin(), bases.end(), Address{0}) != bases.end()) {
            throw std::invalid_argument("a chunk needs an address for each group");
        }
        const auto chunk = static_cast<std::size_t>(room() / chunk_rows_);
        if (chunk >= versions_.size())
            throw std::invalid_argument("there is a side row for every slot already");
        free_.reserve(static_cast<std::size_t>(room() + chunk_rows_));  // giving back a row then never fails
        versions_[chunk] = std::make_unique<std::uint32_t[]>(static_cast<std::size_t>(chunk_rows_));
        for (std::size_t g = 0; g < groups_.size(); ++g) {
            groups_[g].chunks[chunk] = at_address<Byte>(bases[g]);
            guarded_.add(span_of(bases[g], static_cast<std::uint64_t>(chunk_rows_), groups_[g].bytes));
        }
        const std::int64_t first = room();
        for (std::int64_t row = first + chunk_rows_; row-- > first;)
            free_.push_back(static_cast<std::int32_t>(row));
        room_.store(first + chunk_rows_, std::memory_order_release);
    }

    std::int64_t room() const { return room_.load(std::memory_order_acquire); }
    std::int64_t used() const { return room() - static_cast<std::int64_t>(free_.size()); }
    std::size_t leaf_count() const { return leaves_.size(); }
    std::size_t row_bytes() const {
        std::size_t bytes = 0;
        for (const Leaf& leaf : leaves_) bytes += leaf.bytes;
        return bytes;
    }
    std::int64_t nbytes() const {
        return room() * static_cast<std::int64_t>(sizeof(std::uint32_t)) +
               static_cast<std::int64_t>(free_.capacity() * sizeof(std::int32_t));
    }

    /// Forget all rows.
    void clear() {
        std::fill(apart_, apart_ + capacity_, kNothing);
        free_.clear();
        for (std::int64_t row = room(); row-- > 0;) free_.push_back(static_cast<std::int32_t>(row));
    }

    /// Before rows are written from slot `cursor` on: `agree[i]` says whether the next observation of row i
    /// of the batch is the observation of the row that follows it in the batch, `relink[j]` whether
    /// observation j is what lies apart for the row before it. Returns the side rows that the batch will
    /// take, or kLacking.
    std::int64_t compare(std::int64_t cursor, std::int64_t total, const std::vector<Address>& obs,
                         const std::vector<Address>& nexts, Byte* agree, Byte* relink) const {
        check_leaves(obs);
        check_leaves(nexts);
        require_in_range(&cursor, 1, capacity_);
        for (std::size_t f = 0; f < leaves_.size(); ++f) {
            if (guarded_.overlaps(span_of(nexts[f], static_cast<std::uint64_t>(total), leaves_[f].bytes)))
                return kLacking;
        }
        std::int64_t need = 0;
        for (std::int64_t i = 0; i < total; ++i) {
            agree[i] = i + lanes_ < total && same(nexts, i, obs, i + lanes_);
            if (i >= total - capacity_) need += agree[i] == 0;
        }
        for (std::int64_t j = 0; j < std::min(lanes_, total); ++j) {
            const std::int32_t row = apart_[before(wrap(cursor + j))];
            relink[j] = row >= 0 && same_as_side(row, obs, j);
            need += row == kFollows;  // to be detached first
        }
        return need;
    }

    /// Before the slots `(start + i) % capacity` get other observations: the rows before them that are not
    /// written themselves get side rows, and `spare` more stay free. Returns how many side rows lack for
    /// that; nothing has changed then. One for each slot is always enough.
    std::int64_t detach_run(std::int64_t start, std::int64_t n, std::int64_t spare) {
        check_run(start, n);
        std::vector<std::int64_t> rows;
        for (std::int64_t j = 0; j < std::min(lanes_, n); ++j) {
            const std::int64_t row = before(wrap(start + j));
            if (apart_[row] == kFollows && wrap(row - start + capacity_) >= n) rows.push_back(row);
        }
        if (rows.empty()) return 0;
        const auto free = static_cast<std::int64_t>(free_.size());
        const auto lacking =
            std::min(static_cast<std::int64_t>(rows.size()) + spare - free, capacity_ - room());
        if (lacking > 0) return lacking;
        for (const std::int64_t row : rows) {
            fill(row, [&](const Leaf& leaf, std::size_t) { return main_row(leaf, after(row)); });
        }
        return 0;
    }

    /// After rows `skip + i` were written to the slots `(start + i) % capacity`. There must be side rows
    /// enough.
    void link_run(std::int64_t start, std::int64_t n, std::int64_t skip, const std::vector<Address>& nexts,
                  const Byte* agree, const Byte* relink) {
        check_leaves(nexts);
        check_run(start, n);
        for (std::int64_t j = 0; relink != nullptr && j < std::min(lanes_, n); ++j) {
            const std::int64_t row = before(wrap(start + j));
            if (relink[j] != 0 && apart_[row] >= 0 && wrap(row - start + capacity_) >= n) follow(row);
        }
        for (std::int64_t i = 0; i < n; ++i) {
            const std::int64_t slot = wrap(start + i);
            if (agree[skip + i] != 0) {
                follow(slot);
            } else {
                put(slot, nexts, skip + i);
            }
        }
    }

    /// Give the rows at `slots` side rows with the next observations `nexts`, in order.
    void put_rows(const std::int64_t* slots, std::int64_t n, const std::vector<Address>& nexts) {
        check_leaves(nexts);
        require_in_range(slots, n, capacity_);
        for (std::int64_t i = 0; i < n; ++i) put(slots[i], nexts, i);
    }

    /// Say of the rows at `slots` that their next observation is the one that follows.
    void drop_rows(const std::int64_t* slots, std::int64_t n) {
        require_in_range(slots, n, capacity_);
        for (std::int64_t i = 0; i < n; ++i) follow(slots[i]);
    }

    /// Copy next observations of the rows at `slots`; where `pick` (if given) is 0, observations.
    void read(const std::vector<std::size_t>& leaves, const std::int64_t* slots, const Byte* pick,
              std::int64_t n, const std::vector<Address>& outs) const {
        require_in_range(slots, n, capacity_);
        for (const std::size_t leaf : leaves) {
            if (leaf >= leaves_.size()) throw std::invalid_argument("there is no such field");
        }
        if (outs.size() != leaves.size())
            throw std::invalid_argument("outs must hold an address for each field");
        std::vector<Seen> seen(static_cast<std::size_t>(n));
        ask_for(slots, n);
        for (std::int64_t i = 0; i < n; ++i) {
            if (pick == nullptr || pick[i] != 0) seen[at(i)] = look(slots[i]);
        }
        std::atomic_thread_fence(std::memory_order_acquire);
        copy_all(leaves, slots, seen, n, outs);
        std::atomic_thread_fence(std::memory_order_acquire);
        for (std::int64_t i = 0; i < n; ++i) {
            if (pick == nullptr || pick[i] != 0) settle(leaves, slots[i], i, seen[at(i)], outs);
        }
    }

private:
    struct Group {
        Byte* base;
        std::size_t stride;
        std::size_t bytes;  // of a side row
        std::vector<Byte*> chunks;
    };
    struct Leaf {
        std::size_t group, offset, bytes;
    };
    /// What a slot said: `apart` kNothing stands for the observation itself.
    struct Seen {
        std::int32_t apart = kNothing;
        std::uint32_t version = 0;
    };

    static constexpr int kTries = 16;  // a row that changes more often has been written: its stamp says so

    static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
    std::int64_t wrap(std::int64_t slot) const { return slot >= capacity_ ? slot % capacity_ : slot; }
    std::int64_t before(std::int64_t slot) const {
        return slot >= lanes_ ? slot - lanes_ : slot - lanes_ + capacity_;
    }
    std::int64_t after(std::int64_t slot) const { return wrap(slot + lanes_); }

    // Readers look at these while the writer writes them: one load each, not kept in a register.
    std::int32_t apart_of(std::int64_t slot) const {
        return *const_cast<const volatile std::int32_t*>(apart_ + slot);
    }
    std::uint32_t version_of(std::int32_t row) const {
        const volatile std::uint32_t* versions = versions_[at(row / chunk_rows_)].get();
        return versions[row % chunk_rows_];
    }

    Byte* main_row(const Leaf& leaf, std::int64_t slot) const {
        const Group& group = groups_[leaf.group];
        return group.base + at(slot) * group.stride + leaf.offset;
    }
    Byte* side_row(const Group& group, std::int32_t row) const {
        return group.chunks[at(row / chunk_rows_)] + at(row % chunk_rows_) * group.bytes;
    }
    Byte* side_row(const Leaf& leaf, std::int32_t row) const {
        return side_row(groups_[leaf.group], row) + leaf.offset;
    }
    const Byte* source(Address batch, std::int64_t row, const Leaf& leaf) const {
        return at_address<const Byte>(batch) + at(row) * leaf.bytes;
    }

    void check_leaves(const std::vector<Address>& addresses) const {
        if (addresses.size() != leaves_.size() ||
            std::find(addresses.begin(), addresses.end(), Address{0}) != addresses.end()) {
            throw std::invalid_argument("a write needs an address for each field");
        }
    }

    void check_run(std::int64_t start, std::int64_t n) const {
        require_in_range(&start, 1, capacity_);
        if (n < 0 || n > capacity_) {
            throw std::out_of_range("a run of " + std::to_string(n) + " rows is out of range for " +
                                    std::to_string(capacity_) + " rows");
        }
    }

    bool same(const std::vector<Address>& a, std::int64_t i, const std::vector<Address>& b,
              std::int64_t j) const {
        for (std::size_t f = 0; f < leaves_.size(); ++f) {
            const Leaf& leaf = leaves_[f];
            if (std::memcmp(source(a[f], i, leaf), source(b[f], j, leaf), leaf.bytes) != 0) return false;
        }
        return true;
    }

    bool same_as_side(std::int32_t row, const std::vector<Address>& obs, std::int64_t j) const {
        for (std::size_t f = 0; f < leaves_.size(); ++f) {
            const Leaf& leaf = leaves_[f];
            if (std::memcmp(side_row(leaf, row), source(obs[f], j, leaf), leaf.bytes) != 0) return false;
        }
        return true;
    }

    /// The slot lets go of its side row; what follows it was written before.
    void follow(std::int64_t slot) {
        const std::int32_t row = apart_[slot];
        std::atomic_thread_fence(std::memory_order_release);
        apart_[slot] = kFollows;
        std::atomic_thread_fence(std::memory_order_release);
        if (row >= 0) free_.push_back(row);
    }

    void put(std::int64_t slot, const std::vector<Address>& nexts, std::int64_t i) {
        fill(slot, [&](const Leaf& leaf, std::size_t f) { return source(nexts[f], i, leaf); });
    }

    /// Fill the side row of a slot, its own one if it has one.
    template <typename From>
    void fill(std::int64_t slot, From from) {
        std::int32_t row = apart_[slot];
        if (row < 0) {
            if (free_.empty()) throw std::runtime_error("no side row is left: add a chunk first");
            row = free_.back();
            free_.pop_back();
        }
        ++versions_[at(row / chunk_rows_)][at(row % chunk_rows_)];
        std::atomic_thread_fence(std::memory_order_release);
        for (std::size_t f = 0; f < leaves_.size(); ++f) {
            const Leaf& leaf = leaves_[f];
            std::memcpy(side_row(leaf, row), from(leaf, f), leaf.bytes);
        }
        std::atomic_thread_fence(std::memory_order_release);
        apart_[slot] = row;
    }

    void ask_for(const std::int64_t* slots, std::int64_t n) const {
        for (std::int64_t i = 0; i < n; ++i) prefetch<false>(apart_ + slots[i]);
    }

    Seen look(std::int64_t slot) const {
        const std::int32_t row = apart_of(slot);
        if (row == kFollows) return {row, 0};
        if (row < 0 || row >= room())
            throw std::out_of_range("slot " + std::to_string(slot) + " holds no row");
        return {row, version_of(row)};
    }

    Byte* locate(const Group& group, std::int64_t slot, Seen seen) const {
        if (seen.apart >= 0) return side_row(group, seen.apart);
        return group.base + at(seen.apart == kFollows ? after(slot) : slot) * group.stride;
    }

    void copy_all(const std::vector<std::size_t>& leaves, const std::int64_t* slots,
                  const std::vector<Seen>& seen, std::int64_t n, const std::vector<Address>& outs) const {
        Plan plan;
        std::vector<std::vector<Byte*>> rows(groups_.size());
        for (std::size_t g = 0; g < groups_.size(); ++g) {
            Pass pass;
            pass.steps = n;
            pass.first_column = plan.columns.size();
            for (std::size_t k = 0; k < leaves.size(); ++k) {
                const Leaf& leaf = leaves_[leaves[k]];
                if (leaf.group != g) continue;
                plan.columns.push_back({leaf.offset, leaf.bytes, at_address<Byte>(outs[k])});
                pass.span = std::max(pass.span, leaf.offset + leaf.bytes);
            }
            pass.columns_end = plan.columns.size();
            if (pass.columns_end == pass.first_column) continue;
            rows[g].resize(seen.size());
            for (std::int64_t i = 0; i < n; ++i) rows[g][at(i)] = locate(groups_[g], slots[i], seen[at(i)]);
            pass.located = rows[g].data();
            plan.passes.push_back(pass);
        }
        detail::copy_steps<detail::Way::to_batch>(plan);
    }

    /// Copy row i anew until what its slot says has stayed the same all the while.
    void settle(const std::vector<std::size_t>& leaves, std::int64_t slot, std::int64_t i, Seen seen,
                const std::vector<Address>& outs) const {
        for (int tries = 0; tries < kTries; ++tries) {
            const std::int32_t row = apart_of(slot);
            if (row == seen.apart && (row < 0 || version_of(row) == seen.version)) return;
            seen = look(slot);
            std::atomic_thread_fence(std::memory_order_acquire);
            for (std::size_t k = 0; k < leaves.size(); ++k) {
                const Leaf& leaf = leaves_[leaves[k]];
                std::memcpy(at_address<Byte>(outs[k]) + at(i) * leaf.bytes,
                            locate(groups_[leaf.group], slot, seen) + leaf.offset, leaf.bytes);
            }
            std::atomic_thread_fence(std::memory_order_acquire);
        }
    }

    std::int64_t capacity_, lanes_, chunk_rows_;
    std::int32_t* apart_;
    std::vector<Group> groups_;
    std::vector<Leaf> leaves_;
    std::vector<std::unique_ptr<std::uint32_t[]>> versions_;
    std::vector<std::int32_t> free_;
    std::atomic<std::int64_t> room_{0};
    Cover guarded_;
};

}  // namespace ostinato
