// Batched copies between the rows of a table and contiguous batches, on raw memory. Callers check every slot
// first. No Python here.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "intended_races.hpp"
#include "memory.hpp"
#include "platform.hpp"

namespace ostinato {

/// A base table of a field. The tables of one field, put end to end, form one virtual table.
struct Segment {
    Byte* base;
    std::int64_t rows;
};

/// A field in one pass: where it starts in a row, and its contiguous batch, which a write only reads.
struct Column {
    std::size_t offset;
    std::size_t bytes;
    Byte* batch;
};

/// Columns that share rows: a row is located and prefetched once, then copied column by column.
/// Step i copies between table slot `slots[i]` and batch row `picks[i]`.
struct Pass {
    const Segment* segments = nullptr;  // tables of the first column; other columns are at an offset
    std::size_t stride = 0;
    std::size_t span = 0;                 // bytes of a row, from its first column to the end of its last one
    std::int64_t rows = 0;                // of the virtual table
    std::int64_t steps = 0;               // rows to copy
    const std::int64_t* slots = nullptr;  // null: the ring run from slot `Plan::start`
    Byte* const* located = nullptr;       // addresses of the rows, in place of `slots`
    std::size_t first_column = 0;         // in Plan::columns
    std::size_t columns_end = 0;
};

/// All copies of one call.
struct Plan {
    std::vector<Pass> passes;
    std::vector<Column> columns;
    const std::int64_t* picks = nullptr;  // null: batch rows `skip`, `skip + 1`, ...
    std::int64_t skip = 0;
    std::int64_t start = 0;

    std::size_t bytes() const {
        std::size_t bytes = 0;
        for (const Pass& pass : passes) {
            for (std::size_t c = pass.first_column; c < pass.columns_end; ++c) {
                bytes += columns[c].bytes * static_cast<std::size_t>(pass.steps);
            }
        }
        return bytes;
    }
};

namespace detail {

constexpr std::size_t kLine = 64;
constexpr std::int64_t kAhead = 32;        // rows prefetched before they are copied: covers a memory access
constexpr std::int64_t kBlock = 4;         // rows copied column by column; longer blocks delay the prefetches
constexpr std::int64_t kRing = 64;         // located rows kept: at least kAhead + kBlock, a power of two
constexpr std::size_t kAheadBytes = 8192;  // limit of all prefetches: fewer rows if they are wide
constexpr std::size_t kPrefetchBytes = 512;  // of one row; hardware prefetches the rest of a longer row

static_assert(kRing >= kAhead + kBlock && std::has_single_bit(std::uint64_t{kRing}) &&
              kAheadBytes >= kPrefetchBytes);
static_assert(std::has_single_bit(std::uint64_t{kAhead}) && std::has_single_bit(std::uint64_t{kBlock}));

/// The direction of a copy. `to_table_picked` reads the batch rows `Plan::picks`.
enum class Direction { to_batch, to_table, to_table_picked };

/// `count` located table rows, from step `first` on.
struct Block {
    Byte* const* rows;
    std::int64_t count;
    std::int64_t first;
};

/// Apply `copy(to, from)` to one column of a block.
template <Direction direction, typename Copy>
inline void copy_column(const Plan& plan, const Block& block, const Column& column, std::size_t bytes,
                        Copy copy) {
    const std::size_t offset = column.offset;
    Byte* batch = column.batch + static_cast<std::size_t>(plan.skip + block.first) * bytes;
    for (std::int64_t i = 0; i < block.count; ++i, batch += bytes) {
        if constexpr (direction == Direction::to_batch) {
            copy(batch, block.rows[i] + offset);
        } else if constexpr (direction == Direction::to_table) {
            copy(block.rows[i] + offset, batch);
        } else {
            copy(block.rows[i] + offset,
                 column.batch + static_cast<std::size_t>(plan.picks[block.first + i]) * bytes);
        }
    }
}

template <Direction direction, std::size_t bytes>
inline void copy_fixed(const Plan& plan, const Block& block, const Column& column) {
    copy_column<direction>(plan, block, column, bytes,
                           [](Byte* to, const Byte* from) { std::memcpy(to, from, bytes); });
}

/// Sizes from 16 * (chunks - 1) + 1 to 16 * chunks bytes. The last chunk may overlap the one before it.
template <Direction direction, std::size_t chunks>
inline void copy_chunks(const Plan& plan, const Block& block, const Column& column) {
    const std::size_t bytes = column.bytes;
    copy_column<direction>(plan, block, column, bytes, [bytes](Byte* to, const Byte* from) {
        for (std::size_t chunk = 0; chunk + 1 < chunks; ++chunk)
            std::memcpy(to + 16 * chunk, from + 16 * chunk, 16);
        std::memcpy(to + bytes - 16, from + bytes - 16, 16);
    });
}

/// Copy one column of a block. Small sizes are copied inline: a call of memcpy costs more than the copy.
template <Direction direction>
void copy_block(const Plan& plan, const Block& block, const Column& column) {
    switch (column.bytes) {
        case 0: return;
        case 1: return copy_fixed<direction, 1>(plan, block, column);
        case 2: return copy_fixed<direction, 2>(plan, block, column);
        case 4: return copy_fixed<direction, 4>(plan, block, column);
        case 8: return copy_fixed<direction, 8>(plan, block, column);
        case 16: return copy_fixed<direction, 16>(plan, block, column);
        default: break;
    }
    switch ((column.bytes + 15) / 16) {
        case 1: break;
        case 2: return copy_chunks<direction, 2>(plan, block, column);
        case 3: return copy_chunks<direction, 3>(plan, block, column);
        case 4: return copy_chunks<direction, 4>(plan, block, column);
        case 5: return copy_chunks<direction, 5>(plan, block, column);
        case 6: return copy_chunks<direction, 6>(plan, block, column);
        case 7: return copy_chunks<direction, 7>(plan, block, column);
        case 8: return copy_chunks<direction, 8>(plan, block, column);
        default: break;
    }
    const std::size_t bytes = column.bytes;
    copy_column<direction>(plan, block, column, bytes,
                           [bytes](Byte* to, const Byte* from) { std::memcpy(to, from, bytes); });
}

/// A pass in progress: the rows of steps [0, located_) are located and prefetched.
template <Direction direction>
class PassCopier {
public:
    /// Begin a pass.
    void begin(const Plan& plan, const Pass& pass) {
        pass_ = pass;
        start_ = plan.start;
        located_ = 0;
        end_ = pass.steps;
        reach_ = std::min(pass.span, kPrefetchBytes);
        // A power of two, as the block is: a block then never wraps around the ring.
        const std::size_t fit = std::bit_floor(kAheadBytes / std::max<std::size_t>(reach_, 1));
        ahead_ = std::min(static_cast<std::int64_t>(fit), kAhead);
        block_ = std::max(ahead_ / (kAhead / kBlock), std::int64_t{1});
    }

    /// Locate and prefetch the rows of the steps before `until`.
    void locate(std::int64_t until) {
        until = std::min(until, end_);
        if (until <= located_) return;
        switch ((reach_ + kLine - 1) / kLine) {
            case 1: return locate_rows<1>(until);
            case 2: return locate_rows<2>(until);
            case 3: return locate_rows<3>(until);
            case 4: return locate_rows<4>(until);
            default: return locate_rows<0>(until);
        }
    }

    /// Copy all steps. The first rows of the next pass are prefetched meanwhile.
    void copy(const Plan& plan, PassCopier* next) {
        locate(ahead_);
        for (std::int64_t step = 0; step < end_; step += block_) {
            locate(step + ahead_ + block_);
            if (located_ == end_ && next != nullptr)
                next->locate(std::min(next->located_ + block_, next->ahead_));
            const Block block{&rows_[ring(step)], std::min(block_, end_ - step), step};
            for (std::size_t c = pass_.first_column; c < pass_.columns_end; ++c) {
                copy_block<direction>(plan, block, plan.columns[c]);
            }
        }
    }

private:
    /// `lines` is the number of cache lines of a row, 0 if it is not a constant: a constant loop costs less.
    template <std::size_t lines>
    void locate_rows(std::int64_t until) {
        const Pass pass = pass_;  // locals, so that the loop keeps them in registers
        const std::size_t reach = reach_;
        for (std::int64_t step = located_; step < until; ++step) {
            Byte* row = address_of(pass, step);
            rows_[ring(step)] = row;
            for (std::size_t at = 0; at < (lines > 0 ? lines * kLine : reach); at += kLine)
                prefetch_line(row + at);
            if (reach > 0) prefetch_line(row + reach - 1);  // a row may begin anywhere in its first line
        }
        located_ = until;
    }

    static void prefetch_line(const Byte* address) { prefetch<direction != Direction::to_batch>(address); }

    static std::size_t ring(std::int64_t step) { return static_cast<std::size_t>(step) % kRing; }

    Byte* address_of(const Pass& pass, std::int64_t step) const {
        if (pass.located != nullptr) return pass.located[step];
        std::int64_t slot = start_ + step;
        if (pass.slots != nullptr) {
            slot = pass.slots[step];
        } else if (slot >= pass.rows) {
            slot -= pass.rows;
        }
        const Segment* segment = pass.segments;
        while (slot >= segment->rows) {
            slot -= segment->rows;
            ++segment;
        }
        return segment->base + static_cast<std::size_t>(slot) * pass.stride;
    }

    std::array<Byte*, kRing> rows_;
    Pass pass_;
    std::int64_t start_ = 0, end_ = 0, located_ = 0, ahead_ = 1, block_ = 1;
    std::size_t reach_ = 0;
};

/// All steps of every pass.
template <Direction direction>
void copy_steps(const Plan& plan) {
    const std::vector<Pass>& passes = plan.passes;
    if (passes.empty()) return;
    std::array<PassCopier<direction>, 2> copiers;
    copiers[0].begin(plan, passes[0]);
    for (std::size_t p = 0; p < passes.size(); ++p) {
        PassCopier<direction>* next = p + 1 < passes.size() ? &copiers[(p + 1) % 2] : nullptr;
        if (next != nullptr) next->begin(plan, passes[p + 1]);
        copiers[p % 2].copy(plan, next);
    }
}

/// Copy a ring run of a column that fills its rows: one memcpy for each contiguous part of a table.
inline void write_contiguous(const Plan& plan, const Pass& pass) {
    std::int64_t n = pass.steps;
    const Column& column = plan.columns[pass.first_column];
    const Byte* from = column.batch + static_cast<std::size_t>(plan.skip) * column.bytes;
    std::int64_t slot = plan.start;
    while (n > 0 && column.bytes > 0) {
        const Segment* segment = pass.segments;
        std::int64_t at = slot;
        for (; at >= segment->rows; ++segment) at -= segment->rows;
        const std::int64_t rows = std::min(n, segment->rows - at);
        const std::size_t bytes = static_cast<std::size_t>(rows) * column.bytes;
        std::memcpy(segment->base + static_cast<std::size_t>(at) * column.bytes, from, bytes);
        from += bytes;
        n -= rows;
        slot = slot + rows == pass.rows ? 0 : slot + rows;
    }
}

}  // namespace detail

/// Report to ThreadSanitizer what a gather accesses besides the rows of the table.
inline void check_accesses(const Plan& plan) {
    for (const Pass& pass : plan.passes) {
        const auto steps = static_cast<std::size_t>(pass.steps);
        check_read(pass.slots, steps * sizeof(std::int64_t));
        for (std::size_t c = pass.first_column; c < pass.columns_end; ++c) {
            check_write(plan.columns[c].batch, steps * plan.columns[c].bytes);
        }
    }
}

/// Copy table rows to batches. Loads of generations after it, in program order, stay after the copies.
inline void gather_rows(const Plan& plan) {
    check_accesses(plan);
    {
        const IntendedRaces racing_reads;
        detail::copy_steps<detail::Direction::to_batch>(plan);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
}

/// Copy batches to table rows, in the order of the steps. Generations stored before become visible before
/// the rows change.
inline void scatter_rows(const Plan& plan) {
    std::atomic_thread_fence(std::memory_order_release);
    if (plan.picks == nullptr) {
        detail::copy_steps<detail::Direction::to_table>(plan);
    } else {
        detail::copy_steps<detail::Direction::to_table_picked>(plan);
    }
    std::atomic_thread_fence(std::memory_order_release);
}

/// As scatter_rows, for the ring run from `plan.start`. Passes of one contiguous column are copied at once.
inline void write_rows(Plan plan) {
    std::atomic_thread_fence(std::memory_order_release);
    const auto is_contiguous = [&plan](const Pass& pass) {
        return pass.columns_end - pass.first_column == 1 &&
               plan.columns[pass.first_column].bytes == pass.stride;
    };
    const auto rest = std::partition(plan.passes.begin(), plan.passes.end(), is_contiguous);
    for (auto pass = plan.passes.begin(); pass != rest; ++pass) detail::write_contiguous(plan, *pass);
    plan.passes.erase(plan.passes.begin(), rest);
    detail::copy_steps<detail::Direction::to_table>(plan);
    std::atomic_thread_fence(std::memory_order_release);
}

}  // namespace ostinato
