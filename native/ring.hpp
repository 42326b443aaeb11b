// The counts of a buffer: rows, cursor and serial numbers. Python reads and changes them under the lock of
// the buffer, and so do calls that write and draw without Python. No Python here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "prioritized.hpp"

namespace ostinato {

/// Rows that are written next to each other in a ring; see `Run` in core/records.py.
struct RingRun {
    std::int64_t start;
    std::int64_t rows;
    std::int64_t skip;
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

    /// The next slots of the ring for `n` rows.
    RingRun next(std::int64_t n) const {
        const std::int64_t skip = std::max<std::int64_t>(n - capacity, 0);
        return {(cursor + skip) % capacity, n - skip, skip};
    }

    /// Record that a run of `next` is written.
    void record(const RingRun& run) {
        const std::int64_t end = run.start + run.rows;
        written += run.skip + run.rows;
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

    void record(const RingRun& run, std::int64_t capacity) {
        const std::int64_t end = run.start + run.rows;
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
