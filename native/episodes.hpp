// The episode table: which rows of a ring belong to the same episode, and where they are. No Python here.
//
// A slot has the record of its episode; a record has its rows: by arithmetic while they are `stride`
// slots apart, otherwise by a list of slots. `core/episodes/numpy.py` gives the same results bit for bit:
// records are numbered, freed and reused in the same order.
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

#include "checks.hpp"
#include "count_tree.hpp"
#include "memory.hpp"
#include "platform.hpp"

namespace ostinato {

/// The results of `Episodes::steps`: `[n, width]` and `[n]`.
template <typename Weight>
struct StepWindows {
    std::int64_t* rows;   // [n, width]
    Weight* weights;      // [n, width]
    std::int64_t* steps;  // [n], as the next two
    float* discounts;
    std::int64_t* last;
};

class Episodes {
public:
    static constexpr std::int64_t kMaxCapacity = std::int64_t{1}
                                                 << 30;  // record numbers are below its double

    /// Arrays of a batch; null where one is not given.
    struct Batch {
        const Flag* ends;         // the row is the last of its episode
        const std::int64_t* ids;  // of the episode; without, rows of one environment follow each other
        const Flag* mask;         // false: the row belongs to no episode
    };

    /// The arrays that `save` writes and `load` reads.
    struct State {
        std::int32_t* episode;  // record of each row present, oldest first; -1 for none
        std::int64_t* serials;  // of each record, as the next three
        std::int64_t* keys;
        std::uint8_t* kinds;
        std::uint8_t* status;
        std::int64_t* free;  // records not in use; the last one is taken first
    };

    Episodes(std::int64_t capacity, std::int64_t num_envs) : capacity_(capacity), num_envs_(num_envs) {
        if (capacity < 1 || capacity > kMaxCapacity) {
            throw std::invalid_argument("capacity must be in [1, 2**30], got " + std::to_string(capacity));
        }
        if (num_envs < 1 || capacity % num_envs != 0) {
            throw std::invalid_argument("num_envs must be at least 1 and divide the capacity, got " +
                                        std::to_string(num_envs));
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
        std::size_t bytes =
            static_cast<std::size_t>(capacity_ + num_envs_) * sizeof(std::int32_t) + table_.nbytes() +
            free_.capacity() * sizeof(std::int32_t) +
            open_by_id_.size() * (sizeof(std::pair<std::int64_t, std::int32_t>) + 2 * sizeof(void*));
        for (const Starts& starts : starts_) bytes += starts.rows.nbytes() + starts.episodes.nbytes();
        for (std::int64_t r = 0; r < records_; ++r) {
            if (table_[r].list != nullptr) bytes += table_[r].list->slots.capacity() * sizeof(std::int32_t);
        }
        return bytes;
    }

    /// Remove all rows. Serial numbers go on, and registered needs stay.
    void clear() {
        const std::size_t bytes = static_cast<std::size_t>(capacity_) * sizeof(std::int32_t);
        std::unique_ptr<std::int32_t[], Release> slots(
            static_cast<std::int32_t*>(std::calloc(bytes, 1)));  // takes no pages until written
        if (slots == nullptr) throw std::bad_alloc();
        if (bytes >= kHugeBytes) advise_huge_pages(slots.get(), bytes);
        open_by_env_.assign(static_cast<std::size_t>(num_envs_), kNone);
        slots_ = std::move(slots);
        table_.clear();
        free_.clear();
        open_by_id_.clear();
        changed_.clear();
        cursor_ = present_ = rows_ = records_ = 0;
        for (Starts& starts : starts_) {
            starts.rows.clear();
            starts.episodes.clear();
        }
    }

    /// Record a ring write. Overwritten rows are removed first, then new rows are added. Empty records are
    /// freed last, so an episode that continues keeps its record.
    void record_write(std::int64_t start, std::int64_t rows, std::int64_t skip, const Batch& batch) {
        require_run(start, rows, skip);
        if (rows == 0) return;
        remove_run(start, std::min(rows, capacity_ - start));
        remove_run(0, start + rows - std::min(start + rows, capacity_));
        if (skip > 0) skip_rows(start, skip, batch);
        const Batch stored = {batch.ends == nullptr ? nullptr : batch.ends + skip,
                              batch.ids == nullptr ? nullptr : batch.ids + skip,
                              batch.mask == nullptr ? nullptr : batch.mask + skip};
        const std::int64_t before_end = std::min(rows, capacity_ - start);
        add_run(start, 0, before_end, stored);
        add_run(0, before_end, rows, stored);
        update_changed();
        cursor_ = (start + rows) % capacity_;
        present_ = std::min(capacity_, present_ + rows);
    }

    /// The number of rows that follow each row in its episode; -1 for rows of no episode.
    void ahead(const std::int64_t* slots, std::int64_t n, std::int64_t* out) const {
        for_each(slots, n, [&](std::int64_t i, const Record* record) {
            out[i] = record == nullptr ? -1 : record->length - 1 - position(*record, slots[i]);
        });
    }

    /// The number of rows present before each row in its episode; -1 for rows of no episode.
    void behind(const std::int64_t* slots, std::int64_t n, std::int64_t* out) const {
        for_each(slots, n, [&](std::int64_t i, const Record* record) {
            out[i] = record == nullptr ? -1 : position(*record, slots[i]);
        });
    }

    /// Whether each row ended its episode.
    void ended(const std::int64_t* slots, std::int64_t n, Flag* out) const {
        for_each(slots, n, [&](std::int64_t i, const Record* record) {
            out[i] = record != nullptr && record->status == kEnded && record->last == slots[i] ? 1 : 0;
        });
    }

    /// The slots `steps` rows on in the episode of each row; beyond the episode, its first or last row.
    void shift(const std::int64_t* slots, const std::int64_t* steps, std::int64_t n,
               std::int64_t* out) const {
        for_each(slots, n, [&](std::int64_t i, const Record* record) {
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

    /// Windows: `before` rows of the episode, the row itself and `after` rows, `dilation` steps apart. Beyond
    /// the episode, its first or last row, and 0 in `valid`.
    void window(const std::int64_t* slots, std::int64_t n, std::int64_t before, std::int64_t after,
                std::int64_t dilation, std::int64_t* out, Flag* valid) const {
        const std::int64_t most = std::numeric_limits<std::int32_t>::max();
        if (before < 0 || before > most || after < 0 || after > most || dilation < 1) {
            throw std::invalid_argument("before and after must be in [0, 2**31) and dilation at least 1");
        }
        const std::int64_t width = before + 1 + after;
        dilation =
            std::min(dilation, capacity_);  // larger than any episode; the products below do not overflow
        for_each(slots, n, [&](std::int64_t i, const Record* record) {
            std::int64_t* row = out + i * width;
            Flag* row_valid = valid + i * width;
            if (record != nullptr) {
                fill_window(*record, position(*record, slots[i]), {before, after, dilation}, row, row_valid);
            } else {
                std::fill_n(row, width, slots[i]);
                std::fill_n(row_valid, width, Flag{0});
                row_valid[before] = 1;
            }
        });
    }

    /// The `length` rows from each row on, `[n, length]`. Beyond the episode, its last row.
    void slices(const std::int64_t* slots, std::int64_t n, std::int64_t length, std::int64_t* out) const {
        for_each(slots, n, [&](std::int64_t i, const Record* record) {
            std::int64_t* rows = out + i * length;
            std::int64_t count = 0, last = slots[i];
            if (record != nullptr) {
                const std::int64_t at = position(*record, slots[i]);
                count = std::min(length, record->length - at);
                fill_inside(*record, at, 1, rows, count);
                last = record->last;
            }
            std::fill(rows + count, rows + length, last);
        });
    }

    /// What n-step transitions read: for each row the window of the `width` rows from it on, the powers of
    /// its entries inside the episode (0 for the others), the number of these, the power of that number, and
    /// the last row.
    template <typename Weight>
    void steps(const std::int64_t* slots, std::int64_t n, std::int64_t width, const Weight* powers,
               const StepWindows<Weight>& out) const {
        for_each(slots, n, [&](std::int64_t i, const Record* record) {
            std::int64_t* rows = out.rows + i * width;
            std::int64_t count = 1, last = slots[i];
            if (record == nullptr) {
                rows[0] = last;
            } else {
                const std::int64_t at = position(*record, slots[i]);
                count = std::min(width, record->length - at);
                fill_inside(*record, at, 1, rows, count);
                last = rows[count - 1];
            }
            std::fill(rows + count, rows + width, last);
            Weight* weights = out.weights + i * width;
            std::copy_n(powers, count, weights);
            std::fill(weights + count, weights + width, Weight{0});
            out.steps[i] = count;
            out.discounts[i] = static_cast<float>(powers[count]);
            out.last[i] = last;
        });
    }

    /// The rows of stacks of frames, `[n, k]`: the `k` rows up to each row, or with `then` the `k - 1` rows
    /// up to it and the row once more, for the frame that follows it. Before the episode, its first row, and
    /// 0 in `valid` unless that is null.
    void stack(const std::int64_t* slots, std::int64_t n, std::int64_t k, bool then, std::int64_t* out,
               Flag* valid) const {
        const std::int64_t width = then ? k - 1 : k;
        for_each(slots, n, [&](std::int64_t i, const Record* record) {
            std::int64_t* rows = out + i * k;
            std::int64_t low = width - 1;
            if (record == nullptr) {
                std::fill_n(rows, width, slots[i]);
            } else {
                const std::int64_t at = position(*record, slots[i]);
                low = width - std::min(width, at + 1);
                fill_inside(*record, at - (width - 1 - low), 1, rows + low, width - low);
                std::fill_n(rows, low, std::int64_t{record->first});
            }
            rows[k - 1] = slots[i];
            if (valid == nullptr) return;
            std::fill_n(valid + i * k, k, Flag{1});
            std::fill_n(valid + i * k, std::max(low, std::int64_t{0}), Flag{0});
        });
    }

    /// All episodes, `[count()]` each, in the order of their first rows, oldest first.
    void spans(std::int64_t* first, std::int64_t* rows, Flag* closed, std::int64_t* serial) const {
        std::vector<std::pair<std::int64_t, std::int64_t>> order;  // age of the first row, record
        for (std::int64_t r = 0; r < records_; ++r) {
            if (table_[r].length > 0) order.emplace_back(distance(cursor_, table_[r].first), r);
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

    /// Count rows with at least `need - 1` rows after them from now on. Returns the handle of the count.
    std::int64_t add_need(std::int64_t need) {
        if (need < 1) throw std::invalid_argument("need must be at least 1, got " + std::to_string(need));
        starts_.push_back({need, {}, {}});
        for (std::int64_t r = 0; r < records_; ++r) count_starts(starts_.back(), r);
        return static_cast<std::int64_t>(starts_.size()) - 1;
    }

    std::int64_t start_rows(std::int64_t handle) const { return starts_of(handle).rows.total(); }
    std::int64_t start_episodes(std::int64_t handle) const { return starts_of(handle).episodes.total(); }

    /// Draw rows that can start a window, by rank `random * total >> 63`.
    void draw(std::int64_t handle, const std::int64_t* randoms, std::int64_t n, std::int64_t* out) const {
        const Starts& starts = drawable(handle, n);
        draw_chunks(starts.rows, randoms, n, out,
                    [](const Record&, std::int64_t, std::int64_t rest) { return rest; });
    }

    /// Draw episodes by the first `n` numbers, then a row of each by the other `n`.
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

    /// Restore a state that the caller has checked. Raises only where it would lead outside memory.
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
        update_changed();
    }

private:
    static constexpr std::int32_t kNone = -1;
    static constexpr std::uint8_t kOpen = 0, kEnded = 1, kCut = 2;
    static constexpr std::uint8_t kByEnv = 0, kById = 1;
    static constexpr std::size_t kHugeBytes = std::size_t{4} << 20;
    static constexpr std::int64_t kChunk = 64;  // rows whose records are prefetched together

    struct Release {
        void operator()(std::int32_t* memory) const { std::free(memory); }
    };

    struct List {
        std::vector<std::int32_t> slots;
        std::size_t removed = 0;  // at its front
    };

    struct Record {
        std::int64_t serial = 0;
        std::int64_t key = 0;  // environment or id while it is open
        std::unique_ptr<List> list;
        std::int32_t first = 0, last = 0, stride = 0, length = 0;
        std::uint8_t kind = kByEnv;
        std::uint8_t status = kOpen;
        bool changed = false;
    };

    /// The rows and episodes that can start a window of `need` rows, by record.
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
            throw std::invalid_argument("a run must continue at slot " + std::to_string(cursor_));
        }
    }

    void mark_changed(std::int64_t r) {
        Record& record = table_[r];
        if (record.changed) return;
        record.changed = true;
        changed_.push_back(static_cast<std::int32_t>(r));
    }

    /// Remove the rows in these slots, the oldest ones, from their episodes.
    void remove_run(std::int64_t start, std::int64_t count) {
        const std::int32_t* at = slots_.get() + start;
        const std::int32_t* end = at + count;
        while (at < end) {
            const std::int32_t r = *at;
            const std::int32_t* from = at;
            while (at < end && *at == r) ++at;
            if (r != 0) remove_first(r - 1, static_cast<std::int32_t>(at - from));
        }
    }

    /// Remove the first `count` rows of an episode.
    void remove_first(std::int64_t r, std::int32_t count) {
        Record& record = table_[r];
        mark_changed(r);
        rows_ -= count;
        record.length -= count;
        if (record.length == 0) {
            record.list.reset();
        } else if (record.list != nullptr) {
            List& list = *record.list;
            list.removed += static_cast<std::size_t>(count);
            record.first = list.slots[list.removed];
            if (list.removed > list.slots.size() / 2) {
                list.slots.erase(list.slots.begin(),
                                 list.slots.begin() + static_cast<std::ptrdiff_t>(list.removed));
                list.removed = 0;
            }
        } else {
            const std::int64_t first = record.first + std::int64_t{record.stride} * count;
            record.first = static_cast<std::int32_t>(first < capacity_ ? first : first - capacity_);
        }
    }

    /// Rows that are not stored still end episodes.
    void skip_rows(std::int64_t start, std::int64_t skip, const Batch& batch) {
        std::int64_t slot = (start + capacity_ - skip % capacity_) % capacity_;
        for (std::int64_t i = 0; i < skip; ++i) {
            const bool ends = batch.ends != nullptr && batch.ends[i] != 0;
            const bool masked = batch.mask != nullptr && batch.mask[i] == 0;
            if (ends || masked) close(find_open(batch, i, slot), kCut);
            slot = slot + 1 < capacity_ ? slot + 1 : 0;
        }
    }

    /// Add the rows `[from, to)` of a batch in successive slots. Successive rows of one episode are added
    /// together.
    void add_run(std::int64_t slot, std::int64_t from, std::int64_t to, const Batch& batch) {
        for (std::int64_t i = from; i < to;) {
            if (batch.mask != nullptr && batch.mask[i] == 0) {
                close(find_open(batch, i, slot), kCut);
                slots_[slot++] = 0;
                ++i;
                continue;
            }
            std::int64_t end = i + 1;
            while (end < to && continues(batch, end)) ++end;
            std::int64_t r = find_open(batch, i, slot);
            if (r == kNone) r = begin(batch, i, slot);
            append(r, slot, end - i);
            if (batch.ends != nullptr && batch.ends[end - 1] != 0) close(r, kEnded);
            slot += end - i;
            i = end;
        }
    }

    /// Whether row `i` belongs to the same episode as the row before it in the batch.
    bool continues(const Batch& batch, std::int64_t i) const {
        return (batch.ends == nullptr || batch.ends[i - 1] == 0) &&
               (batch.mask == nullptr || batch.mask[i] != 0) &&
               (batch.ids == nullptr ? num_envs_ == 1 : batch.ids[i] == batch.ids[i - 1]);
    }

    /// In 32 bits: their division is much faster.
    std::uint32_t env_of(std::int64_t slot) const {
        return num_envs_ == 1 ? 0 : static_cast<std::uint32_t>(slot) % static_cast<std::uint32_t>(num_envs_);
    }

    /// The open episode of the environment or id of a row; kNone if there is none.
    std::int64_t find_open(const Batch& batch, std::int64_t i, std::int64_t slot) const {
        if (batch.ids == nullptr) return open_by_env_[env_of(slot)];
        const auto found = open_by_id_.find(batch.ids[i]);
        return found == open_by_id_.end() ? kNone : found->second;
    }

    std::int32_t& open_of(const Record& record) {
        return record.kind == kById ? open_by_id_[record.key]
                                    : open_by_env_[static_cast<std::size_t>(record.key)];
    }

    std::int64_t begin(const Batch& batch, std::int64_t i, std::int64_t slot) {
        std::int64_t r = records_;
        if (free_.empty()) {
            table_.require(++records_);
        } else {
            r = free_.back();
            free_.pop_back();
        }
        Record& record = table_[r];
        record.serial = ++serial_;
        record.kind = batch.ids == nullptr ? kByEnv : kById;
        record.key = batch.ids == nullptr ? static_cast<std::int64_t>(env_of(slot)) : batch.ids[i];
        open_of(record) = static_cast<std::int32_t>(r);
        return r;
    }

    void close(std::int64_t r, std::uint8_t status) {
        if (r == kNone) return;
        Record& record = table_[r];
        forget_open(record);
        record.status = status;
    }

    /// The environment or id of an episode has no open episode any more.
    void forget_open(Record& record) {
        if (record.kind == kById) {
            open_by_id_.erase(record.key);
        } else {
            open_by_env_[static_cast<std::size_t>(record.key)] = kNone;
        }
        record.key = 0;
        record.kind = kByEnv;
    }

    /// Append `count` rows, from `slot` on, to an episode. They do not wrap around the end of the ring.
    void append(std::int64_t r, std::int64_t slot, std::int64_t count) {
        Record& record = table_[r];
        mark_changed(r);
        std::fill_n(slots_.get() + slot, count, static_cast<std::int32_t>(r) + 1);
        const auto step = static_cast<std::int32_t>(distance(record.last, slot));
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

    /// Free the changed episodes without rows, and count the starts of the others again.
    void update_changed() {
        for (const std::int32_t r : changed_) {
            Record& record = table_[r];
            record.changed = false;
            if (record.length == 0) {
                if (record.status == kOpen) forget_open(record);
                record = Record();
                free_.push_back(r);
            }
            for (Starts& starts : starts_) count_starts(starts, r);
        }
        changed_.clear();
    }

    void count_starts(Starts& starts, std::int64_t r) {
        const std::int64_t rows = std::max(table_[r].length - starts.need + 1, std::int64_t{0});
        starts.rows.set(r, rows);
        starts.episodes.set(r, rows > 0 ? 1 : 0);
    }

    // -- reading --------------------------------------------------------------------------------------------

    /// The number of slots from one slot forward to another, in `[0, capacity)`.
    std::int64_t distance(std::int64_t from, std::int64_t to) const {
        return to >= from ? to - from : to - from + capacity_;
    }

    std::int64_t position(const Record& record, std::int64_t slot) const {
        const std::int64_t steps = distance(record.first, slot);
        if (record.list == nullptr) {
            if (record.stride <= 1) return steps;
            return static_cast<std::uint32_t>(steps) / static_cast<std::uint32_t>(record.stride);
        }
        const auto begin = record.list->slots.begin() + static_cast<std::ptrdiff_t>(record.list->removed);
        const auto younger = [&](std::int32_t at, std::int64_t age) {
            return distance(record.first, at) < age;
        };
        return std::lower_bound(begin, record.list->slots.end(), steps, younger) - begin;
    }

    std::int64_t slot_at(const Record& record, std::int64_t position) const {
        if (record.list != nullptr) {
            return record.list->slots[record.list->removed + static_cast<std::size_t>(position)];
        }
        const std::int64_t slot = record.first + record.stride * position;
        return slot < capacity_ ? slot : slot - capacity_;
    }

    /// Call `visit(i, record)` for each slot, with null for a slot of no episode. Prefetches slots and
    /// records.
    template <typename Visit>
    void for_each(const std::int64_t* slots, std::int64_t n, Visit visit) const {
        require_count(n);
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

    /// Fill one window. Its entries `[low, high)` are inside the episode.
    void fill_window(const Record& record, std::int64_t at, const Span& span, std::int64_t* out,
                     Flag* valid) const {
        const std::int64_t width = span.before + 1 + span.after;
        const std::int64_t low = span.before - std::min(span.before, steps_in(at, span.dilation));
        const std::int64_t high =
            span.before + 1 + std::min(span.after, steps_in(record.length - 1 - at, span.dilation));
        fill_inside(record, at - (span.before - low) * span.dilation, span.dilation, out + low, high - low);
        if (high - low == width) {
            std::fill_n(valid, width, Flag{1});
            return;
        }
        std::fill_n(out, low, std::int64_t{record.first});
        std::fill(out + high, out + width, std::int64_t{record.last});
        for (std::int64_t k = 0; k < width; ++k) valid[k] = low <= k && k < high ? 1 : 0;
    }

    /// Every `dilation`-th row from a position on, `count` rows.
    void fill_inside(const Record& record, std::int64_t position, std::int64_t dilation, std::int64_t* out,
                     std::int64_t count) const {
        if (record.list != nullptr) {
            const std::int32_t* slots = record.list->slots.data() + record.list->removed + position;
            for (std::int64_t k = 0; k < count; ++k) out[k] = slots[k * dilation];
            return;
        }
        const std::int64_t step = record.stride * dilation;  // of two or more entries: below the capacity
        std::int64_t slot = slot_at(record, position);
        if (slot + step * (count - 1) < capacity_) {  // most windows do not wrap around the ring
            for (std::int64_t k = 0; k < count; ++k) out[k] = slot + k * step;
            return;
        }
        for (std::int64_t k = 0; k < count; ++k) {
            out[k] = slot;
            slot += step;
            if (slot >= capacity_) slot -= capacity_;
        }
    }

    /// The number of whole steps in `rows` rows. In 32 bits, as in `env_of`.
    static std::int64_t steps_in(std::int64_t rows, std::int64_t dilation) {
        return static_cast<std::uint32_t>(rows) / static_cast<std::uint32_t>(dilation);
    }

    // -- draws ----------------------------------------------------------------------------------------------

    /// `random * total >> 63`, of the lower 63 bits of the random number.
    static std::int64_t scale(std::int64_t random, std::int64_t total) {
        return static_cast<std::int64_t>(
            multiply_high(static_cast<std::uint64_t>(random) << 1, static_cast<std::uint64_t>(total)));
    }

    /// Draw records by their ranks in a tree. `choose(record, i, rest of the rank)` returns a position in
    /// each.
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

    /// The starts of a handle. Raises if `n` rows cannot be drawn.
    const Starts& drawable(std::int64_t handle, std::int64_t n) const {
        const Starts& starts = starts_of(handle);
        require_count(n);
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
            good = state.kinds[r] == kById ||
                   (state.kinds[r] == kByEnv && state.keys[r] >= 0 && state.keys[r] < num_envs_);
        }
        for (std::int64_t i = 0; good && i < free_count; ++i) {
            good = state.free[i] >= 0 && state.free[i] < records;
        }
        if (!good)
            throw std::invalid_argument("the state does not fit a table of this capacity and num_envs");
    }

    std::int64_t capacity_;
    std::int64_t num_envs_;
    std::int64_t cursor_ = 0;                         // slot after the newest row
    std::int64_t present_ = 0;                        // rows, those of no episode included
    std::int64_t rows_ = 0;                           // rows of episodes
    std::int64_t records_ = 0;                        // free ones included
    std::int64_t serial_ = 0;                         // of the newest episode; the first one is 1
    std::unique_ptr<std::int32_t[], Release> slots_;  // record + 1; 0 for none
    Chunks<Record> table_;
    std::vector<std::int32_t> free_;
    std::vector<std::int32_t> open_by_env_;
    std::unordered_map<std::int64_t, std::int32_t> open_by_id_;
    std::vector<std::int32_t> changed_;
    std::vector<Starts> starts_;
};

}  // namespace ostinato
