// The Python face of the episode table. Numbers in and out; memory as addresses that the Python side has
// checked.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "episodes.hpp"
#include "fields.hpp"

namespace ostinato::episodes {

namespace nb = nanobind;

/// Fewer rows are done before the interpreter lock would be back.
constexpr std::int64_t kReleaseRows = 4096;

template <typename Work>
void run(std::int64_t rows, Work work) {
    std::optional<nb::gil_scoped_release> unlocked;
    if (rows >= kReleaseRows) unlocked.emplace();
    work();
}

/// Memory of `n` numbers to read or to write; each raises where there are some, and no address.
inline const std::int64_t* ints(Address address, std::int64_t n, const char* name) {
    return items_at<const std::int64_t>(address, n, name);
}
inline std::int64_t* ints_out(Address address, std::int64_t n, const char* name) {
    return items_at<std::int64_t>(address, n, name);
}
inline std::uint8_t* bytes_out(Address address, std::int64_t n, const char* name) {
    return items_at<std::uint8_t>(address, n, name);
}

inline void note(Episodes& table, std::int64_t start, std::int64_t rows, std::int64_t skip, Address ends,
                 Address ids, Address mask) {
    const Episodes::Flags flags = {at_address<const std::uint8_t>(ends), at_address<const std::int64_t>(ids),
                                   at_address<const std::uint8_t>(mask)};
    run(rows, [&] { table.note(start, rows, skip, flags); });
}

inline void ahead(const Episodes& table, Address slots, std::int64_t n, Address out) {
    const auto* at = ints(slots, n, "slots");
    auto* found = ints_out(out, n, "out");
    run(n, [&] { table.ahead(at, n, found); });
}

inline void behind(const Episodes& table, Address slots, std::int64_t n, Address out) {
    const auto* at = ints(slots, n, "slots");
    auto* found = ints_out(out, n, "out");
    run(n, [&] { table.behind(at, n, found); });
}

inline void ended(const Episodes& table, Address slots, std::int64_t n, Address out) {
    const auto* at = ints(slots, n, "slots");
    auto* found = bytes_out(out, n, "out");
    run(n, [&] { table.ended(at, n, found); });
}

inline void shift(const Episodes& table, Address slots, Address steps, std::int64_t n, Address out) {
    const auto *at = ints(slots, n, "slots"), *by = ints(steps, n, "steps");
    auto* found = ints_out(out, n, "out");
    run(n, [&] { table.shift(at, by, n, found); });
}

inline void window(const Episodes& table, Address slots, std::int64_t n, std::int64_t before,
                   std::int64_t after, std::int64_t dilation, Address out, Address valid) {
    // sixteen rows of a window take as long as the search for one
    const auto weight = [](std::int64_t rows) {
        return std::clamp(rows, std::int64_t{0}, kReleaseRows) / 16;
    };
    const std::int64_t work = n <= 0 || n >= kReleaseRows ? n : n * (1 + weight(before) + weight(after));
    const auto* at = ints(slots, n, "slots");
    auto* found = ints_out(out, n, "out");
    auto* inside = bytes_out(valid, n, "valid");
    run(work, [&] { table.window(at, n, before, after, dilation, found, inside); });
}

inline void spans(const Episodes& table, Address first, Address rows, Address closed, Address serial) {
    const std::int64_t n = table.count();
    auto *begins = ints_out(first, n, "first"), *lengths = ints_out(rows, n, "rows");
    auto* over = bytes_out(closed, n, "closed");
    auto* serials = ints_out(serial, n, "serial");
    run(table.records(), [&] { table.spans(begins, lengths, over, serials); });
}

inline void draw(const Episodes& table, std::int64_t handle, Address randoms, std::int64_t n, Address out) {
    const auto* numbers = ints(randoms, n, "randoms");
    auto* drawn = ints_out(out, n, "out");
    run(n, [&] { table.draw(handle, numbers, n, drawn); });
}

inline void draw_episodes(const Episodes& table, std::int64_t handle, Address randoms, std::int64_t n,
                          Address out) {
    const auto* numbers = ints(randoms, n, "randoms");
    auto* drawn = ints_out(out, n, "out");
    run(n, [&] { table.draw_episodes(handle, numbers, n, drawn); });
}

/// How many entries a state has of each kind.
struct Counts {
    std::int64_t present, records, free;
};

inline Episodes::State state_at(const Counts& counts, Address episode, Address serials, Address keys,
                                Address kinds, Address status, Address free) {
    return {items_at<std::int32_t>(episode, counts.present, "episode"),
            ints_out(serials, counts.records, "serials"),
            ints_out(keys, counts.records, "keys"),
            bytes_out(kinds, counts.records, "kinds"),
            bytes_out(status, counts.records, "status"),
            ints_out(free, counts.free, "free")};
}

inline void save(const Episodes& table, Address episode, Address serials, Address keys, Address kinds,
                 Address status, Address free) {
    const Counts counts{table.present(), table.records(), table.free_count()};
    const Episodes::State state = state_at(counts, episode, serials, keys, kinds, status, free);
    run(table.present(), [&] { table.save(state); });
}

inline void load(Episodes& table, std::int64_t cursor, std::int64_t serial, std::int64_t present,
                 std::int64_t records, std::int64_t free_count, Address episode, Address serials,
                 Address keys, Address kinds, Address status, Address free) {
    const Counts counts{present, records, free_count};
    const Episodes::State state = state_at(counts, episode, serials, keys, kinds, status, free);
    run(present, [&] { table.load(cursor, serial, present, records, free_count, state); });
}

inline void bind(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<Episodes>(m, "Episodes", "Which rows of a ring belong together.")
        .def(nb::init<std::int64_t, std::int64_t>(), "capacity"_a, "lanes"_a)
        .def("note", &note, "start"_a, "rows"_a, "skip"_a, "ends"_a, "ids"_a, "mask"_a)
        .def("clear", &Episodes::clear)
        .def("ahead", &ahead, "slots"_a, "n"_a, "out"_a)
        .def("behind", &behind, "slots"_a, "n"_a, "out"_a)
        .def("ended", &ended, "slots"_a, "n"_a, "out"_a)
        .def("shift", &shift, "slots"_a, "steps"_a, "n"_a, "out"_a)
        .def("window", &window, "slots"_a, "n"_a, "before"_a, "after"_a, "dilation"_a, "out"_a, "valid"_a)
        .def("spans", &spans, "first"_a, "rows"_a, "closed"_a, "serial"_a)
        .def("add_need", &Episodes::add_need, "need"_a)
        .def("start_rows", &Episodes::start_rows, "handle"_a)
        .def("start_episodes", &Episodes::start_episodes, "handle"_a)
        .def("draw", &draw, "handle"_a, "randoms"_a, "n"_a, "out"_a)
        .def("draw_episodes", &draw_episodes, "handle"_a, "randoms"_a, "n"_a, "out"_a)
        .def("save", &save, "episode"_a, "serials"_a, "keys"_a, "kinds"_a, "status"_a, "free"_a)
        .def("load", &load, "cursor"_a, "serial"_a, "present"_a, "records"_a, "free_count"_a, "episode"_a,
             "serials"_a, "keys"_a, "kinds"_a, "status"_a, "free"_a)
        .def_prop_ro("capacity", &Episodes::capacity)
        .def_prop_ro("cursor", &Episodes::cursor)
        .def_prop_ro("present", &Episodes::present)
        .def_prop_ro("rows", &Episodes::rows)
        .def_prop_ro("records", &Episodes::records)
        .def_prop_ro("free_count", &Episodes::free_count)
        .def_prop_ro("serial", &Episodes::serial)
        .def_prop_ro("count", &Episodes::count)
        .def_prop_ro("nbytes", &Episodes::nbytes);
}

}  // namespace ostinato::episodes
