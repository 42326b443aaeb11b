// Python binding of sampling without replacement.
#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "pointers.hpp"
#include "shuffle.hpp"

namespace ostinato {
namespace {

using namespace nb::literals;

void draw(Pointer<std::int64_t> perm, std::int64_t first, std::int64_t total, std::int64_t k,
          Pointer<const std::int64_t> randoms, Pointer<std::int64_t> out) {
    if (first < 0 || k < 0 || first > total || (total == 0 && k > 0)) {
        throw nb::value_error("first must be in [0, total], k at least 0, and k 0 where total is 0");
    }
    auto* order = perm.items(k, "perm");
    const auto* numbers = randoms.items(k, "randoms");
    auto* drawn = out.items(k, "out");
    nb::gil_scoped_release released;
    shuffle_draw(order, first, total, k, numbers, drawn);
}

constexpr const char* kShuffleDrawDoc = R"(
    Do `k` steps of a Fisher-Yates shuffle of int64 `perm[first:total]`, and write the drawn elements.

    Step s swaps `perm[i]`, `i = (first + s) % total`, with `perm[j]`, `j = i + (randoms[s] * (total - i) >>
    63)`.

    Args:
        perm: Address of int64 `[total]`.
        first: Position of the first step, in [0, total].
        total: Length of the permutation.
        k: Steps; 0 where `total` is 0.
        randoms: Address of int64 `[k]`, each uniform in [0, 2**63); the top bit is ignored.
        out: Address of int64 `[k]`.

    Raises:
        ValueError: `first`, `total` and `k` do not fit together.
)";

}  // namespace

void bind_shuffle(nb::module_& m) {
    m.def("shuffle_draw", &draw, "perm"_a, "first"_a, "total"_a, "k"_a, "randoms"_a, "out"_a,
          kShuffleDrawDoc);
}

}  // namespace ostinato
