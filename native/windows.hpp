// Batches of windows: single rows, several rows side by side, or weighted sums of rows, read in one pass. No
// Python here.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "checks.hpp"
#include "gather.hpp"
#include "intended_races.hpp"
#include "memory.hpp"
#include "platform.hpp"

namespace ostinato {

/// Reads windows of the fields of one table. Fields are registered once, with the source of their slots: all
/// fields of a source are read at the same rows. Unlike a gather, which finishes one source before the next,
/// it reads all sources of a few records at a time: their rows are usually neighbours.
class WindowReader {
public:
    /// How the rows of a window become one entry of the batch.
    enum class Sum : std::uint8_t { none, float32, float64 };

    /// A field, or two whose rows are read as one: those that `pick` selects from `other`.
    struct Field {
        const Byte* base;
        const Byte* other;
        std::size_t row_bytes;
        std::size_t stride;
        std::size_t source;
        Sum sum;
    };

    /// The rows of one call for all fields of a source.
    struct Source {
        const std::int64_t* slots;  // [n, width]
        const Flag* pick;           // [n, width], or null: no row is read from `other`
        const void* weights;        // [n, width], for sums
        std::int64_t width;
    };

    explicit WindowReader(std::int64_t rows) : rows_(rows) { require_count(rows, "rows"); }

    void add(const Field& field) {
        if (field.stride < field.row_bytes) throw std::invalid_argument("stride must be at least row_bytes");
        require_address(field.base, rows_ > 0 && field.row_bytes > 0, "base");
        const std::size_t item = field.sum == Sum::float32 ? sizeof(float) : sizeof(double);
        if (field.sum != Sum::none && field.row_bytes % item != 0) {
            throw std::invalid_argument("row_bytes must be a multiple of the size of a number");
        }
        sources_ = std::max(sources_, field.source + 1);
        for (Group& group : groups_) {
            if (shares_rows(group, field)) return join(group, field, count_++);
        }
        groups_.push_back({field.source, field.base, field.other, field.stride, field.row_bytes, {}});
        join(groups_.back(), field, count_++);
    }

    std::size_t sources() const { return sources_; }
    std::size_t count() const { return count_; }
    std::size_t row_bytes() const { return row_bytes_; }

    /// Raise unless a call can be made: every slot is in the table, and no address is missing.
    void check(const std::vector<Source>& sources, std::int64_t n, const std::vector<Byte*>& outs) const {
        require_count(n);
        if (sources.size() != sources_ || outs.size() != count_) {
            throw std::invalid_argument(
                "a call needs " + std::to_string(sources_) + " sources and " + std::to_string(count_) +
                " batches, got " + std::to_string(sources.size()) + " and " + std::to_string(outs.size()));
        }
        for (const Source& source : sources) {
            if (source.width < 1) throw std::invalid_argument("a window must have at least one row");
            require_address(source.slots, n > 0, "slots");
            require_in_range(source.slots, n * source.width, rows_);
        }
        for (const Group& group : groups_) {
            const Source& source = sources[group.source];
            require_address(group.other, source.pick != nullptr && n > 0, "other");
            for (const Column& column : group.columns) {
                require_address(outs[column.field], n > 0 && column.bytes > 0, "outs");
                require_address(source.weights, column.sum != Sum::none && n > 0, "weights");
            }
        }
    }

    /// Fill the batches `[n, width, row_bytes]`, or `[n, row_bytes]` for sums. Loads of generations after it,
    /// in program order, stay after the copies.
    void read(const std::vector<Source>& sources, std::int64_t n, const std::vector<Byte*>& outs) const {
        report(sources, n, outs);
        {
            const IntendedRaces racing_reads;
            std::vector<Reading> readings;
            readings.reserve(groups_.size());
            for (const Group& group : groups_) readings.emplace_back(group, sources[group.source], outs);
            const std::int64_t ahead = records_ahead(sources);
            for (Reading& reading : readings) reading.locate(std::min(ahead, n));
            for (std::int64_t first = 0; first < n; first += kBlock) {
                const std::int64_t end = std::min(first + kBlock, n);
                for (Reading& reading : readings) reading.locate(std::min(end + ahead, n));
                for (Reading& reading : readings) reading.copy(first, end);
            }
        }
        std::atomic_thread_fence(std::memory_order_acquire);
    }

private:
    static constexpr std::int64_t kBlock = 4;           // records copied column by column
    static constexpr std::int64_t kMostAhead = 12;      // records whose rows are prefetched
    static constexpr std::size_t kAheadLines = 128;     // of all rows that are prefetched
    static constexpr std::size_t kPrefetchBytes = 512;  // of one row; hardware prefetches the rest
    static constexpr std::size_t kLine = 64;

    struct Column {
        std::size_t field;
        const Byte* base;
        std::size_t bytes;
        Sum sum;
    };

    /// Fields that lie in the same rows of memory and are read at the same slots.
    struct Group {
        std::size_t source;
        const Byte* base;  // of the field with the lowest address
        const Byte* other;
        std::size_t stride;
        std::size_t span;  // bytes from the first to the end of the last field
        std::vector<Column> columns;
    };

    static std::int64_t distance(const Byte* from, const Byte* to) {
        return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) -
                                         reinterpret_cast<std::uintptr_t>(from));
    }

    static bool shares_rows(const Group& group, const Field& field) {
        if (group.source != field.source || group.stride != field.stride || field.other != nullptr ||
            group.other != nullptr) {
            return false;
        }
        const std::int64_t shift = distance(group.base, field.base);
        const auto stride = static_cast<std::int64_t>(group.stride);
        return shift >= 0 ? shift + static_cast<std::int64_t>(field.row_bytes) <= stride
                          : static_cast<std::int64_t>(group.span) - shift <= stride;
    }

    void join(Group& group, const Field& field, std::size_t position) {
        const Byte* end = std::max(group.base + group.span, field.base + field.row_bytes);
        group.base = std::min(group.base, field.base);
        group.span = static_cast<std::size_t>(distance(group.base, end));
        group.columns.push_back({position, field.base, field.row_bytes, field.sum});
        row_bytes_ += field.row_bytes;
    }

    /// A group in one call. The rows of the records [0, located_) are located and prefetched.
    class Reading {
    public:
        Reading(const Group& group, const Source& source, const std::vector<Byte*>& outs)
            : group_(&group), source_(source), reach_(std::min(group.span, kPrefetchBytes)) {
            rows_.resize(static_cast<std::size_t>(kRing * source.width));
            for (const Column& column : group.columns) {
                const auto offset = static_cast<std::size_t>(distance(group.base, column.base));
                columns_.push_back({offset, column.bytes, outs[column.field]});
            }
        }

        /// Locate and prefetch the rows of the records before `until`.
        void locate(std::int64_t until) {
            const std::int64_t width = source_.width;
            for (; located_ < until; ++located_) {
                const std::int64_t* slots = source_.slots + located_ * width;
                const Flag* pick = source_.pick == nullptr ? nullptr : source_.pick + located_ * width;
                Byte** rows = rows_of(located_);
                for (std::int64_t k = 0; k < width; ++k) {
                    const Byte* base = pick != nullptr && pick[k] != 0 ? group_->other : group_->base;
                    const Byte* row = base + static_cast<std::size_t>(slots[k]) * group_->stride;
                    for (std::size_t at = 0; at < reach_; at += kLine) prefetch<false>(row + at);
                    if (reach_ > 0) prefetch<false>(row + reach_ - 1);  // a row may begin anywhere in a line
                    rows[k] = const_cast<Byte*>(row);                   // a gather only reads it
                }
            }
        }

        /// Copy the records [first, end), at most `kBlock`, which were located.
        void copy(std::int64_t first, std::int64_t end) {
            const std::int64_t width = source_.width;
            const detail::Block block{rows_of(first), (end - first) * width, first * width};
            for (std::size_t c = 0; c < columns_.size(); ++c) {
                switch (group_->columns[c].sum) {
                    case Sum::none:
                        detail::copy_block<detail::Direction::to_batch>(plan_, block, columns_[c]);
                        break;
                    case Sum::float32: add_up<float>(block, columns_[c]); break;
                    case Sum::float64: add_up<double>(block, columns_[c]); break;
                }
            }
        }

    private:
        static constexpr std::int64_t kRing = 32;  // located records kept: a block does not wrap around it

        static_assert(kRing >= kMostAhead + 2 * kBlock && kRing % kBlock == 0);

        Byte** rows_of(std::int64_t record) {
            return rows_.data() + static_cast<std::size_t>(record % kRing * source_.width);
        }

        /// `out[i, c] = sum_k weights[i, k] * rows[i, k, c]`, in float64. Rows of weight 0 may hold
        /// infinities.
        template <typename Value>
        void add_up(const detail::Block& block, const ostinato::Column& column) const {
            const std::int64_t width = source_.width, records = block.count / width;
            const std::size_t cells = column.bytes / sizeof(Value);
            const auto* weights = static_cast<const Value*>(source_.weights) + block.first;
            auto* out = reinterpret_cast<Value*>(column.batch) +
                        static_cast<std::size_t>(block.first / width) * cells;
            for (std::int64_t i = 0; i < records; ++i, weights += width) {
                for (std::size_t c = 0; c < cells; ++c) {
                    double sum = 0;
                    for (std::int64_t k = 0; k < width; ++k) {
                        Value value;
                        std::memcpy(&value, block.rows[i * width + k] + column.offset + c * sizeof(Value),
                                    sizeof(Value));
                        sum += weights[k] == 0 ? 0.0
                                               : static_cast<double>(weights[k]) * static_cast<double>(value);
                    }
                    *out++ = static_cast<Value>(sum);
                }
            }
        }

        const Group* group_;
        Source source_;
        std::size_t reach_;
        std::int64_t located_ = 0;
        std::vector<Byte*> rows_;
        std::vector<ostinato::Column> columns_;
        Plan plan_;  // empty: batches begin at their first row
    };

    /// The number of records whose rows are prefetched: fewer if they are wide.
    std::int64_t records_ahead(const std::vector<Source>& sources) const {
        std::size_t lines = 1;
        for (const Group& group : groups_) {
            const auto width = static_cast<std::size_t>(sources[group.source].width);
            lines += width * (std::min(group.span, kPrefetchBytes) / kLine + 1);
        }
        const auto fit = static_cast<std::int64_t>(kAheadLines / lines);
        return std::clamp(fit, std::int64_t{1}, kMostAhead);
    }

    /// Report to ThreadSanitizer what a call accesses besides the rows of the table.
    void report(const std::vector<Source>& sources, std::int64_t n, const std::vector<Byte*>& outs) const {
        for (const Group& group : groups_) {
            const Source& source = sources[group.source];
            const auto rows = static_cast<std::size_t>(n * source.width);
            check_read(source.slots, rows * sizeof(std::int64_t));
            check_read(source.pick, rows);
            for (const Column& column : group.columns) {
                const auto entries = column.sum == Sum::none ? rows : static_cast<std::size_t>(n);
                check_write(outs[column.field], entries * column.bytes);
            }
        }
    }

    std::int64_t rows_;
    std::size_t sources_ = 0;
    std::size_t count_ = 0;
    std::size_t row_bytes_ = 0;
    std::vector<Group> groups_;
};

}  // namespace ostinato
