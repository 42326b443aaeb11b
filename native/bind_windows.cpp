// Python bindings of windows of rows.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "bindings.hpp"
#include "gil.hpp"
#include "pointers.hpp"
#include "windows.hpp"

namespace ostinato {
namespace {

using namespace nb::literals;

void add_field(WindowReader& reader, Pointer<const Byte> base, Pointer<const Byte> other,
               std::int64_t row_bytes, std::int64_t stride, std::int64_t source, std::int64_t number_bytes) {
    if (row_bytes < 0 || stride < row_bytes || source < 0) {
        throw nb::value_error("row_bytes and source must be at least 0, and stride at least row_bytes");
    }
    if (number_bytes != 0 && number_bytes != 4 && number_bytes != 8) {
        throw nb::value_error("number_bytes must be 0, 4 or 8");
    }
    const auto sum = number_bytes == 0   ? WindowReader::Sum::none
                     : number_bytes == 4 ? WindowReader::Sum::float32
                                         : WindowReader::Sum::float64;
    reader.add({base.or_null(), other.or_null(), static_cast<std::size_t>(row_bytes),
                static_cast<std::size_t>(stride), static_cast<std::size_t>(source), sum});
}

using WidthList = nb::typed<nb::list, std::int64_t>;

void read_windows(const WindowReader& reader, const Pointers<const std::int64_t>& slots,
                  const Pointers<const Flag>& picks, const Pointers<const Byte>& weights,
                  const WidthList& widths, std::int64_t n, const Pointers<Byte>& outs) {
    if (picks.size() != slots.size() || weights.size() != slots.size() || widths.size() != slots.size()) {
        throw nb::value_error("slots, picks, weights and widths must have one entry for each source");
    }
    std::vector<WindowReader::Source> sources;
    sources.reserve(slots.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
        sources.push_back({slots[i], picks[i], weights[i], nb::cast<std::int64_t>(widths[i])});
    }
    const std::size_t bytes = reader.row_bytes() * static_cast<std::size_t>(n > 0 ? n : 0);
    run_released_if(bytes >= kReleaseBytes, [&] {
        reader.check(sources, n, outs);
        reader.read(sources, n, outs);
    });
}

constexpr const char* kWindowReaderDoc = R"(
    Reads windows of the fields of one table: rows side by side, or weighted sums of them, all in one pass.

    Threads may read at the same time, also while another one writes rows: a batch may then hold torn rows.
)";

constexpr const char* kAddFieldDoc = R"(
    Register a field and return nothing. Fields of one source are read at the same rows.

    Args:
        base: Address of the first row.
        other: Address of the first row of the field that picked rows are read from; 0 if there is none.
        row_bytes: Bytes of the field in one row.
        stride: Bytes from one row to the next.
        source: Position of its slots in the lists of a call.
        number_bytes: 4 or 8 for a field of float32 or float64 whose rows are summed, else 0.

    Raises:
        ValueError: Numbers out of range, or a null address.
)";

constexpr const char* kReadWindowsDoc = R"(
    Fill a batch: `outs[f][i, k]` is row `slots[i, k]` of field f, or `outs[f][i]` the weighted sum over k.

    Sums are computed in float64. Rows of weight 0 do not count, even if they hold infinities or NaN.

    Args:
        slots: Address of contiguous int64 `[n, width]` for each source.
        picks: Address of contiguous bool `[n, width]` for each source: rows that are read from the other
            field; 0 for none.
        weights: Address of contiguous `[n, width]` for each source with fields to sum, in their dtype; else 0.
        widths: Rows of a window for each source, at least 1.
        n: Records.
        outs: Address of contiguous `[n, width, row_bytes]` for each field, `[n, row_bytes]` for a sum.

    Raises:
        IndexError: A slot is outside the table; nothing has been written then.
        ValueError: A wrong number of entries, a null address, or a negative `n`.
)";

}  // namespace

void bind_windows(nb::module_& m) {
    nb::class_<WindowReader>(m, "WindowReader", kWindowReaderDoc)
        .def(nb::init<std::int64_t>(), "rows"_a, "Create a reader of a table of `rows` rows.")
        .def("add", &add_field, "base"_a, "other"_a, "row_bytes"_a, "stride"_a, "source"_a, "number_bytes"_a,
             kAddFieldDoc)
        .def("read", &read_windows, "slots"_a, "picks"_a, "weights"_a, "widths"_a, "n"_a, "outs"_a,
             kReadWindowsDoc);
}

}  // namespace ostinato
