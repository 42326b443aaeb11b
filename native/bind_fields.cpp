// Python bindings of the fields of a storage: gather and writes.
#include <nanobind/nanobind.h>

#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "fields.hpp"
#include "gather.hpp"
#include "gil.hpp"
#include "platform.hpp"
#include "pointers.hpp"

namespace ostinato {
namespace {

using namespace nb::literals;

using SegmentList = nb::typed<nb::list, nb::typed<nb::tuple, Pointer<Byte>, std::int64_t>>;
using CountList = nb::typed<nb::list, std::int64_t>;

template <typename Work>
void run(const Plan& plan, Work work) {
    run_released_if(plan.bytes() >= kReleaseBytes, work);
}

std::size_t add(Fields& fields, const SegmentList& segments, std::int64_t row_bytes, std::int64_t stride) {
    std::vector<Segment> tables;
    for (nb::handle item : segments) {
        Pointer<Byte> base;
        std::int64_t rows = 0;
        if (!nb::isinstance<nb::tuple>(item) || nb::len(item) != 2 || !nb::try_cast(item[0], base) ||
            !nb::try_cast(item[1], rows)) {
            throw nb::type_error("a segment must be a tuple (base_address, rows)");
        }
        tables.push_back({base.or_null(), rows});
    }
    return fields.add(std::move(tables), row_bytes, stride);
}

void gather_counts(const Fields& fields, const Pointers<const std::int64_t>& indices,
                   const std::vector<std::int64_t>& counts, const Pointers<Byte>& outs) {
    const Plan plan = fields.plan_gather(indices, counts, outs);
    run(plan, [&] {
        check_slots(plan);
        gather_rows(plan);
    });
}

void gather(const Fields& fields, const Pointers<const std::int64_t>& indices, std::int64_t n,
            const Pointers<Byte>& outs) {
    gather_counts(fields, indices, {n}, outs);
}

void gather_each(const Fields& fields, const Pointers<const std::int64_t>& indices, const CountList& counts,
                 const Pointers<Byte>& outs) {
    std::vector<std::int64_t> rows;
    for (nb::handle count : counts) rows.push_back(nb::cast<std::int64_t>(count));
    gather_counts(fields, indices, rows, outs);
}

bool write_run(const Fields& fields, std::int64_t start, std::int64_t n, std::int64_t skip,
               const Pointers<const Byte>& srcs) {
    Plan plan = fields.plan_write(nullptr, n, srcs);
    fields.check_run(start, n, skip);
    plan.start = start;
    plan.skip = skip;
    const auto read = static_cast<std::uint64_t>(skip) + static_cast<std::uint64_t>(n);
    if (n > 0 && batches_overlap(*fields.memory(), plan, read)) return false;
    run(plan, [&] { write_rows(plan); });
    return true;
}

bool scatter(const Fields& fields, Pointer<const std::int64_t> slots, Pointer<const std::int64_t> rows,
             std::int64_t n, const Pointers<const Byte>& srcs) {
    Plan plan = fields.plan_write(slots.or_null(), n, srcs);
    (void)slots.items(n, "slots");
    plan.picks = rows.or_null();
    const std::shared_ptr<const AddressRanges> memory = fields.memory();
    bool overlaps = false;
    run(plan, [&] {
        check_slots(plan);
        if (plan.picks != nullptr) require_in_range(plan.picks, n, std::numeric_limits<std::int64_t>::max());
        overlaps = picked_rows_overlap(*memory, plan, n);
        if (!overlaps) scatter_rows(plan);
    });
    return !overlaps;
}

void choose(Pointer<const std::int64_t> slots, Pointer<const Flag> pick, std::int64_t n, std::int64_t rows,
            Pointer<std::int64_t> out) {
    require_count(n);
    choose_slots(slots.items(n, "slots"), pick.items(n, "pick"), n, rows, out.items(n, "out"));
}

void advise(Pointer<Byte> address, std::int64_t nbytes) {
    require_count(nbytes, "nbytes");
    advise_huge_pages(address.items(nbytes, "address"), static_cast<std::size_t>(nbytes));
}

constexpr const char* kFieldsDoc = R"(
    The fields of a storage, registered once. Every call copies all of them.

    Threads may call it at the same time. Writes to the same slot are not ordered: that is up to the caller.
)";

constexpr const char* kAddDoc = R"(
    Register a field and return its position.

    Args:
        segments: `(base_address, rows)` of each base table; end to end they form one virtual table.
        row_bytes: Bytes of the field in one row.
        stride: Bytes from one row to the next. Fields of equal stride whose bases are within one stride of
            each other share rows: they are copied row by row.

    Raises:
        ValueError: Negative sizes, `stride < row_bytes`, or a null address.
)";

constexpr const char* kGatherDoc = R"(
    Copy rows to batches: `outs[f][i] = field f, row indices[f][i]`.

    Args:
        indices: One address of contiguous int64 `[n]` for all fields, or one for each field.
        n: Rows of the batch.
        outs: Address of contiguous `[n, row_bytes]` for each field.

    Raises:
        IndexError: An index is outside its field; nothing has been written then.
        ValueError: A wrong number of addresses, or a negative `n`.
)";

constexpr const char* kGatherEachDoc = R"(
    Copy rows as `gather` does, with one number of rows in `counts` for all fields, or one for each field.
)";

constexpr const char* kWriteRunDoc = R"(
    Write a ring run: row `skip + i` of every source goes to slot `(start + i) % rows`, for `n <= rows`.

    Args:
        start: First slot.
        n: Rows to write.
        skip: Rows at the start of the sources that are not written.
        srcs: Address of contiguous `[skip + n, row_bytes]` for each field.

    Returns:
        False, with nothing written, if rows 0 to `skip + n - 1` of a source overlap the memory of any field
        (from its first row to the end of its last one): copy the sources and call again.

    Raises:
        IndexError: `start` or `n` is outside the rows.
        ValueError: A wrong number of addresses, a null address, a negative `n` or `skip`, or fields of
            unequal length.
)";

constexpr const char* kScatterDoc = R"(
    Write batches to rows, in order: of equal slots the last one wins.

    Args:
        slots: Address of contiguous int64 `[n]`.
        rows: Address of contiguous int64 `[n]` that picks rows of the sources, or 0 for rows 0 to n - 1.
        n: Rows to write.
        srcs: Address of contiguous `[*, row_bytes]` for each field.

    Returns:
        False, with nothing written, if a source overlaps the memory of any field, from row 0 to the last row
        that is
        picked: copy the sources and call again.

    Raises:
        IndexError: A slot outside its field, or a negative source row; nothing has been written then.
        ValueError: A wrong number of addresses, a null address, or a negative `n`.
)";

constexpr const char* kAdviseDoc = R"(
    Ask the system to back the whole pages in `[address, address + nbytes)` with huge pages.

    A hint: the result does not say whether the system follows it. Does nothing on systems other than Linux.

    Raises:
        ValueError: `nbytes` is negative.
)";

constexpr const char* kChooseDoc = R"(
    Write the slots of two tables put end to end: `out[i] = slots[i] + (rows if pick[i] else 0)`.

    Args:
        slots: Address of contiguous int64 `[n]`, in [0, rows).
        pick: Address of contiguous bool `[n]`: the second table where it is true.
        n: Number of slots.
        rows: Rows of each table.
        out: Address of contiguous int64 `[n]`.

    Raises:
        IndexError: A slot outside [0, rows); nothing has been written then.
        ValueError: A negative `n`.
)";

}  // namespace

void bind_fields(nb::module_& m) {
    nb::class_<Fields>(m, "Fields", kFieldsDoc)
        .def(nb::init<>())
        .def_prop_ro("count", &Fields::count, "Number of fields.")
        .def_prop_ro("rows", &Fields::rows, "Rows of the shortest field; 0 without fields.")
        .def("add", &add, "segments"_a, "row_bytes"_a, "stride"_a, kAddDoc)
        .def("gather", &gather, "indices"_a, "n"_a, "outs"_a, kGatherDoc)
        .def("gather_each", &gather_each, "indices"_a, "counts"_a, "outs"_a, kGatherEachDoc)
        .def("write_run", &write_run, "start"_a, "n"_a, "skip"_a, "srcs"_a, kWriteRunDoc)
        .def("scatter", &scatter, "slots"_a, "rows"_a, "n"_a, "srcs"_a, kScatterDoc);
    m.def("advise_huge_pages", &advise, "address"_a, "nbytes"_a, kAdviseDoc);
    m.def("choose_slots", &choose, "slots"_a, "pick"_a, "n"_a, "rows"_a, "out"_a, kChooseDoc);
}

}  // namespace ostinato
