// Python bindings of the episode table.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "bindings.hpp"
#include "episodes.hpp"
#include "gil.hpp"
#include "pointers.hpp"

namespace ostinato {
namespace {

using namespace nb::literals;

using Slots = Pointer<const std::int64_t>;
using SlotsOut = Pointer<std::int64_t>;
using FlagsOut = Pointer<Flag>;

/// Rows that are worth releasing the interpreter lock.
constexpr std::int64_t kReleaseRows = 4096;

template <typename Work>
void run(std::int64_t rows, Work work) {
    run_released_if(rows >= kReleaseRows, work);
}

void record_write(Episodes& table, std::int64_t start, std::int64_t rows, std::int64_t skip,
                  Pointer<const Flag> ends, Pointer<const std::int64_t> ids, Pointer<const Flag> mask) {
    const Episodes::Batch batch{ends.or_null(), ids.or_null(), mask.or_null()};
    run(rows, [&] { table.record_write(start, rows, skip, batch); });
}

void ahead(const Episodes& table, Slots slots, std::int64_t n, SlotsOut out) {
    const auto* at = slots.items(n, "slots");
    auto* counts = out.items(n, "out");
    run(n, [&] { table.ahead(at, n, counts); });
}

void behind(const Episodes& table, Slots slots, std::int64_t n, SlotsOut out) {
    const auto* at = slots.items(n, "slots");
    auto* counts = out.items(n, "out");
    run(n, [&] { table.behind(at, n, counts); });
}

void ended(const Episodes& table, Slots slots, std::int64_t n, FlagsOut out) {
    const auto* at = slots.items(n, "slots");
    auto* flags = out.items(n, "out");
    run(n, [&] { table.ended(at, n, flags); });
}

void shift(const Episodes& table, Slots slots, Pointer<const std::int64_t> steps, std::int64_t n,
           SlotsOut out) {
    const auto *at = slots.items(n, "slots"), *by = steps.items(n, "steps");
    auto* shifted = out.items(n, "out");
    run(n, [&] { table.shift(at, by, n, shifted); });
}

void window(const Episodes& table, Slots slots, std::int64_t n, std::int64_t before, std::int64_t after,
            std::int64_t dilation, SlotsOut out, FlagsOut valid) {
    // sixteen rows of a window take as long as the search for one
    const auto weight = [](std::int64_t rows) {
        return std::clamp(rows, std::int64_t{0}, kReleaseRows) / 16;
    };
    const std::int64_t work = n <= 0 || n >= kReleaseRows ? n : n * (1 + weight(before) + weight(after));
    const auto* at = slots.items(n, "slots");
    auto* windows = out.items(n, "out");
    auto* flags = valid.items(n, "valid");
    run(work, [&] { table.window(at, n, before, after, dilation, windows, flags); });
}

void require_window(std::int64_t n, std::int64_t width, const char* name) {
    if (n < 0 || width < 1 || width > std::numeric_limits<std::int32_t>::max()) {
        throw nb::value_error((std::string("n must be at least 0 and ") + name + " in [1, 2**31)").c_str());
    }
}

void slices(const Episodes& table, Slots slots, std::int64_t n, std::int64_t length, SlotsOut out) {
    require_window(n, length, "length");
    const auto* at = slots.items(n, "slots");
    auto* rows = out.items(n, "out");
    run(n, [&] { table.slices(at, n, length, rows); });
}

void steps(const Episodes& table, Slots slots, std::int64_t n, std::int64_t width, FloatPointer powers,
           bool single, SlotsOut rows, FloatPointer weights, SlotsOut steps, Pointer<float> discounts,
           SlotsOut last) {
    require_window(n, width, "width");
    const auto* at = slots.items(n, "slots");
    const auto fill = [&]<typename Weight>(Weight) {
        const auto* factors = powers.items<const Weight>(n, "powers");
        const StepWindows<Weight> out{rows.items(n, "rows"), weights.items<Weight>(n, "weights"),
                                      steps.items(n, "steps"), discounts.items(n, "discounts"),
                                      last.items(n, "last")};
        run(n, [&] { table.steps(at, n, width, factors, out); });
    };
    single ? fill(0.0F) : fill(0.0);
}

void stack(const Episodes& table, Slots slots, std::int64_t n, std::int64_t k, bool then, SlotsOut out,
           FlagsOut valid) {
    require_window(n, then ? k - 1 : k, then ? "k - 1" : "k");
    const auto* at = slots.items(n, "slots");
    auto* rows = out.items(n, "out");
    run(n, [&] { table.stack(at, n, k, then, rows, valid.or_null()); });
}

void spans(const Episodes& table, SlotsOut first, Pointer<std::int64_t> rows, FlagsOut closed,
           Pointer<std::int64_t> serial) {
    const std::int64_t n = table.count();
    auto *slots = first.items(n, "first"), *lengths = rows.items(n, "rows");
    auto* flags = closed.items(n, "closed");
    auto* serials = serial.items(n, "serial");
    run(table.records(), [&] { table.spans(slots, lengths, flags, serials); });
}

void draw(const Episodes& table, std::int64_t handle, Pointer<const std::int64_t> randoms, std::int64_t n,
          SlotsOut out) {
    const auto* numbers = randoms.items(n, "randoms");
    auto* drawn = out.items(n, "out");
    run(n, [&] { table.draw(handle, numbers, n, drawn); });
}

void draw_episodes(const Episodes& table, std::int64_t handle, Pointer<const std::int64_t> randoms,
                   std::int64_t n, SlotsOut out) {
    const auto* numbers = randoms.items(n, "randoms");
    auto* drawn = out.items(n, "out");
    run(n, [&] { table.draw_episodes(handle, numbers, n, drawn); });
}

void save(const Episodes& table, Pointer<std::int32_t> episode, Pointer<std::int64_t> serials,
          Pointer<std::int64_t> keys, Pointer<Flag> kinds, Pointer<Flag> status, Pointer<std::int64_t> free) {
    const std::int64_t present = table.present(), records = table.records();
    const Episodes::State state{episode.items(present, "episode"), serials.items(records, "serials"),
                                keys.items(records, "keys"),       kinds.items(records, "kinds"),
                                status.items(records, "status"),   free.items(table.free_count(), "free")};
    run(present, [&] { table.save(state); });
}

void load(Episodes& table, std::int64_t cursor, std::int64_t serial, std::int64_t present,
          std::int64_t records, std::int64_t free_count, Pointer<std::int32_t> episode,
          Pointer<std::int64_t> serials, Pointer<std::int64_t> keys, Pointer<Flag> kinds,
          Pointer<Flag> status, Pointer<std::int64_t> free) {
    const Episodes::State state{episode.items(present, "episode"), serials.items(records, "serials"),
                                keys.items(records, "keys"),       kinds.items(records, "kinds"),
                                status.items(records, "status"),   free.items(free_count, "free")};
    run(present, [&] { table.load(cursor, serial, present, records, free_count, state); });
}

constexpr const char* kEpisodesDoc = R"(
    The episode table: which rows of a ring belong to the same episode.

    A slot has the record of its episode; a record has its rows.

    Threads may call reading methods (`ahead` to `save`, draws included) at the same time. Calls that change
    the table are not ordered with any other call: that is up to the caller.
)";

constexpr const char* kInitDoc = R"(
    Create an empty table.

    Raises:
        ValueError: `capacity` is outside `[1, 2**30]`, or not a multiple of `num_envs`.
)";

constexpr const char* kRecordWriteDoc = R"(
    Record a ring write; row `skip + i` of the batch is in slot `(start + i) % capacity`.

    Args:
        start: Slot of the first stored row.
        rows: Stored rows.
        skip: Rows of the batch before them, which were not stored.
        ends: Address of bool `[skip + rows]`: whether a row ends its episode; 0: no row does.
        ids: Address of int64 `[skip + rows]`: the episode id of a row; 0: rows of the environment `slot %
            num_envs` follow each other.
        mask: Address of bool `[skip + rows]`: whether a row belongs to an episode; 0: all rows do.

    Raises:
        IndexError: `start` is outside the ring.
        ValueError: Negative counts, more rows than slots, skipped rows though the ring is not filled, or a
            run that does not continue at the cursor. Nothing has changed then.
)";

constexpr const char* kAheadDoc = R"(
    Write to int64 `[n]` at `out` how many rows follow each row in its episode; -1 for rows of no episode.

    Raises:
        IndexError: A slot outside the ring; nothing has been written then. (All calls with slots do.)
        ValueError: A negative `n`. (All calls with `n` do.)
)";

constexpr const char* kWindowDoc = R"(
    Write windows of `T = before + 1 + after` rows: int64 `[n, T]` at `out`, bool `[n, T]` at `valid`.

    Beyond the episode, a window repeats its first or last row, with False in `valid`.

    Raises:
        IndexError: A slot outside the ring.
        ValueError: `before` or `after` is outside `[0, 2**31)`, or `dilation` is below 1.
)";

constexpr const char* kSlicesDoc = R"(
    Write the slots of slices, int64 `[n, length]` at `out`: the rows from each row on, as `window` does.

    Raises:
        IndexError: A slot outside the ring.
        ValueError: `length` is outside `[1, 2**31)`.
)";

constexpr const char* kStepsDoc = R"(
    Write the windows of n-step transitions: the `width` rows from each row on, as `window` does.

    Args:
        slots: Address of int64 `[n]`.
        n: Windows.
        width: Rows of each, at least 1.
        powers: Address of `[width + 1]`: the weight of a row by its position, and the discount by the number
            of steps.
        single: Whether `powers` and `weights` are float32; else float64.
        rows: Address of int64 `[n, width]` for the slots of the windows.
        weights: Address of `[n, width]` for the powers of the rows in the episode, 0 for others.
        steps: Address of int64 `[n]` for the number of these rows, at least 1.
        discounts: Address of float32 `[n]` for the power of that number.
        last: Address of int64 `[n]` for the last slot of each window.

    Raises:
        IndexError: A slot outside the ring.
        ValueError: `width` is outside `[1, 2**31)`.
)";

constexpr const char* kStackDoc = R"(
    Write the rows of stacks of frames to int64 `[n, k]` at `out`: the `k` rows up to each row.

    Args:
        slots: Address of int64 `[n]`.
        n: Stacks.
        k: Rows of each, at least 1, or 2 with `then`.
        then: Whether they are the `k - 1` rows up to each row, and it once more.
        out: Address of int64 `[n, k]`. Before the episode, its first row.
        valid: Address of bool `[n, k]` for which rows are not before the episode; 0 leaves them out.

    Raises:
        IndexError: A slot outside the ring.
        ValueError: `k` is out of range.
)";

constexpr const char* kSpansDoc = R"(
    Write the episodes, in the order of their first rows, oldest first.

    Args:
        first: Address of int64 `[count]` for their first slots.
        rows: Address of int64 `[count]` for their numbers of rows.
        closed: Address of bool `[count]`: whether the episode ended.
        serial: Address of int64 `[count]` for their serial numbers.
)";

constexpr const char* kAddNeedDoc = R"(
    Count rows with at least `need - 1` rows after them from now on, and return the handle of the count.

    Raises:
        ValueError: `need` is below 1.
)";

constexpr const char* kStartRowsDoc = R"(
    Return the number of rows with enough rows after them.

    Raises:
        ValueError: An unknown handle. (All calls with a handle do.)
)";

constexpr const char* kDrawDoc = R"(
    Draw rows with enough rows after them, with equal probability.

    Args:
        handle: Handle of the count.
        randoms: Address of int64 `[n]`, each uniform in [0, 2**63); the top bit is ignored.
        n: Draws.
        out: Address of int64 `[n]` for the slots of the rows.

    Raises:
        IndexError: There is no such row, and `n` is above 0.
)";

constexpr const char* kDrawEpisodesDoc = R"(
    Draw episodes with equal probability, then a row with enough rows after it from each.

    Args:
        handle: Handle of the count.
        randoms: Address of int64 `[2 n]`, each uniform in [0, 2**63); the top bit is ignored.
        n: Draws.
        out: Address of int64 `[n]` for the slots of the rows.

    Raises:
        IndexError: There is no such row, and `n` is above 0.
)";

constexpr const char* kSaveDoc = R"(
    Write the state.

    Args:
        episode: Address of int32 `[present]`: the record of each row, oldest first; -1 for none.
        serials: Address of int64 `[records]`.
        keys: Address of int64 `[records]`: environment or id of an open episode.
        kinds: Address of uint8 `[records]`: 0 if the key is an environment, 1 if it is an id.
        status: Address of uint8 `[records]`: 0 open, 1 ended, 2 cut off.
        free: Address of int64 `[free_count]`: free records, the next one to be used last.
)";

constexpr const char* kLoadDoc = R"(
    Restore what `save` wrote. The caller has checked that the state is consistent.

    Raises:
        ValueError: Numbers that lead outside the table; nothing has changed then.
)";

}  // namespace

void bind_episodes(nb::module_& m) {
    nb::class_<Episodes>(m, "Episodes", kEpisodesDoc)
        .def(nb::init<std::int64_t, std::int64_t>(), "capacity"_a, "num_envs"_a, kInitDoc)
        .def_prop_ro("capacity", &Episodes::capacity, "Slots of the ring.")
        .def_prop_ro("cursor", &Episodes::cursor, "Slot after the newest row.")
        .def_prop_ro("present", &Episodes::present, "Rows present, rows of no episode included.")
        .def_prop_ro("rows", &Episodes::rows, "Rows of episodes.")
        .def_prop_ro("records", &Episodes::records, "Records, free ones included.")
        .def_prop_ro("free_count", &Episodes::free_count, "Records that are not in use.")
        .def_prop_ro("serial", &Episodes::serial, "Serial number of the newest episode; the first one has 1.")
        .def_prop_ro("count", &Episodes::count, "Episodes with rows present.")
        .def_prop_ro("nbytes", &Episodes::nbytes, "Bytes of memory.")
        .def("record_write", &record_write, "start"_a, "rows"_a, "skip"_a, "ends"_a, "ids"_a, "mask"_a,
             kRecordWriteDoc)
        .def("clear", &Episodes::clear, "Remove all rows. Serial numbers go on, and needs stay registered.")
        .def("ahead", &ahead, "slots"_a, "n"_a, "out"_a, kAheadDoc)
        .def(
            "behind", &behind, "slots"_a, "n"_a, "out"_a,
            "Write to int64 `[n]` at `out` how many rows are present before each; -1 for rows of no episode.")
        .def("ended", &ended, "slots"_a, "n"_a, "out"_a,
             "Write to bool `[n]` at `out` whether each row ended its episode.")
        .def("shift", &shift, "slots"_a, "steps"_a, "n"_a, "out"_a,
             "Write to int64 `[n]` at `out` the slots int64 `[n]` at `steps` rows on, or the episode's first "
             "or last.")
        .def("window", &window, "slots"_a, "n"_a, "before"_a, "after"_a, "dilation"_a, "out"_a, "valid"_a,
             kWindowDoc)
        .def("slices", &slices, "slots"_a, "n"_a, "length"_a, "out"_a, kSlicesDoc)
        .def("steps", &steps, "slots"_a, "n"_a, "width"_a, "powers"_a, "single"_a, "rows"_a, "weights"_a,
             "steps"_a, "discounts"_a, "last"_a, kStepsDoc)
        .def("stack", &stack, "slots"_a, "n"_a, "k"_a, "then"_a, "out"_a, "valid"_a, kStackDoc)
        .def("spans", &spans, "first"_a, "rows"_a, "closed"_a, "serial"_a, kSpansDoc)
        .def("add_need", &Episodes::add_need, "need"_a, kAddNeedDoc)
        .def("start_rows", &Episodes::start_rows, "handle"_a, kStartRowsDoc)
        .def("start_episodes", &Episodes::start_episodes, "handle"_a,
             "Return the number of episodes with such a row.")
        .def("draw", &draw, "handle"_a, "randoms"_a, "n"_a, "out"_a, kDrawDoc)
        .def("draw_episodes", &draw_episodes, "handle"_a, "randoms"_a, "n"_a, "out"_a, kDrawEpisodesDoc)
        .def("save", &save, "episode"_a, "serials"_a, "keys"_a, "kinds"_a, "status"_a, "free"_a, kSaveDoc)
        .def("load", &load, "cursor"_a, "serial"_a, "present"_a, "records"_a, "free_count"_a, "episode"_a,
             "serials"_a, "keys"_a, "kinds"_a, "status"_a, "free"_a, kLoadDoc);
}

}  // namespace ostinato
