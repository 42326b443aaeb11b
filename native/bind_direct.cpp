// Python bindings of the counts of a buffer, and of its direct writes and draws.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "bindings.hpp"
#include "direct.hpp"
#include "ring.hpp"

namespace ostinato {
namespace {

using namespace nb::literals;

/// What `pickle` calls, and with what; the class may be that of another process without the extension.
template <typename... Numbers>
nb::tuple reduced(const char* name, Numbers... numbers) {
    const nb::object restore = nb::module_::import_("ostinato.core.counts").attr("restore_counts");
    return nb::make_tuple(restore, nb::make_tuple(name, nb::make_tuple(numbers...)));
}

constexpr const char* kDirectDoc = R"(
    Writes and draws of a buffer, each in one call that holds its lock; see `ostinato.buffers.direct`.

    Calls return None, with nothing changed, where they do not apply: other kinds of rows, another dtype or shape,
    a part that was exchanged, no rows. The caller then goes the general way, which also raises errors.
)";

constexpr const char* kNextsDoc = R"(
    The fields of rows whose next observations are stored once; for direct writes.

    Args:
        table: Of the next observations.
        pairs: Positions of each next observation, and of the observation that it equals one row later.
        kept: Positions of the fields in the table.
        templates: A tensor `[1, *shape]` for each field.
)";

constexpr const char* kAddDoc = R"(
    Write one row, a dict of its fields, and return its slot; or a step `[width, *shape]` of environments, and return
    its positions, int64 `[width, 2]`. Or None.
)";
constexpr const char* kExtendDoc = R"(
    Write rows `[n, *shape]`, and return their slots, int64 `[n]`, -1 for rows that no slot keeps; or None.

    Rows of environments are `[width, time, *shape]`, else `[time, width, *shape]` without `env_first`; their positions
    are int64 `[n, 2]`: step and environment, in the order of writing.
)";
constexpr const char* kSampleDoc = R"(
    Draw `n` rows with replacement: uniformly by `torch.randint`, or by priority by `torch.rand`.

    Returns:
        A tuple of the batch, a new dict, and the slots, int64 `[n]`; with priorities also of the weights and the
        generations, int64 `[n]`. Of slices the batch, the slots and the length of a slice, of other windows the
        batch alone. Or None.
)";
constexpr const char* kIntoDoc = R"(
    As `sample`, into the tensors of a dict of the same keys, which is the batch of the result.

    Raises:
        ValueError: `position:reason` for the first tensor that does not fit; nothing is drawn.
)";
constexpr const char* kUpdateDoc = R"(
    Set priorities, float32 or float64 `[n]`, of the rows at `index`, int64 `[n]`.

    With `generation`, int64 `[n]`, rows that have another one by now are left out.

    Returns:
        How many were left out; or None.
)";

}  // namespace

void bind_direct(nb::module_& m) {
    nb::class_<RingCounts> ring(m, "RingCounts", "The numbers of a ring; see `ostinato.core.ring`.");
    ring.def(nb::init<>())
        .def_rw("capacity", &RingCounts::capacity, "Slots.")
        .def_rw("rows", &RingCounts::rows, "Rows present.")
        .def_rw("cursor", &RingCounts::cursor, "Slot after the newest row.")
        .def_rw("written", &RingCounts::written, "Serial number of the last row written.")
        .def_rw("base", &RingCounts::base, "Largest serial number that no row present has.")
        .def_rw("in_order", &RingCounts::in_order, "Whether generations follow from the cursor.")
        .def_rw("reserved_from", &RingCounts::reserved_from,
                "First serial number whose row would replace one that was drawn ahead.")
        .def_rw("turn", &RingCounts::turn, "Where new rows are in an order of slots that they take in turn.")
        .def(
            "__reduce__",
            [](const RingCounts& c) {
                return reduced("RingCounts", c.capacity, c.rows, c.cursor, c.written, c.base, c.in_order,
                               c.reserved_from, c.turn);
            },
            nb::sig("def __reduce__(self) -> tuple[typing.Any, ...]"), "Pickle the numbers.");
    nb::class_<StoredRows> stored(m, "StoredRows",
                                  "The numbers of a storage; see `ostinato.storages.tensor`.");
    stored.def(nb::init<>())
        .def_rw("rows", &StoredRows::rows, "Rows present.")
        .def_rw("cursor", &StoredRows::cursor, "Slot after the newest row.")
        .def_rw("writes", &StoredRows::writes, "Number of writes.")
        .def_rw("plain", &StoredRows::plain, "Whether a write only changes rows of the table.")
        .def(
            "__reduce__",
            [](const StoredRows& c) { return reduced("StoredRows", c.rows, c.cursor, c.writes, c.plain); },
            nb::sig("def __reduce__(self) -> tuple[typing.Any, ...]"), "Pickle the numbers.");
    nb::class_<BufferCounts> counts(m, "BufferCounts",
                                    "What a buffer counts; see `ostinato.buffers.engine`.");
    counts.def(nb::init<>())
        .def_rw("written", &BufferCounts::written, "Rows ever written.")
        .def_rw("since_empty", &BufferCounts::since_empty, "Rows written since the buffer was emptied.")
        .def_rw("drawn", &BufferCounts::drawn, "Rows delivered.")
        .def_rw("redone", &BufferCounts::redone, "Batches copied twice.")
        .def_rw("writes_seen", &BufferCounts::writes_seen, "Writes of the storage that the buffer follows.")
        .def(
            "__reduce__",
            [](const BufferCounts& c) {
                return reduced("BufferCounts", c.written, c.since_empty, c.drawn, c.redone, c.writes_seen);
            },
            nb::sig("def __reduce__(self) -> tuple[typing.Any, ...]"), "Pickle the numbers.");
    nb::class_<DirectNexts>(m, "DirectNexts", kNextsDoc)
        .def(nb::init<nb::object, const nb::list&, const nb::list&, const nb::list&>(), "table"_a, "pairs"_a,
             "kept"_a, "templates"_a,
             nb::sig("def __init__(self, table: SingleCopy, pairs: list[tuple[int, int]], kept: list[int], "
                     "templates: list[typing.Any]) -> None"));
    nb::class_<Direct>(m, "Direct", kDirectDoc)
        .def(
            "__init__",
            [](Direct* self, nb::object lock, nb::object batches, nb::object ring_counts,
               nb::object stored_rows, nb::object buffer_counts, nb::object seen, nb::object keys,
               nb::object torch, nb::object generator, nb::object func_transform, nb::object is_tracing,
               nb::object priorities, nb::object admits, nb::object wrote, std::int64_t first_generation,
               std::int64_t width, bool env_first, nb::object arrays, nb::object turns, bool writes,
               bool draws, nb::object episodes, nb::object windows, nb::object nexts) {
                new (self) Direct({lock.attr("acquire"),
                                   lock.attr("release"),
                                   std::move(batches),
                                   std::move(ring_counts),
                                   std::move(stored_rows),
                                   std::move(buffer_counts),
                                   std::move(seen),
                                   std::move(keys),
                                   std::move(torch),
                                   std::move(generator),
                                   std::move(func_transform),
                                   std::move(is_tracing),
                                   std::move(priorities),
                                   std::move(admits),
                                   std::move(wrote),
                                   first_generation,
                                   width,
                                   env_first,
                                   std::move(arrays),
                                   std::move(turns),
                                   writes,
                                   draws,
                                   std::move(episodes),
                                   std::move(windows),
                                   std::move(nexts)});
            },
            "lock"_a, "batches"_a, "ring"_a, "stored"_a, "counts"_a, "seen"_a, "keys"_a.none(), "torch"_a,
            "generator"_a.none(), "func_transform"_a, "is_tracing"_a, "priorities"_a.none(),
            "admits"_a.none(), "wrote"_a.none(), "first_generation"_a, "width"_a, "env_first"_a, "arrays"_a,
            "turns"_a.none(), "writes"_a, "draws"_a, "episodes"_a, "windows"_a.none(), "nexts"_a.none(),
            nb::sig("def __init__(self, lock: typing.Any, batches: Batches, ring: RingCounts, stored: "
                    "StoredRows, "
                    "counts: BufferCounts, seen: BufferCounts, keys: tuple[typing.Any, ...] | None, "
                    "torch: typing.Any, generator: typing.Any, func_transform: typing.Any, "
                    "is_tracing: typing.Any, priorities: typing.Any, "
                    "admits: typing.Any, wrote: typing.Any, first_generation: int, "
                    "width: int, env_first: bool, arrays: tuple[typing.Any, ...], turns: typing.Any, "
                    "writes: bool, draws: bool, episodes: tuple[TrackedEpisodes, ...], "
                    "windows: DirectWindows | None, nexts: DirectNexts | None) -> None"))
        .def_prop_ro("is_open", &Direct::is_open, "Whether calls may apply.")
        .def_prop_ro("has_more_info", &Direct::has_more_info,
                     "Whether batches have more info than `sample` returns: slices, and windows of units.")
        .def_prop_ro("by_path", &Direct::by_path, "Whether fields of rows have paths as keys.")
        .def_prop_ro("lead", &Direct::lead, "Dimensions of the batch of `extend`; `add` has one less.")
        .def("close", &Direct::close, "Let every call return None from now on: parts of the buffer change.")
        .def("add", &Direct::add, "rows"_a.none(), nb::sig("def add(self, rows: typing.Any) -> int | None"),
             kAddDoc)
        .def("extend", &Direct::extend, "rows"_a.none(),
             nb::sig("def extend(self, rows: typing.Any) -> typing.Any"), kExtendDoc)
        .def("sample", &Direct::sample, "n"_a, nb::sig("def sample(self, n: int) -> typing.Any"), kSampleDoc)
        .def("sample_into", &Direct::sample_into, "out"_a, "n"_a,
             nb::sig("def sample_into(self, out: typing.Any, n: int) -> typing.Any"), kIntoDoc)
        .def("update_priority", &Direct::update_priority, "index"_a, "priority"_a, "generation"_a.none(),
             nb::sig("def update_priority(self, index: typing.Any, priority: typing.Any, generation: "
                     "typing.Any) -> "
                     "int | None"),
             kUpdateDoc);
}

}  // namespace ostinato
