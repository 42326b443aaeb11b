// Python bindings of next observations that are stored once.
#include <nanobind/nanobind.h>

#include <new>
#include <vector>

#include "bindings.hpp"
#include "gil.hpp"
#include "pointers.hpp"
#include "single_copy.hpp"

namespace ostinato {
namespace {

using namespace nb::literals;

using FieldList = nb::typed<nb::list, std::int64_t>;

template <typename Work>
auto run(const SingleCopy& table, std::int64_t n, Work work) {
    require_count(n);
    return run_released_if(table.row_bytes() * static_cast<std::size_t>(n) >= kReleaseBytes, work);
}

void make(SingleCopy* self, std::int64_t capacity, std::int64_t num_envs, std::int64_t chunk_rows,
          Pointer<std::int32_t> side_rows) {
    new (self) SingleCopy(capacity, num_envs, chunk_rows, side_rows.or_null());
}

std::size_t add_group(SingleCopy& table, Pointer<Byte> base, std::int64_t stride, std::int64_t nbytes) {
    return table.add_group(base.or_null(), stride, nbytes);
}

void add_chunk(SingleCopy& table, const Pointers<Byte>& bases) { table.add_chunk(bases); }

void guard(SingleCopy& table, Pointer<const Byte> base, std::uint64_t nbytes) {
    table.guard(base.or_null(), nbytes);
}

std::int64_t compare(const SingleCopy& table, std::int64_t cursor, std::int64_t n,
                     const Pointers<const Byte>& obs, const Pointers<const Byte>& nexts,
                     Pointer<Flag> equals_next, Pointer<Flag> equals_side) {
    auto* next = equals_next.items(n, "equals_next");
    auto* side = equals_side.items(n, "equals_side");
    return run(table, n, [&] { return table.compare(cursor, n, obs, nexts, next, side); });
}

void link_run(SingleCopy& table, std::int64_t start, std::int64_t n, std::int64_t skip,
              const Pointers<const Byte>& nexts, Pointer<const Flag> equals_next,
              Pointer<const Flag> equals_side) {
    const auto* next = equals_next.items(n, "equals_next");
    run(table, n, [&] { table.link_run(start, n, skip, nexts, next, equals_side.or_null()); });
}

void set_rows(SingleCopy& table, Pointer<const std::int64_t> slots, std::int64_t n,
              const Pointers<const Byte>& nexts) {
    const auto* at = slots.items(n, "slots");
    run(table, n, [&] { table.set_rows(at, n, nexts); });
}

void link_rows(SingleCopy& table, Pointer<const std::int64_t> slots, std::int64_t n) {
    table.link_rows(slots.items(n, "slots"), n);
}

void gather(const SingleCopy& table, const FieldList& fields, Pointer<const std::int64_t> slots,
            Pointer<const Flag> pick, std::int64_t n, const Pointers<Byte>& outs) {
    std::vector<std::int64_t> numbers;
    for (nb::handle field : fields) numbers.push_back(nb::cast<std::int64_t>(field));
    for (const Byte* out : outs) require_address(out, n > 0, "outs");
    const auto* at = slots.items(n, "slots");
    run(table, n, [&] { table.gather(numbers, at, pick.or_null(), n, outs); });
}

constexpr const char* kSingleCopyDoc = R"(
    Next observations that are stored once: as the observation `num_envs` slots on, or in a side row.

    One writer at a time: the caller's lock orders them. Any number of threads may call `gather` meanwhile; it
    returns complete rows wherever the row's own slot is not written at the same time.
)";

constexpr const char* kInitDoc = R"(
    Create one for the slots [0, capacity).

    Args:
        capacity: Slots, below 2**31.
        num_envs: Slots from a row to the row that follows it.
        chunk_rows: Side rows that are added at a time.
        side_rows: Address of int32 `[capacity]`, written only by this object: for each slot its side row, -1
            where the observation that follows is the next one, -2 where there is no row.

    Raises:
        ValueError: Numbers out of range, or a null address.
)";

constexpr const char* kAddGroupDoc = R"(
    Register observation fields that share rows, and return the number of the group.

    Args:
        base: Address of the first field in slot 0.
        stride: Bytes from one slot to the next.
        nbytes: Bytes of all fields: the size of a side row.

    Raises:
        ValueError: A null address, or sizes that do not fit together.
)";

constexpr const char* kAddFieldDoc = R"(
    Register a field of a group, and return its number.

    Raises:
        ValueError: The field is not inside the group.
)";

constexpr const char* kAddChunkDoc = R"(
    Add `chunk_rows` side rows: the address of that many rows for each group. They must never move.

    Raises:
        ValueError: A null address, or more side rows than slots.
)";

constexpr const char* kGuardDoc = R"(
    Register memory that next observations to be written must not overlap.
)";

constexpr const char* kCompareDoc = R"(
    Compare a batch of `n` rows, about to be written from slot `cursor` on, with itself and with stored rows.

    Args:
        cursor: Slot of row 0.
        n: Rows of the batch.
        obs: Address of the observations, `[n, nbytes]`, for each field.
        nexts: Address of the next observations for each field.
        equals_next: Address of uint8 `[n]` to write: whether a next observation equals the observation of the
            row that follows in the batch, bit by bit.
        equals_side: Address of uint8 `[min(num_envs, n)]` to write: whether an observation equals the side
            row of the row before it.

    Returns:
        The number of side rows that the write will take; -1, with nothing compared, if a next observation
        overlaps guarded memory: copy the sources and call again.

    Raises:
        IndexError: `cursor` is outside the slots.
        ValueError: A wrong number of addresses, a null address, or a negative `n`.
)";

constexpr const char* kDetachRunDoc = R"(
    Before the slots `(start + i) % capacity` are written: give the rows before them side rows.

    Args:
        start: First slot.
        n: Rows to be written.
        spare: Side rows that must be free afterwards.

    Returns:
        The number of side rows that are missing for that; nothing has changed then: add chunks and call
        again.

    Raises:
        IndexError: `start` or `n` is outside the slots.
)";

constexpr const char* kLinkRunDoc = R"(
    After row `skip + i` was written to the slot `(start + i) % capacity`: store its next observation.

    Args:
        start: First slot.
        n: Rows written.
        skip: Rows at the start of the batch that were not written.
        nexts: Address of the next observations of the whole batch for each field.
        equals_next: As `compare` wrote it.
        equals_side: As `compare` wrote it; 0 if `compare` was called with another cursor.

    Raises:
        IndexError: `start` or `n` is outside the slots.
        ValueError: A wrong number of addresses, or a null address.
        RuntimeError: No side row is left.
)";

constexpr const char* kSetRowsDoc = R"(
    Store the next observations `nexts` of the rows at int64 `slots` `[n]` in side rows, in order.

    Raises:
        IndexError: A slot out of range.
        ValueError: A wrong number of addresses, or a null address.
        RuntimeError: No side row is left.
)";

constexpr const char* kLinkRowsDoc = R"(
    Make the observation that follows the next observation of the rows at int64 `slots` `[n]`.

    Raises:
        IndexError: A slot out of range.
)";

constexpr const char* kGatherDoc = R"(
    Copy next observations to batches.

    Args:
        fields: Numbers of the fields.
        slots: Address of contiguous int64 `[n]`.
        pick: Address of bool `[n]`, False where the observation itself is wanted; 0 for next observations
            only.
        n: Rows.
        outs: Address of contiguous `[n, nbytes]` for each of the fields.

    Raises:
        IndexError: A slot out of range, or without a row.
        ValueError: No such field, a wrong number of addresses, or a negative `n`.
)";

}  // namespace

void bind_single_copy(nb::module_& m) {
    nb::class_<SingleCopy>(m, "SingleCopy", kSingleCopyDoc)
        .def("__init__", &make, "capacity"_a, "num_envs"_a, "chunk_rows"_a, "side_rows"_a, kInitDoc)
        .def_prop_ro("allocated", &SingleCopy::allocated, "Number of side rows.")
        .def_prop_ro("used", &SingleCopy::used, "Number of side rows in use.")
        .def_prop_ro("nbytes", &SingleCopy::nbytes,
                     "Bytes of versions and of the list of free side rows, without `side_rows` and chunks.")
        .def("add_group", &add_group, "base"_a, "stride"_a, "nbytes"_a, kAddGroupDoc)
        .def("add_field", &SingleCopy::add_field, "group"_a, "offset"_a, "nbytes"_a, kAddFieldDoc)
        .def("add_chunk", &add_chunk, "bases"_a, kAddChunkDoc)
        .def("guard", &guard, "base"_a, "nbytes"_a, kGuardDoc)
        .def("clear", &SingleCopy::clear, "Remove all rows.")
        .def("compare", &compare, "cursor"_a, "n"_a, "obs"_a, "nexts"_a, "equals_next"_a, "equals_side"_a,
             kCompareDoc)
        .def("detach_run", &SingleCopy::detach_run, "start"_a, "n"_a, "spare"_a, kDetachRunDoc)
        .def("link_run", &link_run, "start"_a, "n"_a, "skip"_a, "nexts"_a, "equals_next"_a, "equals_side"_a,
             kLinkRunDoc)
        .def("set_rows", &set_rows, "slots"_a, "n"_a, "nexts"_a, kSetRowsDoc)
        .def("link_rows", &link_rows, "slots"_a, "n"_a, kLinkRowsDoc)
        .def("gather", &gather, "fields"_a, "slots"_a, "pick"_a, "n"_a, "outs"_a, kGatherDoc);
}

}  // namespace ostinato
