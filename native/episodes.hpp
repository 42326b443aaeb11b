// The episode table: which rows of a ring belong together, and where they are. No Python here.
//
// A slot knows its episode's record; a record knows its rows, by arithmetic while they lie `stride` slots
// apart, by a list of slots otherwise. `core/episodes/numpy.py` gives the same results bit for bit: records
// are numbered, freed and used again in the same order.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "count_tree.hpp"
#include "fields.hpp"
#include "platform.hpp"

namespace ostinato {

class Episodes {
public:
    static constexpr std::int64_t kMaxCapacity = std::int64_t{1}
                                                 << 30;  // records have numbers below twice that

    /// What is known of a batch besides where it goes; null where nothing is said.
    struct Flags {
        const std::uint8_t* ends;
        const std::int64_t* ids;
        const std::uint8_t* mask;
    };

    /// What `save` writes and `load` reads.
    struct State {
        std::int32_t* episode;  // record of each row present, oldest first; -1 for none
        std::int64_t* serials;  // of each record, as all that follow
        std::int64_t* keys;
        std::uint8_t* kinds;
        std::uint8_t* status;
        std::int64_t* free;  // records not in use; the last one is taken first
    };

    Episodes(std::int64_t capacity, std::int64_t lanes) : capacity_(capacity), lanes_(lanes) {
        if (capacity < 1 || capacity > kMaxCapacity) {
            throw std::invalid_argument("capacity must be in [1, 2**30], got " + std::to_string(capacity));
        }
        if (lanes < 1 || capacity % lanes != 0) {
            throw std::invalid_argument("lanes must be at least 1 and divide the capacity, got " +
                                        std::to_string(lanes));
        }
        clear();
    }

    std::int64_t capacity() const { return capacity_; }
    std::int64_t cursor() const { return cursor_; }
    std::int64_t present() const { return present_; }
    std::int64_t rows() const { return rows_; }
    std::int64_t records() const { return records_; }
    std::int64_t serial() const { return serial_; }
    std::int64_t count() const { return records_ - free_count(); }
    std::int64_t free_count() const { return static_cast<std::int64_t>(free_.size()); }

    std::size_t nbytes() const {
        std::size_t bytes = static_cast<std::size_t>(capacity_ + lanes_) * sizeof(std::int32_t) +
                            table_.nbytes() + free_.capacity() * sizeof(std::int32_t) +
                            ids_.size() * (sizeof(std::pair<std::int64_t, std::int32_t>) + 2 * sizeof(void*));
        for (const Starts& starts : starts_) bytes += starts.rows.nbytes() + starts.episodes.nbytes();
        for (std::int64_t r = 0; r < records_; ++r) {
            if (table_[r].list != nullptr) bytes += table_[r].list->slots.capacity() * sizeof(std::int32_t);
        }
        return bytes;
    }

    /// Forget all rows; serial numbers and registered needs stay.
    void clear() {
        const std::size_t bytes = static_cast<std::size_t>(capacity_) * sizeof(std::int32_t);
        std::unique_ptr<std::int32_t[], Release> slots(
            static_cast<std::int32_t*>(std::calloc(bytes, 1)));  // takes no memory until written
        if (slots == nullptr) throw std::bad_alloc();
        if (bytes >= kHugeBytes) advise_huge_pages(reinterpret_cast<Address>(slots.get()), bytes);
        lane_open_.assign(static_cast<std::size_t>(lanes_), kNone);
        slots_ = std::move(slots);
        table_.clear();
        free_.clear();
        ids_.clear();
        touched_.clear();
        cursor_ = present_ = rows_ = records_ = 0;
        for (Starts& starts : starts_) {
            starts.rows.clear();
            starts.episodes.clear();
        }
    }

    /// Rows of a ring write. First all rows leave that are overwritten, then the new ones come; records left
    /// empty are freed last, so that an episode that goes on keeps its number.
    void note(std::int64_t start, std::int64_t rows, std::int64_t skip, const Flags& flags) {
        require_run(start, rows, skip);
        if (rows == 0) return;
        leave_run(start, std::min(rows, capacity_ - start));
        leave_run(0, start + rows - std::min(start + rows, capacity_));
        if (skip > 0) pass_over(start, skip, flags);
        const Flags stored = {flags.ends == nullptr ? nullptr : flags.ends + skip,
                              flags.ids == nullptr ? nullptr : flags.ids + skip,
                              flags.mask == nullptr ? nullptr : flags.mask + skip};
        const std::int64_t before_end = std::min(rows, capacity_ - start);
        enter(start, 0, before_end, stored);
        enter(0, before_end, rows, stored);
        settle();
        cursor_ = (start + rows) % capacity_;
        present_ = std::min(capacity_, present_ + rows);
    }

    /// Rows that follow each one; -1 for rows of no episode.
    void ahead(const std::int64_t* slots, std::int64_t n, std::int64_t* out) const {
        each(slots, n, [&](std::int64_t i, const Record* record) {
            out[i] = record == nullptr ? -1 : record->length - 1 - position(*record, slots[i]);
        });
    }

    /// Rows present before each one; -1 for rows of no episode.
    void behind(const std::int64_t* slots, std::int64_t n, std::int64_t* out) const {
        each(slots, n, [&](std::int64_t i, const Record* record) {
            out[i] = record == nullptr ? -1 : position(*record, slots[i]);
        });
    }

    void ended(const std::int64_t* slots, std::int64_t n, std::uint8_t* out) const {
        each(slots, n, [&](std::int64_t i, const Record* record) {
            out[i] = record != nullptr && record->status == kEnded && record->last == slots[i] ? 1 : 0;
        });
    }

    void shift(const std::int64_t* slots, const std::int64_t* steps, std::int64_t n,
               std::int64_t* out) const {
        each(slots, n, [&](std::int64_t i, const Record* record) {
            if (record == nullptr) {
                out[i] = slots[i];
                return;
            }
            const std::int64_t step = std::clamp(steps[i], -capacity_, capacity_);
            const std::int64_t last = record->length - 1;
            const std::int64_t wanted = position(*record, slots[i]) + step;
            out[i] = slot_at(*record, std::clamp(wanted, std::int64_t{0}, last));
        });
    }

    /// `before` rows of the episode, the row itself, `after` rows, `dilation` steps apart; beyond the episode
    /// its first or last row, and 0 in `valid`.
    void window(const std::int64_t* slots, std::int64_t n, std::int64_t before, std::int64_t after,
                std::int64_t dilation, std::int64_t* out, std::uint8_t* valid) const {
        const std::int64_t most = std::numeric_limits<std::int32_t>::max();
        if (before < 0 || before > most || after < 0 || after > most || dilation < 1) {
            throw std::invalid_argument("before and after must be in [0, 2**31) and dilation at least 1");
        }
        const std::int64_t width = before + 1 + after;
        dilation = std::min(dilation, capacity_);  // beyond any episode, and the products stay small
        each(slots, n, [&](std::int64_t i, const Record* record) {
            std::int64_t* row = out + i * width;
            std::uint8_t* good = valid + i * width;
            if (record != nullptr) {
                place(*record, position(*record, slots[i]), {before, after, dilation}, row, good);
            } else {
                std::fill_n(row, width, slots[i]);
                std::fill_n(good, width, std::uint8_t{0});
                good[before] = 1;
            }
        });
    }

    /// `[count()]` each; the episode whose first row is the oldest comes first.
    void spans(std::int64_t* first, std::int64_t* rows, std::uint8_t* closed, std::int64_t* serial) const {
        std::vector<std::pair<std::int64_t, std::int64_t>> order;  // age of the first row, record
        for (std::int64_t r = 0; r < records_; ++r) {
            if (table_[r].length > 0) order.emplace_back(past(cursor_, table_[r].first), r);
        }
        std::sort(order.begin(), order.end());
        for (std::size_t i = 0; i < order.size(); ++i) {
            const Record& record = table_[order[i].second];
            first[i] = record.first;
            rows[i] = record.length;
            closed[i] = record.status == kEnded ? 1 : 0;
            serial[i] = record.serial;
        }
    }

    /// Counts rows that have `need - 1` rows after them from now on; returns the number of that count.
    std::int64_t add_need(std::int64_t need) {
        if (need < 1) throw std::invalid_argument("need must be at least 1, got " + std::to_string(need));
        starts_.push_back({need, {}, {}});
        for (std::int64_t r = 0; r < records_; ++r) count_starts(starts_.back(), r);
        return static_cast<std::int64_t>(starts_.size()) - 1;
    }

    std::int64_t start_rows(std::int64_t handle) const { return starts_of(handle).rows.total(); }
    std::int64_t start_episodes(std::int64_t handle) const { return starts_of(handle).episodes.total(); }

    /// Rows that can start, by their ranks `randoms * total >> 63`.
    void draw(std::int64_t handle, const std::int64_t* randoms, std::int64_t n, std::int64_t* out) const {
        const Starts& starts = drawable(handle, n);
        draw_chunks(starts.rows, randoms, n, out,
                    [](const Record&, std::int64_t, std::int64_t rest) { return rest; });
    }

    /// Episodes by the first `n` numbers, then rows of them by the other `n`.
    void draw_episodes(std::int64_t handle, const std::int64_t* randoms, std::int64_t n,
                       std::int64_t* out) const {
        const Starts& starts = drawable(handle, n);
        draw_chunks(starts.episodes, randoms, n, out,
                    [&](const Record& record, std::int64_t i, std::int64_t) {
                        return scale(randoms[n + i], record.length - starts.need + 1);
                    });
    }

    void save(const State& state) const {
        for (std::int64_t i = 0; i < present_; ++i) {
            state.episode[i] = slots_[(cursor_ - present_ + i + capacity_) % capacity_] - 1;
        }
        for (std::int64_t r = 0; r < records_; ++r) {
            const Record& record = table_[r];
            state.serials[r] = record.serial;
            state.keys[r] = record.key;
            state.kinds[r] = record.kind;
            state.status[r] = record.status;
        }
        std::copy(free_.begin(), free_.end(), state.free);
    }

    /// Take a state over that was checked before. (Here only what would break memory is refused.)
    void load(std::int64_t cursor, std::int64_t serial, std::int64_t present, std::int64_t records,
              std::int64_t free_count, const State& state) {
        require_state(cursor, present, records, free_count, state);
        clear();
        table_.require(records);
        records_ = records;
        serial_ = serial;
        for (std::int64_t r = 0; r < records; ++r) {
            table_[r].serial = state.serials[r];
        }
        const std::int64_t first = (cursor - present + capacity_) % capacity_;
        for (std::int64_t i = 0; i < present; ++i) {
            const std::int64_t slot = (first + i) % capacity_;
            if (state.episode[i] >= 0) append(state.episode[i], slot, 1);
        }
        for (std::int64_t r = 0; r < records; ++r) {
            Record& record = table_[r];
            record.status = state.status[r];
            if (record.length == 0 || record.status != kOpen) continue;
            record.key = state.keys[r];
            record.kind = state.kinds[r];
            open_of(record) = static_cast<std::int32_t>(r);
        }
        for (std::int64_t i = 0; i < free_count; ++i)
            free_.push_back(static_cast<std::int32_t>(state.free[i]));
        cursor_ = cursor;
        present_ = present;
        settle();
    }

private:
    static constexpr std::int32_t kNone = -1;
    static constexpr std::uint8_t kOpen = 0, kEnded = 1, kCut = 2;
    static constexpr std::uint8_t kLane = 0, kId = 1;
    static constexpr std::size_t kHugeBytes = std::size_t{4} << 20;
    static constexpr std::int64_t kChunk = 64;  // rows whose records are asked for before they are read

    struct Release {
        void operator()(std::int32_t* memory) const { std::free(memory); }
    };

    struct List {
        std::vector<std::int32_t> slots;
        std::size_t gone = 0;  // at its front
    };

    struct Record {
        std::int64_t serial = 0;
        std::int64_t key = 0;  // lane or id while it is open
        std::unique_ptr<List> list;
        std::int32_t first = 0, last = 0, stride = 0, length = 0;
        std::uint8_t kind = kLane;
        std::uint8_t status = kOpen;
        bool touched = false;
    };

    struct Starts {
        std::int64_t need;
        CountTree rows;
        CountTree episodes;
    };

    struct Span {
        std::int64_t before, after, dilation;
    };

    // -- writing --------------------------------------------------------------------------------------------

    void require_run(std::int64_t start, std::int64_t rows, std::int64_t skip) const {
        require_in_range(&start, 1, capacity_);
        if (rows < 0 || rows > capacity_ || skip < 0 || (skip > 0 && rows != capacity_)) {
            throw std::invalid_argument("a run must have 0 to " + std::to_string(capacity_) +
                                        " rows (capacity), and all of them if it skips any");
        }
        if (present_ > 0 && (start + capacity_ - skip % capacity_) % capacity_ != cursor_) {
            throw std::invalid_argument("a run must go on at slot " + std::to_string(cursor_));
        }
    }

    void touch(std::int64_t r) {
        Record& record = table_[r];
        if (record.touched) return;
        record.touched = true;
        touched_.push_back(static_cast<std::int32_t>(r));
    }

    /// The rows in these slots leave their episodes; they are the oldest ones.
    void leave_run(std::int64_t start, std::int64_t count) {
        const std::int32_t* at = slots_.get() + start;
        const std::int32_t* end = at + count;
        while (at < end) {
            const std::int32_t r = *at;
            const std::int32_t* from = at;
            while (at < end && *at == r) ++at;
            if (r != 0) leave(r - 1, static_cast<std::int32_t>(at - from));
        }
    }

    void leave(std::int64_t r, std::int32_t count) {
        Record& record = table_[r];
        touch(r);
        rows_ -= count;
        record.length -= count;
        if (record.length == 0) {
            record.list.reset();
        } else if (record.list != nullptr) {
            List& list = *record.list;
            list.gone += static_cast<std::size_t>(count);
            record.first = list.slots[list.gone];
            if (list.gone > list.slots.size() / 2) {
                list.slots.erase(list.slots.begin(),
                                 list.slots.begin() + static_cast<std::ptrdiff_t>(list.gone));
                list.gone = 0;
            }
        } else {
            const std::int64_t first = record.first + std::int64_t{record.stride} * count;
            record.first = static_cast<std::int32_t>(first < capacity_ ? first : first - capacity_);
        }
    }

    /// Rows that are never stored close episodes all the same.
    void pass_over(std::int64_t start, std::int64_t skip, const Flags& flags) {
        std::int64_t slot = (start + capacity_ - skip % capacity_) % capacity_;
        for (std::int64_t i = 0; i < skip; ++i) {
            const bool ends = flags.ends != nullptr && flags.ends[i] != 0;
            const bool masked = flags.mask != nullptr && flags.mask[i] == 0;
            if (ends || masked) close(find_open(flags, i, slot), kCut);
            slot = slot + 1 < capacity_ ? slot + 1 : 0;
        }
    }

    /// Rows `[from, to)` of a batch come into successive slots; neighbours of one stream come together.
    void enter(std::int64_t slot, std::int64_t from, std::int64_t to, const Flags& flags) {
        for (std::int64_t i = from; i < to;) {
            if (flags.mask != nullptr && flags.mask[i] == 0) {
                close(find_open(flags, i, slot), kCut);
                slots_[slot++] = 0;
                ++i;
                continue;
            }
            std::int64_t end = i + 1;
            while (end < to && goes_on(flags, end)) ++end;
            std::int64_t r = find_open(flags, i, slot);
            if (r == kNone) r = begin(flags, i, slot);
            append(r, slot, end - i);
            if (flags.ends != nullptr && flags.ends[end - 1] != 0) close(r, kEnded);
            slot += end - i;
            i = end;
        }
    }

    /// Whether row `i` is of the same episode as the row before it in the batch.
    bool goes_on(const Flags& flags, std::int64_t i) const {
        return (flags.ends == nullptr || flags.ends[i - 1] == 0) &&
               (flags.mask == nullptr || flags.mask[i] != 0) &&
               (flags.ids == nullptr ? lanes_ == 1 : flags.ids[i] == flags.ids[i - 1]);
    }

    /// In 32 bits: dividing those is much faster.
    std::uint32_t lane_of(std::int64_t slot) const {
        return lanes_ == 1 ? 0 : static_cast<std::uint32_t>(slot) % static_cast<std::uint32_t>(lanes_);
    }

    /// The record of the episode that is open in the stream of a row.
    std::int64_t find_open(const Flags& flags, std::int64_t i, std::int64_t slot) const {
        if (flags.ids == nullptr) return lane_open_[lane_of(slot)];
        const auto found = ids_.find(flags.ids[i]);
        return found == ids_.end() ? kNone : found->second;
    }

    std::int32_t& open_of(const Record& record) {
        return record.kind == kId ? ids_[record.key] : lane_open_[static_cast<std::size_t>(record.key)];
    }

    std::int64_t begin(const Flags& flags, std::int64_t i, std::int64_t slot) {
        std::int64_t r = records_;
        if (free_.empty()) {
            table_.require(++records_);
        } else {
            r = free_.back();
            free_.pop_back();
        }
        Record& record = table_[r];
        record.serial = ++serial_;
        record.kind = flags.ids == nullptr ? kLane : kId;
        record.key = flags.ids == nullptr ? static_cast<std::int64_t>(lane_of(slot)) : flags.ids[i];
        open_of(record) = static_cast<std::int32_t>(r);
        return r;
    }

    void close(std::int64_t r, std::uint8_t status) {
        if (r == kNone) return;
        Record& record = table_[r];
        forget_stream(record);
        record.status = status;
    }

    void forget_stream(Record& record) {
        if (record.kind == kId) {
            ids_.erase(record.key);
        } else {
            lane_open_[static_cast<std::size_t>(record.key)] = kNone;
        }
        record.key = 0;
        record.kind = kLane;
    }

    /// `count` rows from `slot` on, which does not reach the end of the ring, are the next ones of an
    /// episode.
    void append(std::int64_t r, std::int64_t slot, std::int64_t count) {
        Record& record = table_[r];
        touch(r);
        std::fill_n(slots_.get() + slot, count, static_cast<std::int32_t>(r) + 1);
        const auto step = static_cast<std::int32_t>(past(record.last, slot));
        const bool alone = record.length == 0;
        if (alone) {
            record.first = static_cast<std::int32_t>(slot);
            record.stride = count > 1 ? 1 : 0;
        } else if (record.list == nullptr) {
            if (record.length == 1) record.stride = step;
            if (step != record.stride || (count > 1 && step != 1)) record.list = list_of(record);
        }
        if (record.list != nullptr) {
            for (std::int64_t i = 0; i < count; ++i) {
                record.list->slots.push_back(static_cast<std::int32_t>(slot + i));
            }
        }
        record.last = static_cast<std::int32_t>(slot + count - 1);
        record.length += static_cast<std::int32_t>(count);
        rows_ += count;
    }

    std::unique_ptr<List> list_of(const Record& record) const {
        auto list = std::make_unique<List>();
        for (std::int64_t k = 0; k < record.length; ++k) {
            list->slots.push_back(static_cast<std::int32_t>(slot_at(record, k)));
        }
        return list;
    }

    /// Frees the episodes without rows and counts the others anew, once for each that was touched.
    void settle() {
        for (const std::int32_t r : touched_) {
            Record& record = table_[r];
            record.touched = false;
            if (record.length == 0) {
                if (record.status == kOpen) forget_stream(record);
                record = Record();
                free_.push_back(r);
            }
            for (Starts& starts : starts_) count_starts(starts, r);
        }
        touched_.clear();
    }

    void count_starts(Starts& starts, std::int64_t r) {
        const std::int64_t rows = std::max(table_[r].length - starts.need + 1, std::int64_t{0});
        starts.rows.set(r, rows);
        starts.episodes.set(r, rows > 0 ? 1 : 0);
    }

    // -- reading --------------------------------------------------------------------------------------------

    /// Slots from one slot on to another, in `[0, capacity)`.
    std::int64_t past(std::int64_t from, std::int64_t to) const {
        return to >= from ? to - from : to - from + capacity_;
    }

    std::int64_t position(const Record& record, std::int64_t slot) const {
        const std::int64_t steps = past(record.first, slot);
        if (record.list == nullptr) {
            if (record.stride <= 1) return steps;
            return static_cast<std::uint32_t>(steps) / static_cast<std::uint32_t>(record.stride);
        }
        const auto begin = record.list->slots.begin() + static_cast<std::ptrdiff_t>(record.list->gone);
        const auto younger = [&](std::int32_t at, std::int64_t age) { return past(record.first, at) < age; };
        return std::lower_bound(begin, record.list->slots.end(), steps, younger) - begin;
    }

    std::int64_t slot_at(const Record& record, std::int64_t position) const {
        if (record.list != nullptr) {
            return record.list->slots[record.list->gone + static_cast<std::size_t>(position)];
        }
        const std::int64_t slot = record.first + record.stride * position;
        return slot < capacity_ ? slot : slot - capacity_;
    }

    /// Calls `visit(i, record)` for each slot (null for none), after asking for memory some rows ahead.
    template <typename Visit>
    void each(const std::int64_t* slots, std::int64_t n, Visit visit) const {
        if (n < 0) throw std::invalid_argument("n must be at least 0, got " + std::to_string(n));
        require_in_range(slots, n, capacity_);
        std::array<const Record*, kChunk> records;
        for (std::int64_t first = 0; first < n; first += kChunk) {
            const std::int64_t count = std::min(kChunk, n - first);
            for (std::int64_t i = 0; i < count; ++i) prefetch<false>(slots_.get() + slots[first + i]);
            for (std::int64_t i = 0; i < count; ++i) {
                const std::int32_t r = slots_[slots[first + i]];
                const Record* record = r == 0 ? nullptr : &table_[r - 1];
                records[static_cast<std::size_t>(i)] = record;
                prefetch<false>(record);
            }
            for (std::int64_t i = 0; i < count; ++i) visit(first + i, records[static_cast<std::size_t>(i)]);
        }
    }

    /// One window. Its entries inside the episode are those in `[low, high)`.
    void place(const Record& record, std::int64_t at, const Span& span, std::int64_t* out,
               std::uint8_t* valid) const {
        const std::int64_t width = span.before + 1 + span.after;
        const std::int64_t low = span.before - std::min(span.before, steps_in(at, span.dilation));
        const std::int64_t high =
            span.before + 1 + std::min(span.after, steps_in(record.length - 1 - at, span.dilation));
        place_inside(record, at - (span.before - low) * span.dilation, span.dilation, out + low, high - low);
        if (high - low == width) {
            std::fill_n(valid, width, std::uint8_t{1});
            return;
        }
        std::fill_n(out, low, std::int64_t{record.first});
        std::fill(out + high, out + width, std::int64_t{record.last});
        for (std::int64_t k = 0; k < width; ++k) valid[k] = low <= k && k < high ? 1 : 0;
    }

    /// Every `dilation`-th row from a position on, `count` in all.
    void place_inside(const Record& record, std::int64_t position, std::int64_t dilation, std::int64_t* out,
                      std::int64_t count) const {
        if (record.list != nullptr) {
            const std::int32_t* slots = record.list->slots.data() + record.list->gone + position;
            for (std::int64_t k = 0; k < count; ++k) out[k] = slots[k * dilation];
            return;
        }
        const std::int64_t step = record.stride * dilation;  // of two entries or more: below the capacity
        std::int64_t slot = slot_at(record, position);
        if (slot + step * (count - 1) < capacity_) {  // most windows do not go round the end of the ring
            for (std::int64_t k = 0; k < count; ++k) out[k] = slot + k * step;
            return;
        }
        for (std::int64_t k = 0; k < count; ++k) {
            out[k] = slot;
            slot += step;
            if (slot >= capacity_) slot -= capacity_;
        }
    }

    /// Steps of a window that fit in some rows. In 32 bits, as in `lane_of`.
    static std::int64_t steps_in(std::int64_t rows, std::int64_t dilation) {
        return static_cast<std::uint32_t>(rows) / static_cast<std::uint32_t>(dilation);
    }

    // -- draws ----------------------------------------------------------------------------------------------

    /// `random * total >> 63`; of the random number 63 bits count.
    static std::int64_t scale(std::int64_t random, std::int64_t total) {
        return static_cast<std::int64_t>(
            multiply_high(static_cast<std::uint64_t>(random) << 1, static_cast<std::uint64_t>(total)));
    }

    /// Records by their ranks in a tree; `choose(record, i, rest of the rank)` gives a position in each.
    template <typename Choose>
    void draw_chunks(const CountTree& tree, const std::int64_t* randoms, std::int64_t n, std::int64_t* out,
                     Choose choose) const {
        std::array<std::int64_t, kChunk> ranks, found;
        for (std::int64_t first = 0; first < n; first += kChunk) {
            const std::int64_t count = std::min(kChunk, n - first);
            for (std::int64_t k = 0; k < count; ++k) {
                ranks[static_cast<std::size_t>(k)] = scale(randoms[first + k], tree.total());
            }
            tree.find(ranks.data(), count, found.data());
            for (std::int64_t k = 0; k < count; ++k)
                prefetch<false>(&table_[found[static_cast<std::size_t>(k)]]);
            for (std::int64_t k = 0; k < count; ++k) {
                const Record& record = table_[found[static_cast<std::size_t>(k)]];
                out[first + k] =
                    slot_at(record, choose(record, first + k, ranks[static_cast<std::size_t>(k)]));
                prefetch<false>(slots_.get() + out[first + k]);  // most draws are followed by a window
            }
        }
    }

    const Starts& starts_of(std::int64_t handle) const {
        if (handle < 0 || handle >= static_cast<std::int64_t>(starts_.size())) {
            throw std::invalid_argument("no need is registered as number " + std::to_string(handle));
        }
        return starts_[static_cast<std::size_t>(handle)];
    }

    const Starts& drawable(std::int64_t handle, std::int64_t n) const {
        const Starts& starts = starts_of(handle);
        if (n < 0) throw std::invalid_argument("n must be at least 0, got " + std::to_string(n));
        if (n > 0 && starts.rows.total() == 0) {
            throw std::out_of_range("no row has " + std::to_string(starts.need - 1) + " rows after it");
        }
        return starts;
    }

    void require_state(std::int64_t cursor, std::int64_t present, std::int64_t records,
                       std::int64_t free_count, const State& state) const {
        bool good = cursor >= 0 && cursor < capacity_ && present >= 0 && present <= capacity_ &&
                    records >= 0 && records <= 2 * capacity_ && free_count >= 0 && free_count <= records;
        for (std::int64_t i = 0; good && i < present; ++i) {
            good = state.episode[i] >= -1 && state.episode[i] < records;
        }
        for (std::int64_t r = 0; good && r < records; ++r) {
            good = state.kinds[r] == kId ||
                   (state.kinds[r] == kLane && state.keys[r] >= 0 && state.keys[r] < lanes_);
        }
        for (std::int64_t i = 0; good && i < free_count; ++i) {
            good = state.free[i] >= 0 && state.free[i] < records;
        }
        if (!good) throw std::invalid_argument("the state is not that of such a table");
    }

    std::int64_t capacity_;
    std::int64_t lanes_;
    std::int64_t cursor_ = 0;                         // slot after the newest row
    std::int64_t present_ = 0;                        // rows, those of no episode included
    std::int64_t rows_ = 0;                           // rows of episodes
    std::int64_t records_ = 0;                        // those in use and free ones
    std::int64_t serial_ = 0;                         // episodes that ever began
    std::unique_ptr<std::int32_t[], Release> slots_;  // record + 1; 0 for none
    Chunks<Record> table_;
    std::vector<std::int32_t> free_;
    std::vector<std::int32_t> lane_open_;
    std::unordered_map<std::int64_t, std::int32_t> ids_;
    std::vector<std::int32_t> touched_;
    std::vector<Starts> starts_;
};

}  // namespace ostinato
