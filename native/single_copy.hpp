// Next observations that are stored once ("single copy"). The next observation of a row is the observation of
// the row that follows it, `num_envs` slots on, or it is stored in a side row. `side_rows` says which, slot
// by slot.
//
// One writer at a time (the caller's lock), any number of readers beside it. Readers rely on this:
// - side rows are in chunks that are never moved or freed, so a stale number never leads out of memory;
// - a slot is kLinked only while the slot that follows it holds the same bytes: before these change, the
//   writer gives the row a side row;
// - a side row gets a new version before it is filled again, and no slot refers to it at that moment.
// A reader copies, then reads the slot and the version again, and repeats the copy where either has changed.
// If the row's own slot is written meanwhile, the copy may be torn: the caller compares generations.
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

#include "checks.hpp"
#include "gather.hpp"
#include "intended_races.hpp"
#include "memory.hpp"
#include "platform.hpp"

namespace ostinato {

class SingleCopy {
public:
    static constexpr std::int32_t kLinked = -1;    // the next observation is that of the row that follows
    static constexpr std::int32_t kEmpty = -2;     // no row
    static constexpr std::int64_t kOverlaps = -1;  // compare: a source overlaps guarded memory

    SingleCopy(std::int64_t capacity, std::int64_t num_envs, std::int64_t chunk_rows, std::int32_t* side_rows)
        : capacity_(capacity), num_envs_(num_envs), chunk_rows_(chunk_rows), side_rows_(side_rows) {
        const bool fits = capacity >= 1 && capacity <= std::numeric_limits<std::int32_t>::max() &&
                          num_envs >= 1 && num_envs <= capacity && chunk_rows >= 1 && side_rows != nullptr;
        if (!fits) {
            throw std::invalid_argument(
                "capacity must be in [1, 2**31), num_envs in [1, capacity], chunk_rows at least 1 and "
                "side_rows an address");
        }
        versions_.resize(static_cast<std::size_t>((capacity + chunk_rows - 1) / chunk_rows));
    }

    /// Register observation fields that share rows of `bytes` bytes; `base` is the first field in slot 0.
    std::size_t add_group(Byte* base, std::int64_t stride, std::int64_t bytes) {
        if (base == nullptr || bytes < 1 || stride < bytes) {
            throw std::invalid_argument(
                "a group needs an address, at least 1 byte and a stride of at least its bytes");
        }
        Group group{base, static_cast<std::size_t>(stride), static_cast<std::size_t>(bytes), {}};
        group.chunks.resize(versions_.size());
        groups_.push_back(std::move(group));
        return groups_.size() - 1;
    }

    /// Register a field of a group and return its number: 0, 1, 2, ...
    std::size_t add_field(std::size_t group, std::int64_t offset, std::int64_t bytes) {
        if (group >= groups_.size() || offset < 0 || bytes < 1 ||
            static_cast<std::size_t>(offset + bytes) > groups_[group].bytes) {
            throw std::invalid_argument("a field must be inside a group");
        }
        fields_.push_back({group, static_cast<std::size_t>(offset), static_cast<std::size_t>(bytes)});
        return fields_.size() - 1;
    }

    /// Register memory that sources of a write must not overlap.
    void guard(const Byte* base, std::uint64_t bytes) {
        require_address(base, bytes > 0, "base");
        guarded_.add(range_of(base, 1, bytes));
    }

    /// Add `chunk_rows` side rows: memory for each group.
    void add_chunk(const std::vector<Byte*>& bases) {
        if (bases.size() != groups_.size() || std::find(bases.begin(), bases.end(), nullptr) != bases.end()) {
            throw std::invalid_argument("a chunk needs an address for each group");
        }
        const auto chunk = static_cast<std::size_t>(allocated() / chunk_rows_);
        if (chunk >= versions_.size())
            throw std::invalid_argument("there is a side row for every slot already");
        free_.reserve(static_cast<std::size_t>(allocated() + chunk_rows_));  // a later push_back cannot fail
        versions_[chunk] = std::make_unique<std::uint32_t[]>(static_cast<std::size_t>(chunk_rows_));
        for (std::size_t g = 0; g < groups_.size(); ++g) {
            groups_[g].chunks[chunk] = bases[g];
            guarded_.add(range_of(bases[g], static_cast<std::uint64_t>(chunk_rows_), groups_[g].bytes));
        }
        const std::int64_t first = allocated();
        for (std::int64_t row = first + chunk_rows_; row-- > first;)
            free_.push_back(static_cast<std::int32_t>(row));
        allocated_.store(first + chunk_rows_, std::memory_order_release);
    }

    std::int64_t allocated() const { return allocated_.load(std::memory_order_acquire); }
    std::int64_t used() const { return allocated() - static_cast<std::int64_t>(free_.size()); }
    std::size_t row_bytes() const {
        std::size_t bytes = 0;
        for (const Field& field : fields_) bytes += field.bytes;
        return bytes;
    }
    std::int64_t nbytes() const {
        return allocated() * static_cast<std::int64_t>(sizeof(std::uint32_t)) +
               static_cast<std::int64_t>(free_.capacity() * sizeof(std::int32_t));
    }

    /// Remove all rows.
    void clear() {
        std::fill(side_rows_, side_rows_ + capacity_, kEmpty);
        free_.clear();
        for (std::int64_t row = allocated(); row-- > 0;) free_.push_back(static_cast<std::int32_t>(row));
    }

    /// Compare a batch that is about to be written from slot `cursor` on. `equals_next[i]`: the next
    /// observation of row i equals the observation of the row that follows in the batch. `equals_side[j]`:
    /// observation j equals the side row of the row before it. Returns the side rows that the write will
    /// take, or kOverlaps.
    std::int64_t compare(std::int64_t cursor, std::int64_t total, const std::vector<const Byte*>& obs,
                         const std::vector<const Byte*>& nexts, Flag* equals_next, Flag* equals_side) const {
        check_sources(obs);
        check_sources(nexts);
        require_in_range(&cursor, 1, capacity_);
        for (std::size_t f = 0; f < fields_.size(); ++f) {
            if (guarded_.overlaps(range_of(nexts[f], static_cast<std::uint64_t>(total), fields_[f].bytes)))
                return kOverlaps;
        }
        std::int64_t needed = 0;
        for (std::int64_t i = 0; i < total; ++i) {
            equals_next[i] = i + num_envs_ < total && rows_equal(nexts, i, obs, i + num_envs_);
            if (i >= total - capacity_) needed += equals_next[i] == 0;
        }
        for (std::int64_t j = 0; j < std::min(num_envs_, total); ++j) {
            const std::int32_t row = side_rows_[before(wrap(cursor + j))];
            equals_side[j] = row >= 0 && side_row_equals(row, obs, j);
            needed += row == kLinked;  // gets a side row before its successor changes
        }
        return needed;
    }

    /// Before the observations of the slots `(start + i) % capacity` change: the rows before them that are
    /// not written themselves get side rows, and `spare` side rows stay free. Returns how many side rows are
    /// missing for that; nothing has changed then. One side row for each slot always suffices.
    std::int64_t detach_run(std::int64_t start, std::int64_t n, std::int64_t spare) {
        check_run(start, n);
        std::vector<std::int64_t> rows;
        for (std::int64_t j = 0; j < std::min(num_envs_, n); ++j) {
            const std::int64_t row = before(wrap(start + j));
            if (side_rows_[row] == kLinked && wrap(row - start + capacity_) >= n) rows.push_back(row);
        }
        if (rows.empty()) return 0;
        const auto free = static_cast<std::int64_t>(free_.size());
        const auto missing =
            std::min(static_cast<std::int64_t>(rows.size()) + spare - free, capacity_ - allocated());
        if (missing > 0) return missing;
        for (const std::int64_t row : rows) {
            fill(row, [&](const Field& field, std::size_t) { return main_row(field, after(row)); });
        }
        return 0;
    }

    /// After rows `skip + i` were written to the slots `(start + i) % capacity`: store their next
    /// observations. Enough side rows must be free.
    void link_run(std::int64_t start, std::int64_t n, std::int64_t skip,
                  const std::vector<const Byte*>& nexts, const Flag* equals_next, const Flag* equals_side) {
        check_sources(nexts);
        check_run(start, n);
        for (std::int64_t j = 0; equals_side != nullptr && j < std::min(num_envs_, n); ++j) {
            const std::int64_t row = before(wrap(start + j));
            if (equals_side[j] != 0 && side_rows_[row] >= 0 && wrap(row - start + capacity_) >= n) link(row);
        }
        for (std::int64_t i = 0; i < n; ++i) {
            const std::int64_t slot = wrap(start + i);
            if (equals_next[skip + i] != 0) {
                link(slot);
            } else {
                set_row(slot, nexts, skip + i);
            }
        }
    }

    /// Store the next observations of the rows at `slots` in side rows, in order.
    void set_rows(const std::int64_t* slots, std::int64_t n, const std::vector<const Byte*>& nexts) {
        check_sources(nexts);
        require_in_range(slots, n, capacity_);
        for (std::int64_t i = 0; i < n; ++i) set_row(slots[i], nexts, i);
    }

    /// The next observation of the rows at `slots` is the observation that follows.
    void link_rows(const std::int64_t* slots, std::int64_t n) {
        require_in_range(slots, n, capacity_);
        for (std::int64_t i = 0; i < n; ++i) link(slots[i]);
    }

    /// Copy next observations of the rows at `slots`, or observations where `pick` (if not null) is false.
    void gather(const std::vector<std::int64_t>& fields, const std::int64_t* slots, const Flag* pick,
                std::int64_t n, const std::vector<Byte*>& outs) const {
        check_gather(fields, slots, n, outs);
        const auto count = at(n);
        check_read(slots, count * sizeof(std::int64_t));
        check_read(pick, count);
        for (std::size_t k = 0; k < outs.size(); ++k)
            check_write(outs[k], count * fields_[at(fields[k])].bytes);
        const IntendedRaces racing_reads;
        std::vector<Location> found(count);
        for (std::int64_t i = 0; i < n; ++i) prefetch<false>(side_rows_ + slots[i]);
        for (std::int64_t i = 0; i < n; ++i) {
            if (pick == nullptr || pick[i] != 0) found[at(i)] = locate(slots[i]);
        }
        std::atomic_thread_fence(std::memory_order_acquire);
        copy_all(fields, slots, found, n, outs);
        std::atomic_thread_fence(std::memory_order_acquire);
        for (std::int64_t i = 0; i < n; ++i) {
            if (pick == nullptr || pick[i] != 0) copy_until_stable(fields, slots[i], i, found[at(i)], outs);
        }
    }

private:
    struct Group {
        Byte* base;
        std::size_t stride;
        std::size_t bytes;  // of a side row
        std::vector<Byte*> chunks;
    };
    struct Field {
        std::size_t group, offset, bytes;
    };
    /// Where an observation is. kEmpty: in the row's own slot.
    struct Location {
        std::int32_t side_row = kEmpty;
        std::uint32_t version = 0;
    };

    static constexpr int kTries =
        16;  // a row that changes more often was written: its generation changed too

    static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
    std::int64_t wrap(std::int64_t slot) const { return slot >= capacity_ ? slot % capacity_ : slot; }
    std::int64_t before(std::int64_t slot) const {
        return slot >= num_envs_ ? slot - num_envs_ : slot - num_envs_ + capacity_;
    }
    std::int64_t after(std::int64_t slot) const { return wrap(slot + num_envs_); }

    // Readers load these while the writer changes them: one load each, never a value kept in a register.
    std::int32_t side_row_of(std::int64_t slot) const {
        return *const_cast<const volatile std::int32_t*>(side_rows_ + slot);
    }
    std::uint32_t version_of(std::int32_t row) const {
        const volatile std::uint32_t* versions = versions_[at(row / chunk_rows_)].get();
        return versions[row % chunk_rows_];
    }

    Byte* main_row(const Field& field, std::int64_t slot) const {
        const Group& group = groups_[field.group];
        return group.base + at(slot) * group.stride + field.offset;
    }
    Byte* side_row(const Group& group, std::int32_t row) const {
        return group.chunks[at(row / chunk_rows_)] + at(row % chunk_rows_) * group.bytes;
    }
    Byte* side_row(const Field& field, std::int32_t row) const {
        return side_row(groups_[field.group], row) + field.offset;
    }
    static const Byte* source_row(const Byte* batch, std::int64_t row, const Field& field) {
        return batch + at(row) * field.bytes;
    }

    void check_sources(const std::vector<const Byte*>& sources) const {
        if (sources.size() != fields_.size() ||
            std::find(sources.begin(), sources.end(), nullptr) != sources.end()) {
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

    void check_gather(const std::vector<std::int64_t>& fields, const std::int64_t* slots, std::int64_t n,
                      const std::vector<Byte*>& outs) const {
        require_in_range(slots, n, capacity_);
        const auto count = static_cast<std::int64_t>(fields_.size());
        if (find_out_of_range(fields.data(), static_cast<std::int64_t>(fields.size()), count) !=
            static_cast<std::int64_t>(fields.size())) {
            throw std::invalid_argument("there is no such field");
        }
        if (outs.size() != fields.size())
            throw std::invalid_argument("outs must hold an address for each field");
    }

    bool rows_equal(const std::vector<const Byte*>& a, std::int64_t i, const std::vector<const Byte*>& b,
                    std::int64_t j) const {
        for (std::size_t f = 0; f < fields_.size(); ++f) {
            const Field& field = fields_[f];
            if (std::memcmp(source_row(a[f], i, field), source_row(b[f], j, field), field.bytes) != 0)
                return false;
        }
        return true;
    }

    bool side_row_equals(std::int32_t row, const std::vector<const Byte*>& obs, std::int64_t j) const {
        for (std::size_t f = 0; f < fields_.size(); ++f) {
            const Field& field = fields_[f];
            if (std::memcmp(side_row(field, row), source_row(obs[f], j, field), field.bytes) != 0)
                return false;
        }
        return true;
    }

    /// Link a slot to the row that follows it, which was written before, and free its side row.
    void link(std::int64_t slot) {
        const std::int32_t row = side_rows_[slot];
        std::atomic_thread_fence(std::memory_order_release);
        side_rows_[slot] = kLinked;
        std::atomic_thread_fence(std::memory_order_release);
        if (row >= 0) free_.push_back(row);
    }

    void set_row(std::int64_t slot, const std::vector<const Byte*>& nexts, std::int64_t i) {
        fill(slot, [&](const Field& field, std::size_t f) { return source_row(nexts[f], i, field); });
    }

    /// Fill the side row of a slot, a free one if it has none.
    template <typename From>
    void fill(std::int64_t slot, From from) {
        std::int32_t row = side_rows_[slot];
        if (row < 0) {
            if (free_.empty()) throw std::runtime_error("no side row is left: add a chunk first");
            row = free_.back();
            free_.pop_back();
        }
        ++versions_[at(row / chunk_rows_)][at(row % chunk_rows_)];
        std::atomic_thread_fence(std::memory_order_release);
        for (std::size_t f = 0; f < fields_.size(); ++f) {
            const Field& field = fields_[f];
            std::memcpy(side_row(field, row), from(field, f), field.bytes);
        }
        std::atomic_thread_fence(std::memory_order_release);
        side_rows_[slot] = row;
    }

    Location locate(std::int64_t slot) const {
        const std::int32_t row = side_row_of(slot);
        if (row == kLinked) return {row, 0};
        if (row < 0 || row >= allocated())
            throw std::out_of_range("slot " + std::to_string(slot) + " holds no row");
        return {row, version_of(row)};
    }

    Byte* address_of(const Group& group, std::int64_t slot, Location location) const {
        if (location.side_row >= 0) return side_row(group, location.side_row);
        return group.base + at(location.side_row == kLinked ? after(slot) : slot) * group.stride;
    }

    void copy_all(const std::vector<std::int64_t>& fields, const std::int64_t* slots,
                  const std::vector<Location>& found, std::int64_t n, const std::vector<Byte*>& outs) const {
        Plan plan;
        std::vector<std::vector<Byte*>> rows(groups_.size());
        for (std::size_t g = 0; g < groups_.size(); ++g) {
            Pass pass;
            pass.steps = n;
            pass.first_column = plan.columns.size();
            for (std::size_t k = 0; k < fields.size(); ++k) {
                const Field& field = fields_[at(fields[k])];
                if (field.group != g) continue;
                plan.columns.push_back({field.offset, field.bytes, outs[k]});
                pass.span = std::max(pass.span, field.offset + field.bytes);
            }
            pass.columns_end = plan.columns.size();
            if (pass.columns_end == pass.first_column) continue;
            rows[g].resize(found.size());
            for (std::int64_t i = 0; i < n; ++i)
                rows[g][at(i)] = address_of(groups_[g], slots[i], found[at(i)]);
            pass.located = rows[g].data();
            plan.passes.push_back(pass);
        }
        detail::copy_steps<detail::Direction::to_batch>(plan);
    }

    /// Copy row i again until its location and version are the same before and after the copy.
    void copy_until_stable(const std::vector<std::int64_t>& fields, std::int64_t slot, std::int64_t i,
                           Location location, const std::vector<Byte*>& outs) const {
        for (int tries = 0; tries < kTries; ++tries) {
            const std::int32_t row = side_row_of(slot);
            if (row == location.side_row && (row < 0 || version_of(row) == location.version)) return;
            location = locate(slot);
            std::atomic_thread_fence(std::memory_order_acquire);
            for (std::size_t k = 0; k < fields.size(); ++k) {
                const Field& field = fields_[at(fields[k])];
                std::memcpy(outs[k] + at(i) * field.bytes,
                            address_of(groups_[field.group], slot, location) + field.offset, field.bytes);
            }
            std::atomic_thread_fence(std::memory_order_acquire);
        }
    }

    std::int64_t capacity_, num_envs_, chunk_rows_;
    std::int32_t* side_rows_;
    std::vector<Group> groups_;
    std::vector<Field> fields_;
    std::vector<std::unique_ptr<std::uint32_t[]>> versions_;
    std::vector<std::int32_t> free_;
    std::atomic<std::int64_t> allocated_{0};
    AddressRanges guarded_;
};

}  // namespace ostinato
