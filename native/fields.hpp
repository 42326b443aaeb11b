// The fields of a storage, registered once: their memory, which of them share rows, and the checks of a call.
// Turns a call into passes for gather.hpp. No Python here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "gather.hpp"
#include "memory.hpp"

namespace ostinato {

/// Slots of a virtual table of two tables of `rows` rows each: the second table where `pick` is true.
inline void choose_slots(const std::int64_t* slots, const Flag* pick, std::int64_t n, std::int64_t rows,
                         std::int64_t* out) {
    require_in_range(slots, n, rows);
    for (std::int64_t i = 0; i < n; ++i) out[i] = slots[i] + (pick[i] != 0 ? rows : 0);
}

class Fields {
public:
    /// Register a field and return its position. References to earlier fields stay valid: other threads may
    /// be in a call.
    std::size_t add(std::vector<Segment> segments, std::int64_t row_bytes, std::int64_t stride) {
        check_layout(segments, row_bytes, stride);
        Field field{std::move(segments), 0, static_cast<std::size_t>(row_bytes),
                    static_cast<std::size_t>(stride)};
        for (const Segment& segment : field.segments) field.rows += segment.rows;
        add_memory(field);
        const std::size_t index = fields_.size();
        fields_.push_back(std::move(field));
        join_group(index);
        return index;
    }

    std::size_t count() const { return fields_.size(); }

    /// The memory of all fields. The object does not change when fields are added.
    std::shared_ptr<const AddressRanges> memory() const { return memory_; }

    /// Rows of the shortest field; 0 without fields.
    std::int64_t rows() const {
        std::int64_t rows = std::numeric_limits<std::int64_t>::max();
        for (const Field& field : fields_) rows = std::min(rows, field.rows);
        return fields_.empty() ? 0 : rows;
    }

    /// The plan of a gather. `indices` and `counts` hold one entry for all fields, or one for each.
    Plan plan_gather(const std::vector<const std::int64_t*>& indices, const std::vector<std::int64_t>& counts,
                     const std::vector<Byte*>& outs) const {
        check_count("indices", indices.size());
        check_count("counts", counts.size());
        for (const std::int64_t n : counts) check_batch("outs", outs.size(), n);
        for (std::size_t f = 0; f < outs.size(); ++f) {
            const std::int64_t n = counts[counts.size() == 1 ? 0 : f];
            require_address(indices[indices.size() == 1 ? 0 : f], n > 0, "indices");
            require_address(outs[f], n > 0 && fields_[f].row_bytes > 0, "outs");
        }
        return make_plan(outs, [&](std::size_t f) {
            return Source{indices[indices.size() == 1 ? 0 : f], counts[counts.size() == 1 ? 0 : f]};
        });
    }

    /// The plan of a write to `slots`. Null: a ring run, whose start the caller sets.
    Plan plan_write(const std::int64_t* slots, std::int64_t n, const std::vector<const Byte*>& srcs) const {
        check_batch("srcs", srcs.size(), n);
        for (std::size_t f = 0; f < srcs.size(); ++f) {
            require_address(srcs[f], n > 0 && fields_[f].row_bytes > 0, "srcs");
        }
        return make_plan(srcs, [=](std::size_t) { return Source{slots, n}; });
    }

    /// Raise unless a ring run fits every field and wraps at the same slot in all of them.
    void check_run(std::int64_t start, std::int64_t n, std::int64_t skip) const {
        require_count(skip, "skip");
        for (const Field& field : fields_) {
            if (field.rows != fields_.front().rows) {
                throw std::invalid_argument("a ring write needs fields of one length, got " +
                                            std::to_string(fields_.front().rows) + " and " +
                                            std::to_string(field.rows) + " rows");
            }
        }
        if (fields_.empty() || n == 0) return;
        require_in_range(&start, 1, rows());
        if (n > rows()) {
            throw std::out_of_range("a run of " + std::to_string(n) + " rows is out of range for " +
                                    std::to_string(rows()) + " rows");
        }
    }

private:
    struct Field {
        std::vector<Segment> segments;
        std::int64_t rows;
        std::size_t row_bytes;
        std::size_t stride;

        Byte* base() const { return segments.empty() ? nullptr : segments.front().base; }
    };

    /// The slots of a field's rows, and their number.
    struct Source {
        const std::int64_t* slots;
        std::int64_t n;

        bool operator==(const Source&) const = default;
    };

    void check_count(const char* name, std::size_t count) const {
        if (count != 1 && count != fields_.size()) {
            throw std::invalid_argument(std::string(name) + " must hold 1 or " +
                                        std::to_string(fields_.size()) + " entries (number of fields), got " +
                                        std::to_string(count));
        }
    }

    static void check_layout(const std::vector<Segment>& segments, std::int64_t row_bytes,
                             std::int64_t stride) {
        if (row_bytes < 0 || stride < row_bytes) {
            throw std::invalid_argument("row_bytes must be at least 0 and stride at least row_bytes, got " +
                                        std::to_string(row_bytes) + " and " + std::to_string(stride));
        }
        std::int64_t room = std::numeric_limits<std::int64_t>::max() / std::max<std::int64_t>(stride, 1);
        for (const Segment& segment : segments) {
            if (segment.rows < 0 || segment.rows > room) {
                throw std::invalid_argument(
                    "rows of a segment must be at least 0 and fit the address space, got " +
                    std::to_string(segment.rows));
            }
            require_address(segment.base, segment.rows > 0 && row_bytes > 0,
                            "the base of a segment with rows");
            room -= segment.rows;
        }
    }

    void check_batch(const char* name, std::size_t count, std::int64_t n) const {
        require_count(n);
        if (count != fields_.size()) {
            throw std::invalid_argument(std::string(name) + " must hold " + std::to_string(fields_.size()) +
                                        " addresses (number of fields), got " + std::to_string(count));
        }
    }

    /// One pass for each group and slot array.
    template <typename Address, typename SourceOf>
    Plan make_plan(const std::vector<Address>& batches, SourceOf source_of) const {
        Plan plan;
        plan.passes.reserve(fields_.size());
        plan.columns.reserve(fields_.size());
        for (const std::vector<std::size_t>& group : groups_) {
            for (auto first = group.begin(); first != group.end(); ++first) {
                const Source source = source_of(*first);
                const auto has_source = [&](std::size_t f) { return source_of(f) == source; };
                if (std::any_of(group.begin(), first, has_source))
                    continue;  // copied by the pass of an earlier field
                open_pass(plan, *first, source);
                for (auto f = first; f != group.end(); ++f) {
                    if (has_source(*f)) add_column(plan, *f, batches[*f]);
                }
            }
        }
        return plan;
    }

    void open_pass(Plan& plan, std::size_t f, const Source& source) const {
        const Field& field = fields_[f];
        Pass pass;
        pass.segments = field.segments.data();
        pass.stride = field.stride;
        pass.rows = field.rows;
        pass.steps = source.n;
        pass.slots = source.slots;
        pass.first_column = pass.columns_end = plan.columns.size();
        plan.passes.push_back(pass);
    }

    void add_column(Plan& plan, std::size_t f, const Byte* batch) const {
        Pass& pass = plan.passes.back();
        const Field& field = fields_[f];
        const Byte* first = pass.segments == nullptr ? nullptr : pass.segments->base;
        const auto offset = static_cast<std::size_t>(distance(first, field.base()));
        // the direction of the copy decides whether the batch is written
        plan.columns.push_back({offset, field.row_bytes, const_cast<Byte*>(batch)});
        pass.columns_end = plan.columns.size();
        pass.span = std::max(pass.span, offset + field.row_bytes);
    }

    /// A group keeps its fields in the order of their addresses: the first column of a pass has the lowest.
    void join_group(std::size_t index) {
        const auto lower = [this](std::size_t a, std::size_t b) {
            return fields_[a].base() < fields_[b].base();
        };
        for (std::vector<std::size_t>& group : groups_) {
            const auto shares = [&](std::size_t f) { return share_rows(fields_[f], fields_[index]); };
            if (std::all_of(group.begin(), group.end(), shares)) {
                group.insert(std::upper_bound(group.begin(), group.end(), index, lower), index);
                return;
            }
        }
        groups_.push_back({index});
    }

    static std::int64_t distance(const Byte* from, const Byte* to) {
        return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) -
                                         reinterpret_cast<std::uintptr_t>(from));
    }

    /// Whether one row of `stride` bytes can hold both fields, in every segment alike.
    static bool share_rows(const Field& a, const Field& b) {
        if (a.stride != b.stride || a.segments.size() != b.segments.size()) return false;
        const std::int64_t shift = distance(a.base(), b.base());
        for (std::size_t s = 0; s < a.segments.size(); ++s) {
            if (a.segments[s].rows != b.segments[s].rows) return false;
            if (distance(a.segments[s].base, b.segments[s].base) != shift) return false;
        }
        const auto stride = static_cast<std::int64_t>(a.stride);
        if (shift <= -stride || shift >= stride) return false;
        return shift >= 0 ? shift + static_cast<std::int64_t>(b.row_bytes) <= stride
                          : static_cast<std::int64_t>(a.row_bytes) - shift <= stride;
    }

    /// Replaces the ranges by a copy: a call without the interpreter lock may be reading the old ones.
    void add_memory(const Field& field) {
        AddressRanges memory = *memory_;
        for (const Segment& segment : field.segments) {
            if (segment.rows == 0 || field.row_bytes == 0) continue;
            const auto before_last = static_cast<std::size_t>(segment.rows - 1) * field.stride;
            memory.add(range_of(segment.base, 1, before_last + field.row_bytes));
        }
        memory_ = std::make_shared<const AddressRanges>(std::move(memory));
    }

    std::deque<Field> fields_;
    std::vector<std::vector<std::size_t>> groups_;
    std::shared_ptr<const AddressRanges> memory_ = std::make_shared<const AddressRanges>();
};

/// Whether the first `rows` rows of any batch overlap the memory of the fields.
inline bool batches_overlap(const AddressRanges& memory, const Plan& plan, std::uint64_t rows) {
    return std::any_of(plan.columns.begin(), plan.columns.end(), [&](const Column& column) {
        return memory.overlaps(range_of(column.batch, rows, column.bytes));
    });
}

/// As batches_overlap, up to the largest row that the plan picks; none of them is negative. An upper bound of
/// the rows is tried first: it costs less than their maximum, and few batches are near the fields.
inline bool picked_rows_overlap(const AddressRanges& memory, const Plan& plan, std::int64_t n) {
    if (plan.picks == nullptr || n == 0) return batches_overlap(memory, plan, static_cast<std::uint64_t>(n));
    std::uint64_t bits = 0;
    for (std::int64_t i = 0; i < n; ++i) bits |= static_cast<std::uint64_t>(plan.picks[i]);
    if (!batches_overlap(memory, plan, bits + 1)) return false;
    const std::int64_t last = *std::max_element(plan.picks, plan.picks + n);
    return batches_overlap(memory, plan, static_cast<std::uint64_t>(last) + 1);
}

/// Raise unless every slot of the plan is in its table.
inline void check_slots(const Plan& plan) {
    for (auto pass = plan.passes.begin(); pass != plan.passes.end(); ++pass) {
        const auto is_checked = [&](const Pass& earlier) {
            return earlier.slots == pass->slots && earlier.rows <= pass->rows && earlier.steps >= pass->steps;
        };
        if (std::none_of(plan.passes.begin(), pass, is_checked))
            require_in_range(pass->slots, pass->steps, pass->rows);
    }
}

}  // namespace ostinato
