// Python bindings of n-step returns.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "bindings.hpp"
#include "nstep.hpp"
#include "pointers.hpp"

namespace ostinato {
namespace {

using namespace nb::literals;

void weigh_rows(FloatPointer rows, FloatPointer weights, std::int64_t n, std::int64_t width,
                std::int64_t cells, bool single, FloatPointer out) {
    if (n < 0 || width < 0 || cells < 0) throw nb::value_error("n, width and cells must be at least 0");
    const SumShape shape{n, width, cells};
    const std::int64_t sums = n > 0 ? cells : 0;
    const std::int64_t terms = width > 0 ? sums : 0;
    const auto run = [&]<typename Value>(Value) {
        weighted_sums(rows.items<const Value>(terms, "rows"), weights.items<const Value>(terms, "weights"),
                      shape, out.items<Value>(sums, "out"));
    };
    single ? run(0.0F) : run(0.0);
}

constexpr const char* kWeighRowsDoc = R"(
    Write weighted sums, computed in float64: `out[i, c] = sum_k weights[i, k] * rows[i, k, c]`.

    Rows of weight 0 do not count, even if they hold infinities or NaN.

    Args:
        rows: Address of contiguous `[n, width, cells]`.
        weights: Address of contiguous `[n, width]`.
        n: Sums.
        width: Rows of each.
        cells: Numbers of a row.
        single: Whether all are float32; else float64.
        out: Address of contiguous `[n, cells]`.

    Raises:
        ValueError: Negative numbers.
)";

}  // namespace

void bind_nstep(nb::module_& m) {
    m.def("weigh_rows", &weigh_rows, "rows"_a, "weights"_a, "n"_a, "width"_a, "cells"_a, "single"_a, "out"_a,
          kWeighRowsDoc);
}

}  // namespace ostinato
