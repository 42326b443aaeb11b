// Gathers of slices: rows that mostly follow each other in the table. No Python here.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gather.hpp"
#include "intended_races.hpp"
#include "memory.hpp"
#include "platform.hpp"

namespace ostinato {
namespace detail {

/// Copies the slices of one pass, and prefetches those that follow.
class SliceCopier {
public:
    SliceCopier(const Plan& plan, const Pass& pass, std::int64_t length)
        : plan_(plan), pass_(pass), length_(length), count_(pass.steps / length) {
        rows_.resize(static_cast<std::size_t>(length));
        bytes_ = std::min((static_cast<std::size_t>(length) - 1) * pass.stride + pass.span, kMostBytes);
    }

    void copy() {
        const std::size_t columns = pass_.columns_end - pass_.first_column;
        if (columns == 0) return;
        for (std::int64_t i = 0; i < std::min(kAheadSlices, count_); ++i) prefetch_part(i, 0, 1);
        for (std::int64_t i = 0; i < count_; ++i) {
            const std::int64_t* slots = pass_.slots + i * length_;
            const bool in_order = slots[length_ - 1] - slots[0] == length_ - 1 && is_in_one(slots);
            if (!in_order) locate(slots);
            const Byte* first = address_of(slots[0]);
            for (std::size_t c = 0; c < columns; ++c) {
                prefetch_part(i + kAheadSlices, c, columns);  // in parts, between the copies
                const Column& column = plan_.columns[pass_.first_column + c];
                if (in_order) {
                    copy_column(column, first + column.offset, i);
                } else {
                    copy_block<Direction::to_batch>(plan_, {rows_.data(), length_, i * length_}, column);
                }
            }
        }
    }

private:
    static constexpr std::int64_t kAheadSlices = 3;
    static constexpr std::size_t kMostBytes = 4096;  // of a slice that are prefetched

    /// Whether all rows of a slice lie in the table of its first one.
    bool is_in_one(const std::int64_t* slots) const {
        std::int64_t rows = pass_.segments->rows;
        for (const Segment* segment = pass_.segments; slots[0] >= rows; rows += segment->rows) ++segment;
        return slots[length_ - 1] < rows;
    }

    const Byte* address_of(std::int64_t slot) const {
        const Segment* segment = pass_.segments;
        for (; slot >= segment->rows; ++segment) slot -= segment->rows;
        return segment->base + static_cast<std::size_t>(slot) * pass_.stride;
    }

    void locate(const std::int64_t* slots) {
        for (std::int64_t k = 0; k < length_; ++k) {
            rows_[static_cast<std::size_t>(k)] = const_cast<Byte*>(address_of(slots[k]));
        }
    }

    /// Prefetch one of `parts` parts of a slice, as if its rows followed each other. Not const: a compiler
    /// may drop calls of functions that change nothing.
    void prefetch_part(std::int64_t i, std::size_t part, std::size_t parts) {
        if (i >= count_) return;
        prefetched_ = i;
        const Byte* first = address_of(pass_.slots[i * length_]);
        for (std::size_t at = part * bytes_ / parts; at < (part + 1) * bytes_ / parts; at += kLine) {
            prefetch<false>(first + at);
        }
        if (part + 1 == parts && bytes_ > 0) prefetch<false>(first + bytes_ - 1);
    }

    /// Copy one column of a slice whose rows follow each other.
    void copy_column(const Column& column, const Byte* from, std::int64_t slice) const {
        Byte* to = column.batch + static_cast<std::size_t>(slice * length_) * column.bytes;
        if (column.bytes == pass_.stride) {
            std::memcpy(to, from, static_cast<std::size_t>(length_) * column.bytes);
            return;
        }
        switch (column.bytes) {
            case 0: return;
            case 1: return copy_rows<1>(to, from);
            case 2: return copy_rows<2>(to, from);
            case 4: return copy_rows<4>(to, from);
            case 8: return copy_rows<8>(to, from);
            case 16: return copy_rows<16>(to, from);
            default: break;
        }
        switch ((column.bytes + 15) / 16) {
            case 2: return copy_chunks<2>(to, from, column.bytes);
            case 3: return copy_chunks<3>(to, from, column.bytes);
            case 4: return copy_chunks<4>(to, from, column.bytes);
            case 5: return copy_chunks<5>(to, from, column.bytes);
            case 6: return copy_chunks<6>(to, from, column.bytes);
            case 7: return copy_chunks<7>(to, from, column.bytes);
            case 8: return copy_chunks<8>(to, from, column.bytes);
            default: break;
        }
        for (std::int64_t k = 0; k < length_; ++k, to += column.bytes, from += pass_.stride) {
            std::memcpy(to, from, column.bytes);
        }
    }

    template <std::size_t bytes>
    void copy_rows(Byte* to, const Byte* from) const {
        const std::size_t stride = pass_.stride;
        for (std::int64_t k = 0; k < length_; ++k, to += bytes, from += stride) std::memcpy(to, from, bytes);
    }

    /// As the function of this name in gather.hpp: the last chunk may overlap the one before it.
    template <std::size_t chunks>
    void copy_chunks(Byte* to, const Byte* from, std::size_t bytes) const {
        const std::size_t stride = pass_.stride;
        for (std::int64_t k = 0; k < length_; ++k, to += bytes, from += stride) {
            for (std::size_t chunk = 0; chunk + 1 < chunks; ++chunk)
                std::memcpy(to + 16 * chunk, from + 16 * chunk, 16);
            std::memcpy(to + bytes - 16, from + bytes - 16, 16);
        }
    }

    const Plan& plan_;
    Pass pass_;
    std::int64_t length_;
    std::int64_t count_;
    std::size_t bytes_;
    std::int64_t prefetched_ = -1;  // the last slice
    std::vector<Byte*> rows_;
};

}  // namespace detail

/// As `gather_rows`, for slices of `length` rows each in the order of their episodes.
inline void gather_slices(const Plan& plan, std::int64_t length) {
    check_accesses(plan);
    {
        const IntendedRaces racing_reads;
        for (const Pass& pass : plan.passes) detail::SliceCopier(plan, pass, length).copy();
    }
    std::atomic_thread_fence(std::memory_order_acquire);
}

}  // namespace ostinato
