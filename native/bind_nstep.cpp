// Python bindings of n-step returns.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "bindings.hpp"
#include "nstep.hpp"
#include "pointers.hpp"

namespace ostinato {
namespace {

using namespace nb::literals;

void discount_steps(Pointer<const std::int64_t> slots, Pointer<const Flag> valid, std::int64_t n,
                    std::int64_t width, FloatPointer powers, bool single, FloatPointer weights,
                    Pointer<std::int64_t> steps, Pointer<float> discounts, Pointer<std::int64_t> last) {
    if (n < 0 || width < 1) throw nb::value_error("n must be at least 0 and width at least 1");
    const Windows windows{slots.items(n, "slots"), valid.items(n, "valid"), n, width};
    const auto run = [&]<typename Weight>(Weight) {
        discount_windows(windows, powers.items<const Weight>(n, "powers"),
                         weights.items<Weight>(n, "weights"), steps.items(n, "steps"),
                         discounts.items(n, "discounts"), last.items(n, "last"));
    };
    single ? run(0.0F) : run(0.0);
}

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

constexpr const char* kDiscountStepsDoc = R"(
    Compute weights, lengths and discounts of the windows of n-step transitions.

    Args:
        slots: Address of contiguous int64 `[n, width]`.
        valid: Address of contiguous bool `[n, width]`: true for the first entries of each window, one at
            least.
        n: Windows.
        width: Rows of each, at least 1.
        powers: Address of `[width + 1]`: the weight of a row by its position, and the discount by the number
            of steps.
        single: Whether `powers` and `weights` are float32; else float64.
        weights: Address of `[n, width]` to write: the powers of valid entries, else 0.
        steps: Address of int64 `[n]` to write: the number of valid entries.
        discounts: Address of float32 `[n]` to write: the power of that number.
        last: Address of int64 `[n]` to write: the last slot of each window.

    Raises:
        ValueError: A negative `n`, or a width below 1.
)";

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
    m.def("discount_steps", &discount_steps, "slots"_a, "valid"_a, "n"_a, "width"_a, "powers"_a, "single"_a,
          "weights"_a, "steps"_a, "discounts"_a, "last"_a, kDiscountStepsDoc);
    m.def("weigh_rows", &weigh_rows, "rows"_a, "weights"_a, "n"_a, "width"_a, "cells"_a, "single"_a, "out"_a,
          kWeighRowsDoc);
}

}  // namespace ostinato
