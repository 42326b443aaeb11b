// Python binding of positioned reads of files.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <utility>

#include "bindings.hpp"
#include "pointers.hpp"
#include "positioned_reads.hpp"

namespace ostinato {

#if defined(OSTINATO_HAS_POSITIONED_READS)

namespace {

using namespace nb::literals;

std::pair<std::int64_t, int> read(Pointer<const std::int64_t> fds, Pointer<const std::int64_t> offsets,
                                  Pointer<const std::int64_t> sizes, Pointer<Byte* const> targets,
                                  std::int64_t n, std::int64_t gap) {
    if (n < 0 || gap < 0) throw nb::value_error("n and gap must be at least 0");
    const FileRanges ranges{fds.items(n, "fds"), offsets.items(n, "offsets"), sizes.items(n, "sizes"),
                            targets.items(n, "targets"), n};
    for (std::int64_t i = 0; i < n; ++i) require_address(ranges.targets[i], ranges.sizes[i] > 0, "targets");
    ReadResult result{};
    {
        nb::gil_scoped_release released;
        result = read_ranges(ranges, gap);
    }
    return {result.range, result.error};
}

constexpr const char* kReadRangesDoc = R"(
    Read byte ranges of files, each straight to its memory, without the interpreter lock. Not on Windows.

    Args:
        fds: Address of int64 `[n]`: the open file of each range.
        offsets: Address of int64 `[n]`: the first byte of each range, ascending within a file.
        sizes: Address of int64 `[n]`: the bytes of each range.
        targets: Address of int64 `[n]`: the address to read each range to.
        n: Number of ranges.
        gap: Ranges of one file that are at most this many bytes apart are read in one call.

    Returns:
        The first range that could not be read in full, or `n`; and errno, 0 where its file ended before.

    Raises:
        ValueError: A negative `n` or `gap`.
)";

}  // namespace

void bind_positioned_reads(nb::module_& m) {
    m.def("read_ranges", &read, "fds"_a, "offsets"_a, "sizes"_a, "targets"_a, "n"_a, "gap"_a, kReadRangesDoc);
}

#else

void bind_positioned_reads(nb::module_&) {}

#endif

}  // namespace ostinato
