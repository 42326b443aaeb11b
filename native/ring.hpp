// The counts of a buffer: rows, cursor and serial numbers. Python reads and changes them under the lock of
// the buffer, and so do calls that write and draw without Python. No Python here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "prioritized.hpp"

namespace ostinato {

/// Rows that are written next to each other in a ring; see `Run` in core/records.py.
struct RingRun {
    std::int64_t start;
    std::int64_t rows;
    std::int64_t skip;

    std::int64_t total() const { return skip + rows; }
};

/// Where the rows of a batch go: row `run.skip + i` to slot i of the run, or to `slots[i]`.
struct Placed {
    RingRun run{};
    std::vector<std::int64_t> slots;  // of rows that are not in ring order
    std::vector<std::int64_t> picks;  // where each row is in a batch that is not in the order of writing

    /// The slot after the last one, which may be the capacity, or beyond where the run wraps around.
    std::int64_t end() const { return slots.empty() ? run.start + run.rows : slots.back() + 1; }

    std::int64_t slot(std::int64_t i, std::int64_t capacity) const {
        return slots.empty() ? (run.start + i) % capacity : slots[static_cast<std::size_t>(i)];
    }

    /// Write rows of a batch `[envs, time]` in the order `[time, envs]`.
    void pick_across(std::int64_t envs, std::int64_t time) {
        for (std::int64_t row = 0; row < run.total(); ++row) picks.push_back(row % envs * time + row / envs);
    }
};

/// The state of a ring, but for its arrays; see core/ring.py.
struct RingCounts {
    std::int64_t capacity = 0;
    std::int64_t rows = 0;
    std::int64_t cursor = 0;
    std::int64_t written = 0;
    std::int64_t base = 0;
    bool in_order = true;
    /// First serial number whose row would replace one that was drawn ahead; see buffers/drawn_ahead.py.
    std::int64_t reserved_from = std::numeric_limits<std::int64_t>::max();
    /// Where new rows are in an order of slots that they take in turn; see buffers/remover.py.
    std::int64_t turn = 0;

    /// The next slots of the ring for `n` rows.
    RingRun next(std::int64_t n) const {
        const std::int64_t skip = std::max<std::int64_t>(n - capacity, 0);
        return {(cursor + skip) % capacity, n - skip, skip};
    }

    /// Whether a write of `n` rows may replace rows that were drawn ahead. In another order than that of the
    /// ring any write may.
    bool reserves(std::int64_t n, bool in_ring_order) const {
        return in_ring_order ? n >= reserved_from - written
                             : reserved_from != std::numeric_limits<std::int64_t>::max();
    }

    /// Record that `total` rows are written, the last one to the slot before `end`.
    void record(std::int64_t total, std::int64_t end) {
        written += total;
        rows = std::max(rows, std::min(capacity, end));
        cursor = end % capacity;
    }

    /// The generations of all slots, in ring order.
    Generations generations() const {
        const std::int64_t newest = written - cursor + 1;
        return {nullptr, 0, cursor, newest, newest - capacity, base};
    }

    /// The generation of the row in a slot, in ring order; at most `base` where there is no row.
    std::int64_t generation(std::int64_t slot) const {
        const std::int64_t newest = written - cursor + 1;
        return slot + (slot < cursor ? newest : newest - capacity);
    }
};

/// The counts of a storage; see storages/tensor.py.
struct StoredRows {
    std::int64_t rows = 0;
    std::int64_t cursor = 0;
    std::int64_t writes = 0;
    bool plain = false;  // whether a write only changes rows of the table

    /// Record a write, the last row of which went to the slot before `end`.
    void record(std::int64_t end, std::int64_t capacity) {
        rows = std::max(rows, std::min(capacity, end));
        cursor = end % capacity;
        writes += 1;
    }
};

/// What a buffer counts; see buffers/store.py.
struct BufferCounts {
    std::int64_t written = 0;
    std::int64_t since_empty = 0;
    std::int64_t drawn = 0;
    std::int64_t redone = 0;
    std::int64_t writes_seen = 0;
};

}  // namespace ostinato
