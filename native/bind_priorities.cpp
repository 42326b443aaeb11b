// Python bindings of the sum tree and of prioritized replay on it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings.hpp"
#include "checks.hpp"
#include "gil.hpp"
#include "pointers.hpp"
#include "prioritized.hpp"
#include "sum_tree.hpp"

namespace ostinato {
namespace {

using namespace nb::literals;

/// Leaves that are worth releasing the interpreter lock.
constexpr std::int64_t kReleaseLeaves = 1024;

template <typename Work>
void run(std::int64_t leaves, Work work) {
    run_released_if(leaves >= kReleaseLeaves, work);
}

void set(SumTree& tree, Pointer<const std::int64_t> slots, Pointer<const double> values, std::int64_t n) {
    const auto* at = slots.items(n, "slots");
    const auto* leaves = values.items(n, "values");
    run(n, [&] { tree.set(at, leaves, n); });
}

void set_run(SumTree& tree, std::int64_t start, std::int64_t count, double value) {
    run(count, [&] { tree.set_run(start, count, value); });
}

void get(const SumTree& tree, Pointer<const std::int64_t> slots, std::int64_t n, Pointer<double> out) {
    const auto* at = slots.items(n, "slots");
    auto* leaves = out.items(n, "out");
    run(n, [&] { tree.get(at, n, leaves); });
}

void draw(const SumTree& tree, Pointer<const double> uniforms, std::int64_t n, Pointer<std::int64_t> slots,
          Pointer<double> values) {
    const auto* numbers = uniforms.items(n, "uniforms");
    auto* drawn = slots.items(n, "slots");
    auto* leaves = values.items(n, "values");
    run(n, [&] { tree.draw(numbers, n, drawn, leaves); });
}

void clear(SumTree& tree) {
    run(tree.capacity(), [&] { tree.clear(); });
}

void leaves(const SumTree& tree, Pointer<double> out, std::int64_t n) {
    auto* copy = out.items(n, "out");
    run(n, [&] { tree.copy_to(copy, n); });
}

void load(SumTree& tree, Pointer<const double> values, std::int64_t n) {
    const auto* leaves = values.items(n, "values");
    run(tree.capacity(), [&] { tree.load(leaves, n); });
}

using GenerationTuple = nb::typed<nb::tuple, Pointer<const std::int64_t>, std::int64_t, std::int64_t,
                                  std::int64_t, std::int64_t, std::int64_t>;

Generations to_generations(const GenerationTuple& numbers) {
    if (numbers.size() != 6) throw nb::value_error("generations must be six numbers");
    Pointer<const std::int64_t> array;
    if (!nb::try_cast(numbers[0], array)) throw nb::type_error("generations must begin with an address");
    const auto number = [&numbers](std::size_t i) { return nb::cast<std::int64_t>(numbers[i]); };
    return {array.items(number(1), "generations"), number(1), number(2), number(3), number(4), number(5)};
}

void sample_rows(const SumTree& tree, Pointer<const double> uniforms, std::int64_t n, double beta,
                 const GenerationTuple& generations, Pointer<std::int64_t> slots, FloatPointer weights,
                 bool single, Pointer<std::int64_t> out) {
    require_count(n);
    const Generations known = to_generations(generations);
    const auto* numbers = uniforms.items(n, "uniforms");
    auto* drawn = slots.items(n, "slots");
    auto* drawn_generations = out.items(n, "out");
    const auto draw_with = [&](auto* typed_weights) {
        run(n, [&] { sample(tree, numbers, n, beta, known, drawn, typed_weights, drawn_generations); });
    };
    single ? draw_with(weights.items<float>(n, "weights")) : draw_with(weights.items<double>(n, "weights"));
}

std::tuple<std::int64_t, double, double, double> update(
    SumTree& tree, Pointer<const std::int64_t> slots, FloatPointer values, bool single, std::int64_t n,
    Pointer<const std::int64_t> expected, const GenerationTuple& generations, Pointer<double> priorities,
    Pointer<const Flag> hidden, std::int64_t rows, double eps, double alpha, bool want_largest) {
    require_count(n);
    if (rows < 0 || rows > tree.capacity()) {
        throw std::invalid_argument("rows must be in [0, " + std::to_string(tree.capacity()) + "], got " +
                                    std::to_string(rows));
    }
    const Generations known = to_generations(generations);
    const Priorities all{priorities.items(rows, "priorities"), hidden.or_null(), rows, eps, alpha};
    const auto* at = slots.items(n, "slots");
    UpdateResult result;
    const auto update_with = [&](const auto* given) {
        run(n, [&] {
            result = PriorityUpdate(tree, all, at, given, n).run(expected.or_null(), known, want_largest);
        });
    };
    single ? update_with(values.items<float>(n, "values")) : update_with(values.items<double>(n, "values"));
    return {result.stale, result.largest_given, result.largest_before, result.largest_after};
}

constexpr const char* kSumTreeDoc = R"(
    Leaves of the slots [0, capacity): draws in proportion to them, their sum, smallest and largest.

    One writer at a time and no draw meanwhile: the caller's lock orders them. Draws may run at the same time.
    To save and restore a tree, use `leaves` and `load`.
)";

constexpr const char* kSetDoc = R"(
    Write leaves, in order: of equal slots the last one wins.

    Args:
        slots: Address of contiguous int64 `[n]`.
        values: Address of contiguous float64 `[n]`, finite and at least 0.
        n: Leaves to write.

    Raises:
        IndexError: A slot outside the leaves; nothing has been written then.
        ValueError: A value that is negative or not finite (nothing has been written then), or a negative `n`.
)";

constexpr const char* kSetRunDoc = R"(
    Write one value to the leaves `(start + i) % capacity`, `i < count <= capacity`.

    Raises:
        IndexError: `start` is outside the leaves.
        ValueError: `count` is too large or negative, or the value is negative or not finite.
)";

constexpr const char* kGetDoc = R"(
    Read the leaves at int64 `[n]` at `slots` into float64 `[n]` at `out`.

    Raises:
        IndexError: A slot outside the leaves.
        ValueError: A negative `n`.
)";

constexpr const char* kDrawDoc = R"(
    Draw leaf `i` with probability `leaf[i] / total`, never a leaf of zero.

    Args:
        uniforms: Address of contiguous float64 `[n]` in [0, 1].
        n: Draws.
        slots: Address of contiguous int64 `[n]` for the drawn slots.
        values: Address of contiguous float64 `[n]` for their leaves.

    Raises:
        ValueError: The total is zero or not finite, or `n` is negative.
)";

constexpr const char* kSampleDoc = R"(
    Draw as `draw` does, with importance weights and generations.

    Args:
        uniforms: Address of contiguous float64 `[n]` in [0, 1].
        n: Draws.
        beta: Exponent of the weights `(leaf / smallest leaf above zero) ** -beta`.
        generations: The generations of all slots: address of int64 `[m]` and `m` (slots from `m` on have
            generation 0); or 0 and 0, followed by a cursor and the numbers to add to a slot before the cursor
            and from it on. The sixth number is for `update`.
        slots: Address of contiguous int64 `[n]` for the drawn slots.
        weights: Address of contiguous float32 or float64 `[n]` for their weights.
        single: Whether the weights are float32.
        out: Address of contiguous int64 `[n]` for their generations.

    Raises:
        ValueError: The total is zero or not finite, `n` is negative, or `generations` has another length.
)";

constexpr const char* kUpdateDoc = R"(
    Set the priorities `p` of rows, and their leaves to `(p + eps) ** alpha`.

    Rows are updated in order: of equal slots the last one wins.

    Args:
        slots: Address of contiguous int64 `[n]`.
        values: Address of contiguous float32 or float64 `[n]`: the priorities, finite and at least 0.
        single: Whether they are float32.
        n: Rows to update.
        expected: Address of contiguous int64 `[n]`: rows with another generation, or without a row, are not
            updated. 0 to compare no generations.
        generations: The generations of all slots, see `sample`. No row has a generation up to the sixth
            number.
        priorities: Address of contiguous float64 `[capacity]` that keeps the priorities as they were given.
        hidden: Address of contiguous bool `[capacity]` of slots whose leaves stay 0; 0 for none.
        rows: Number of rows present, at most the capacity.
        eps: Added to every priority.
        alpha: Exponent; the leaf is 0 where `p + eps` is 0, also for `alpha = 0`.
        want_largest: Whether to compute the last two numbers of the result.

    Returns:
        The number of rows that were not updated because of their generation, the largest priority given, and,
        with `want_largest`, the largest priority that the updated rows had before and have now.

    Raises:
        IndexError: A slot below 0, or, without `expected`, outside the rows; nothing has been written then.
        ValueError: A priority that is negative, not finite or makes a leaf above 2**960 (nothing has been
            written then), or sizes out of range.
)";

constexpr const char* kLeavesDoc = R"(
    Copy the first `n` leaves to float64 `[n]` at `out`.

    Raises:
        ValueError: `n` is above the capacity or negative.
)";

constexpr const char* kLoadDoc = R"(
    Set the first `n` leaves to float64 `[n]` at `values`, and all others to zero.

    Raises:
        ValueError: A value that is negative or not finite, or `n` is above the capacity or negative; nothing
            has changed then.
)";

}  // namespace

void bind_priorities(nb::module_& m) {
    nb::class_<SumTree>(m, "SumTree", kSumTreeDoc)
        .def(nb::init<std::int64_t>(), "capacity"_a)
        .def_prop_ro("capacity", &SumTree::capacity, "Number of leaves.")
        .def_prop_ro("nbytes", &SumTree::nbytes,
                     "Bytes of all levels. Pages that were never written take no memory.")
        .def_prop_ro(
            "total", &SumTree::total,
            "Sum of all leaves: of groups of eight from left to right, then of their sums, and so on.")
        .def_prop_ro("minimum", &SumTree::minimum, "Smallest leaf above zero; infinity if there is none.")
        .def_prop_ro(
            "maximum", &SumTree::maximum,
            "Largest leaf. O(capacity) in the first call; from then on updates keep it, at some cost.")
        .def("set", &set, "slots"_a, "values"_a, "n"_a, kSetDoc)
        .def("set_run", &set_run, "start"_a, "count"_a, "value"_a, kSetRunDoc)
        .def("get", &get, "slots"_a, "n"_a, "out"_a, kGetDoc)
        .def("draw", &draw, "uniforms"_a, "n"_a, "slots"_a, "values"_a, kDrawDoc)
        .def("sample", &sample_rows, "uniforms"_a, "n"_a, "beta"_a, "generations"_a, "slots"_a, "weights"_a,
             "single"_a, "out"_a, kSampleDoc)
        .def("update", &update, "slots"_a, "values"_a, "single"_a, "n"_a, "expected"_a, "generations"_a,
             "priorities"_a, "hidden"_a, "rows"_a, "eps"_a, "alpha"_a, "want_largest"_a, kUpdateDoc)
        .def("clear", &clear, "Set all leaves to zero.")
        .def("leaves", &leaves, "out"_a, "n"_a, kLeavesDoc)
        .def("load", &load, "values"_a, "n"_a, kLoadDoc);
}

}  // namespace ostinato
