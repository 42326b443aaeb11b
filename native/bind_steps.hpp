// The Python face of transitions over several steps. Numbers in and out; memory as addresses that the Python
// side has checked.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "fields.hpp"
#include "steps.hpp"

namespace ostinato::steps {

namespace nb = nanobind;

inline void discount_steps(Address slots, Address valid, std::int64_t n, std::int64_t width, Address powers,
                           bool single, Address weights, Address steps, Address discounts, Address last) {
    if (n < 0 || width < 1) throw nb::value_error("n must be at least 0 and width at least 1");
    const Ahead ahead{items_at<const std::int64_t>(slots, n, "slots"),
                      items_at<const std::uint8_t>(valid, n, "valid"), n, width};
    auto* counts = items_at<std::int64_t>(steps, n, "steps");
    auto* given = items_at<float>(discounts, n, "discounts");
    auto* ends = items_at<std::int64_t>(last, n, "last");
    require_address(powers, n > 0, "powers");
    require_address(weights, n > 0, "weights");
    if (single) {
        discount(ahead, at_address<const float>(powers), at_address<float>(weights), counts, given, ends);
    } else {
        discount(ahead, at_address<const double>(powers), at_address<double>(weights), counts, given, ends);
    }
}

template <typename Value>
void weigh_as(Address rows, Address weights, const Form& form, Address out) {
    weigh(at_address<const Value>(rows), at_address<const Value>(weights), form, at_address<Value>(out));
}

inline void weigh_rows(Address rows, Address weights, std::int64_t n, std::int64_t width, std::int64_t cells,
                       bool single, Address out) {
    if (n < 0 || width < 0 || cells < 0) throw nb::value_error("n, width and cells must be at least 0");
    const Form form{n, width, cells};
    const bool sums = n > 0 && cells > 0;
    require_address(rows, sums && width > 0, "rows");
    require_address(weights, sums && width > 0, "weights");
    require_address(out, sums, "out");
    single ? weigh_as<float>(rows, weights, form, out) : weigh_as<double>(rows, weights, form, out);
}

inline void bind(nb::module_& m) {
    using namespace nb::literals;
    m.def("discount_steps", &discount_steps, "slots"_a, "valid"_a, "n"_a, "width"_a, "powers"_a, "single"_a,
          "weights"_a, "steps"_a, "discounts"_a, "last"_a);
    m.def("weigh_rows", &weigh_rows, "rows"_a, "weights"_a, "n"_a, "width"_a, "cells"_a, "single"_a, "out"_a);
}

}  // namespace ostinato::steps
