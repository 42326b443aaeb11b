// Python bindings of direct calls in buffers that track episodes.
#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "direct_windows.hpp"

namespace ostinato {
namespace {

using namespace nb::literals;

constexpr const char* kTrackedDoc = R"(
    The episode tracker of a buffer whose rows tell by flags, and numbers of their episodes, where these end.

    Args:
        tracker: An object with the attribute `native_table`, the table of now; None if rows need not be recorded.
        ends: Positions of the fields of flags, bool with one value per row.
        ids: Position of the number of the episode, int64 with one value per row; -1 for none.
        mask: Position of the mask, bool with one value per row; -1 for none.
)";

constexpr const char* kWindowsDoc = R"(
    Draws of windows, and their batches; for direct calls. See `ostinato.buffers.direct_windows`.

    Args:
        reader: Reads the fields of a batch.
        templates: A tensor `[1, *shape]` for each field, in the dtype and shape of a batch.
        roles: What each source of the reader is: 0 the rows drawn, 1 the rows of their windows, 2 the last
            rows of the windows, or the rows of the following stacks.
        keys: Keys of a batch, `steps_to_next_obs` and `gamma` included; None takes those of the rows.
        powers: Returns the powers of n-step returns; None for stacks.
        k: Frames of a stack.

    Raises:
        ValueError: Numbers out of range, or templates that are not plain memory on the CPU.
)";

}  // namespace

void bind_direct_windows(nb::module_& m) {
    nb::class_<TrackedEpisodes>(m, "TrackedEpisodes", kTrackedDoc)
        .def(
            "__init__",
            [](TrackedEpisodes* self, nb::object tracker, const nb::list& ends, std::int64_t ids,
               std::int64_t mask) {
                std::vector<std::int64_t> positions;
                for (nb::handle end : ends) positions.push_back(nb::cast<std::int64_t>(end));
                new (self) TrackedEpisodes(std::move(tracker), std::move(positions), ids, mask);
            },
            "tracker"_a, "ends"_a, "ids"_a, "mask"_a,
            nb::sig("def __init__(self, tracker: typing.Any, ends: list[int], ids: int, mask: int) -> None"));
    nb::class_<DirectWindows>(m, "DirectWindows", kWindowsDoc)
        .def(
            nb::init<nb::object, const nb::list&, const nb::list&, nb::object, nb::object, std::int64_t>(),
            "reader"_a, "templates"_a, "roles"_a, "keys"_a.none(), "powers"_a.none(), "k"_a,
            nb::sig("def __init__(self, reader: WindowReader, templates: list[typing.Any], roles: list[int], "
                    "keys: tuple[typing.Any, ...] | None, powers: typing.Any, k: int) -> None"))
        .def_static(
            "slices",
            [](std::int64_t number, std::int64_t length) { return new DirectWindows(number, length); },
            nb::rv_policy::take_ownership, "number"_a, "length"_a,
            "Return draws of slices: `number` of them, or of `length` rows each; the other is 0.");
}

}  // namespace ostinato
