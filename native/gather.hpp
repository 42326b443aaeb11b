// Batched copies between the rows of a storage ("table" side, scattered) and contiguous batches ("batch"
// side). Works on raw memory only: no Python here. Callers have checked every slot before they come in.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "platform.hpp"

namespace ostinato {

using Byte = unsigned char;

/// A base table of a field. The tables of one field, put end to end, form one virtual table.
struct Segment {
    Byte* base;
    std::int64_t rows;
};

/// One column of a batch inside a row: where it starts in the row, and the contiguous memory of the batch.
struct Column {
    std::size_t offset;
    std::size_t bytes;
    Byte* batch;
};

/// Columns that share rows: a row is located and prefetched once, then copied column by column.
/// Step i copies between table slot `slots[i]` and batch row `picks[i]`.
struct Pass {
    const Segment* segments = nullptr;  // tables of the first column; the others lie at an offset from it
    std::size_t stride = 0;
    std::size_t span = 0;                 // bytes of a row, from its first column to the end of its last one
    std::int64_t rows = 0;                // of the virtual table
    std::int64_t steps = 0;               // rows to copy
    const std::int64_t* slots = nullptr;  // null: the ring run that begins at slot `start`
    Byte* const* located = nullptr;       // the rows themselves, where the caller knows them better
    std::size_t first_column = 0;         // in Plan::columns
    std::size_t columns_end = 0;
};

/// All that one call copies.
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
constexpr std::int64_t kAhead = 16;  // rows asked for before they are copied: enough to cover a memory access
constexpr std::int64_t kBlock = 4;   // rows copied column by column; longer blocks starve the prefetches
constexpr std::int64_t kRing = 32;   // located rows kept: at least kAhead + kBlock, a power of two
constexpr std::size_t kAheadBytes = 4096;    // of wide rows fewer are asked for
constexpr std::size_t kPrefetchBytes = 512;  // of one row; the hardware follows a longer row by itself

static_assert(kRing >= kAhead + kBlock && std::has_single_bit(std::uint64_t{kRing}) &&
              kAheadBytes >= kPrefetchBytes);
static_assert(std::has_single_bit(std::uint64_t{kAhead}) && std::has_single_bit(std::uint64_t{kBlock}));

/// Which way rows go, and how batch rows are numbered.
enum class Way { to_batch, to_table, to_table_picked };

/// Some rows next to each other in the order of steps: `count` located table rows from step `first` on.
struct Block {
    Byte* const* rows;
    std::int64_t count;
    std::int64_t first;
};

/// Apply `copy(to, from)` to one column of a block.
template <Way way, typename Copy>
inline void copy_column(const Plan& plan, const Block& block, const Column& column, std::size_t bytes,
                        Copy copy) {
    const std::size_t offset = column.offset;
    Byte* batch = column.batch + static_cast<std::size_t>(plan.skip + block.first) * bytes;
    for (std::int64_t i = 0; i < block.count; ++i, batch += bytes) {
        if constexpr (way == Way::to_batch) {
            copy(batch, block.rows[i] + offset);
        } else if constexpr (way == Way::to_table) {
            copy(block.rows[i] + offset, batch);
        } else {
            copy(block.rows[i] + offset,
                 column.batch + static_cast<std::size_t>(plan.picks[block.first + i]) * bytes);
        }
    }
}

template <Way way, std::size_t bytes>
inline void copy_fixed(const Plan& plan, const Block& block, const Column& column) {
    copy_column<way>(plan, block, column, bytes,
                     [](Byte* to, const Byte* from) { std::memcpy(to, from, bytes); });
}

/// Sizes of 16 * (chunks - 1) + 1 to 16 * chunks bytes; the last chunk overlaps the one before it.
template <Way way, std::size_t chunks>
inline void copy_chunks(const Plan& plan, const Block& block, const Column& column) {
    const std::size_t bytes = column.bytes;
    copy_column<way>(plan, block, column, bytes, [bytes](Byte* to, const Byte* from) {
        for (std::size_t chunk = 0; chunk + 1 < chunks; ++chunk)
            std::memcpy(to + 16 * chunk, from + 16 * chunk, 16);
        std::memcpy(to + bytes - 16, from + bytes - 16, 16);
    });
}

/// Small sizes are copied inline: a call of memcpy costs more than they do.
template <Way way>
void copy_block(const Plan& plan, const Block& block, const Column& column) {
    switch (column.bytes) {
        case 0: return;
        case 1: return copy_fixed<way, 1>(plan, block, column);
        case 2: return copy_fixed<way, 2>(plan, block, column);
        case 4: return copy_fixed<way, 4>(plan, block, column);
        case 8: return copy_fixed<way, 8>(plan, block, column);
        case 16: return copy_fixed<way, 16>(plan, block, column);
        default: break;
    }
    switch ((column.bytes + 15) / 16) {
        case 1: break;
        case 2: return copy_chunks<way, 2>(plan, block, column);
        case 3: return copy_chunks<way, 3>(plan, block, column);
        case 4: return copy_chunks<way, 4>(plan, block, column);
        case 5: return copy_chunks<way, 5>(plan, block, column);
        case 6: return copy_chunks<way, 6>(plan, block, column);
        case 7: return copy_chunks<way, 7>(plan, block, column);
        case 8: return copy_chunks<way, 8>(plan, block, column);
        default: break;
    }
    const std::size_t bytes = column.bytes;
    copy_column<way>(plan, block, column, bytes,
                     [bytes](Byte* to, const Byte* from) { std::memcpy(to, from, bytes); });
}

/// A pass on its way: rows [0, opened) are located and asked for.
template <Way way>
class Lane {
public:
    /// Begin a pass.
    void enter(const Plan& plan, const Pass& pass) {
        pass_ = pass;
        start_ = plan.start;
        opened_ = 0;
        end_ = pass.steps;
        reach_ = std::min(pass.span, kPrefetchBytes);
        // A power of two, and so the block: blocks then lie in the ring without a break.
        const std::size_t fit = std::bit_floor(kAheadBytes / std::max<std::size_t>(reach_, 1));
        ahead_ = std::min(static_cast<std::int64_t>(fit), kAhead);
        block_ = std::max(ahead_ / (kAhead / kBlock), std::int64_t{1});
    }

    /// Locate the rows up to step `until`, and ask for their memory.
    void open(std::int64_t until) {
        until = std::min(until, end_);
        if (until <= opened_) return;
        switch ((reach_ + kLine - 1) / kLine) {
            case 1: return open_rows<1>(until);
            case 2: return open_rows<2>(until);
            case 3: return open_rows<3>(until);
            case 4: return open_rows<4>(until);
            default: return open_rows<0>(until);
        }
    }

    /// Copy all steps. The first rows of the lane after this one are asked for on the way.
    void copy(const Plan& plan, Lane* after) {
        open(ahead_);
        for (std::int64_t step = 0; step < end_; step += block_) {
            open(step + ahead_ + block_);
            if (opened_ == end_ && after != nullptr)
                after->open(std::min(after->opened_ + block_, after->ahead_));
            const Block block{&rows_[ring(step)], std::min(block_, end_ - step), step};
            for (std::size_t c = pass_.first_column; c < pass_.columns_end; ++c) {
                copy_block<way>(plan, block, plan.columns[c]);
            }
        }
    }

private:
    /// `lines` is the number of cache lines, or 0 if only reach_ tells: a loop of known length costs less.
    template <std::size_t lines>
    void open_rows(std::int64_t until) {
        const Pass pass = pass_;  // locals, so that the loop keeps them in registers
        const std::size_t reach = reach_;
        for (std::int64_t step = opened_; step < until; ++step) {
            Byte* row = locate(pass, step);
            rows_[ring(step)] = row;
            for (std::size_t at = 0; at < (lines > 0 ? lines * kLine : reach); at += kLine) hint(row + at);
            if (reach > 0) hint(row + reach - 1);  // the row may begin anywhere in its first line
        }
        opened_ = until;
    }

    static void hint(const Byte* address) { prefetch<way != Way::to_batch>(address); }

    static std::size_t ring(std::int64_t step) { return static_cast<std::size_t>(step) % kRing; }

    Byte* locate(const Pass& pass, std::int64_t step) const {
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
    std::int64_t start_ = 0, end_ = 0, opened_ = 0, ahead_ = 1, block_ = 1;
    std::size_t reach_ = 0;
};

/// All steps of every pass.
template <Way way>
void copy_steps(const Plan& plan) {
    const std::vector<Pass>& passes = plan.passes;
    if (passes.empty()) return;
    std::array<Lane<way>, 2> lanes;
    lanes[0].enter(plan, passes[0]);
    for (std::size_t p = 0; p < passes.size(); ++p) {
        Lane<way>* after = p + 1 < passes.size() ? &lanes[(p + 1) % 2] : nullptr;
        if (after != nullptr) after->enter(plan, passes[p + 1]);
        lanes[p % 2].copy(plan, after);
    }
}

/// A column that fills its rows is contiguous on both sides: whole pieces, cut at the end of each table.
inline void write_pieces(const Plan& plan, const Pass& pass) {
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

/// The first position whose value is outside [0, rows), or n.
inline std::int64_t find_out_of_range(const std::int64_t* values, std::int64_t n, std::int64_t rows) {
    const auto last = static_cast<std::uint64_t>(rows) - 1;
    std::uint64_t seen = 0;
    for (std::int64_t i = 0; rows > 0 && i < n; ++i) {
        const auto value = static_cast<std::uint64_t>(values[i]);
        seen |= value | (last - value);  // the sign bit stays set once a value was negative or above `last`
    }
    if (rows > 0 && (seen >> 63) == 0) return n;
    return std::find_if(values, values + n, [rows](std::int64_t v) { return v < 0 || v >= rows; }) - values;
}

/// Table rows to batches. Loads of stamps that follow in program order are not moved before the copies.
inline void gather_rows(const Plan& plan) {
    detail::copy_steps<detail::Way::to_batch>(plan);
    std::atomic_thread_fence(std::memory_order_acquire);
}

/// Batches to table rows, in the order of the steps. Stamps stored before are seen before the rows change.
inline void scatter_rows(const Plan& plan) {
    std::atomic_thread_fence(std::memory_order_release);
    if (plan.picks == nullptr) {
        detail::copy_steps<detail::Way::to_table>(plan);
    } else {
        detail::copy_steps<detail::Way::to_table_picked>(plan);
    }
    std::atomic_thread_fence(std::memory_order_release);
}

/// As scatter_rows, for the ring run from plan.start. Rows of one column are written piece by piece.
inline void write_rows(Plan plan) {
    std::atomic_thread_fence(std::memory_order_release);
    const auto is_contiguous = [&plan](const Pass& pass) {
        return pass.columns_end - pass.first_column == 1 &&
               plan.columns[pass.first_column].bytes == pass.stride;
    };
    const auto rest = std::partition(plan.passes.begin(), plan.passes.end(), is_contiguous);
    for (auto pass = plan.passes.begin(); pass != rest; ++pass) detail::write_pieces(plan, *pass);
    plan.passes.erase(plan.passes.begin(), rest);
    detail::copy_steps<detail::Way::to_table>(plan);
    std::atomic_thread_fence(std::memory_order_release);
}

}  // namespace ostinato
