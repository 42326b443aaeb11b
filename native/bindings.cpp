// The Python face of the native part. The only file that knows the interpreter lock.
// Numbers come in and go out; memory comes as addresses, which the Python side has checked (dtype, shape,
// lifetime).
#include <nanobind/nanobind.h>

#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fields.hpp"
#include "gather.hpp"
#include "leaves.hpp"
#include "pieces.hpp"
#include "platform.hpp"
#include "shuffle.hpp"
#include "sum_tree.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ostinato {
namespace {

/// Smaller copies keep the lock: giving it up costs more, and under contention milliseconds to get back.
constexpr std::size_t kReleaseBytes = 4096;

Address to_address(PyObject* number) {
    const unsigned long long address = PyLong_AsUnsignedLongLong(number);
    if (address == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr)
        throw nb::python_error();
    return static_cast<Address>(address);
}

/// An item of a list that may have become shorter.
nb::object item(const nb::list& list, std::size_t i) {
    PyObject* found = PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(i));
    if (found == nullptr) throw nb::python_error();
    return nb::borrow(found);
}

std::vector<Address> to_addresses(const nb::list& numbers) {
    const std::size_t count = numbers.size();
    std::vector<Address> addresses(count);
    for (std::size_t i = 0; i < count; ++i) {
        addresses[i] = to_address(PyList_GetItem(numbers.ptr(), static_cast<Py_ssize_t>(i)));
    }
    return addresses;
}

/// Runs `work` without the interpreter lock if it moves enough to be worth it.
template <typename Work>
void run(const Plan& plan, std::int64_t n, Work work) {
    std::optional<nb::gil_scoped_release> unlocked;
    if (plan.row_bytes() * static_cast<std::size_t>(n) >= kReleaseBytes) unlocked.emplace();
    work();
}

std::size_t add(Fields& fields, const nb::list& segments, std::int64_t row_bytes, std::int64_t stride) {
    std::vector<Segment> tables;
    for (nb::handle item : segments) {
        const auto table = nb::cast<nb::tuple>(item);
        if (table.size() != 2) throw nb::value_error("a segment must be a tuple (base_address, rows)");
        tables.push_back({at_address<Byte>(to_address(table[0].ptr())), nb::cast<std::int64_t>(table[1])});
    }
    return fields.add(std::move(tables), row_bytes, stride);
}

void gather(const Fields& fields, const nb::list& indices, std::int64_t n, const nb::list& outs) {
    const Plan plan = fields.plan_gather(to_addresses(indices), n, to_addresses(outs));
    run(plan, n, [&] {
        check_slots(plan, n);
        gather_rows(plan, n);
    });
}

bool write_run(const Fields& fields, std::int64_t start, std::int64_t n, std::int64_t skip,
               const nb::list& srcs) {
    Plan plan = fields.plan_write(0, n, to_addresses(srcs));
    fields.check_run(start, n, skip);
    plan.start = start;
    plan.skip = skip;
    if (n > 0 &&
        reads_fields(*fields.cover(), plan, static_cast<std::uint64_t>(skip) + static_cast<std::uint64_t>(n)))
        return false;
    run(plan, n, [&] { write_rows(plan, n); });
    return true;
}

bool scatter(const Fields& fields, Address slots, Address rows, std::int64_t n, const nb::list& srcs) {
    Plan plan = fields.plan_write(slots, n, to_addresses(srcs));
    plan.picks = at_address<const std::int64_t>(rows);
    const std::shared_ptr<const Cover> cover = fields.cover();
    bool apart = true;
    run(plan, n, [&] {
        check_slots(plan, n);
        if (plan.picks != nullptr) require_in_range(plan.picks, n, std::numeric_limits<std::int64_t>::max());
        apart = !picks_from_fields(*cover, plan, n);
        if (apart) scatter_rows(plan, n);
    });
    return apart;
}

void draw(Address perm, std::int64_t first, std::int64_t total, std::int64_t k, Address randoms,
          Address out) {
    if (first < 0 || k < 0 || k > total - first) {
        throw nb::value_error("first and k must be at least 0 and first + k at most total");
    }
    nb::gil_scoped_release unlocked;
    shuffle_draw(at_address<std::int64_t>(perm), first, total, k, at_address<const std::int64_t>(randoms),
                 at_address<std::int64_t>(out));
}

#if defined(OSTINATO_HAS_PIECES)
nb::tuple read(Address fds, Address offsets, Address widths, Address targets, std::int64_t n,
               std::int64_t gap) {
    if (n < 0 || gap < 0) throw nb::value_error("n and gap must be at least 0");
    const Pieces pieces{at_address<const std::int64_t>(fds), at_address<const std::int64_t>(offsets),
                        at_address<const std::int64_t>(widths), at_address<const std::int64_t>(targets), n};
    Reached reached{};
    {
        nb::gil_scoped_release unlocked;
        reached = read_pieces(pieces, gap);
    }
    return nb::make_tuple(reached.piece, reached.error);
}
#endif

void advise(Address address, std::int64_t nbytes) {
    if (nbytes < 0) throw std::invalid_argument("nbytes must be at least 0, got " + std::to_string(nbytes));
    advise_huge_pages(address, static_cast<std::size_t>(nbytes));
}

/// The reader of the type asked for last. (A call keeps its own: torch may run Python code in between.)
std::shared_ptr<const LeafReader> reader_of(nb::handle type) {
    // never freed: when statics are, the interpreter is gone already
    static auto& known = *new std::shared_ptr<const LeafReader>();
    if (known == nullptr || !known->reads(type)) known = std::make_shared<const LeafReader>(type);
    return known;
}

nb::object check_leaves(const nb::list& values, const nb::list& dtypes, const nb::list& shapes,
                        nb::type_object tensor_type) {
    const std::size_t count = values.size();
    if (dtypes.size() != count || shapes.size() != count) {
        throw nb::value_error("values, dtypes and shapes must be of one length");
    }
    const std::shared_ptr<const LeafReader> reader = reader_of(tensor_type);
    try {
        nb::list addresses;
        for (std::size_t i = 0; i < count; ++i) {
            const nb::object value = item(values, i);
            if (!value.type().is(tensor_type)) return nb::none();
            const nb::object address = reader->address(value, item(dtypes, i), item(shapes, i));
            if (!address.is_valid() || to_address(address.ptr()) == 0) return nb::none();
            addresses.append(address);
        }
        return addresses;
    } catch (const nb::python_error& error) {  // tensors without plain memory raise, instead of answering
        if (!error.matches(PyExc_Exception)) throw;
        return nb::none();
    }
}

// The sum tree. Few leaves are done before the interpreter lock would be back.
constexpr std::int64_t kReleaseLeaves = 1024;

template <typename Work>
void run_tree(std::int64_t n, Work work) {
    std::optional<nb::gil_scoped_release> unlocked;
    if (n >= kReleaseLeaves) unlocked.emplace();
    work();
}

void tree_set(SumTree& tree, Address slots, Address values, std::int64_t n) {
    run_tree(n,
             [&] { tree.set(at_address<const std::int64_t>(slots), at_address<const double>(values), n); });
}

void tree_set_run(SumTree& tree, std::int64_t start, std::int64_t count, double value) {
    run_tree(count, [&] { tree.set_run(start, count, value); });
}

void tree_get(const SumTree& tree, Address slots, std::int64_t n, Address out) {
    run_tree(n, [&] { tree.get(at_address<const std::int64_t>(slots), n, at_address<double>(out)); });
}

void tree_draw(const SumTree& tree, Address uniforms, std::int64_t n, Address slots, Address values) {
    run_tree(n, [&] {
        tree.draw(at_address<const double>(uniforms), n, at_address<std::int64_t>(slots),
                  at_address<double>(values));
    });
}

void tree_clear(SumTree& tree) {
    run_tree(tree.capacity(), [&] { tree.clear(); });
}

void tree_leaves(const SumTree& tree, Address out, std::int64_t n) {
    run_tree(n, [&] { tree.copy_to(at_address<double>(out), n); });
}

void tree_load(SumTree& tree, Address values, std::int64_t n) {
    run_tree(tree.capacity(), [&] { tree.load(at_address<const double>(values), n); });
}

}  // namespace
}  // namespace ostinato

NB_MODULE(_native, m) {
    m.doc() = "Batched copies between storages and batches: numbers in and out only, memory as addresses.";
    nb::class_<ostinato::Fields>(m, "Fields", "The fields of a storage, registered once.")
        .def(nb::init<>())
        .def("add", &ostinato::add, "segments"_a, "row_bytes"_a, "stride"_a)
        .def("gather", &ostinato::gather, "indices"_a, "n"_a, "outs"_a)
        .def("write_run", &ostinato::write_run, "start"_a, "n"_a, "skip"_a, "srcs"_a)
        .def("scatter", &ostinato::scatter, "slots"_a, "rows"_a, "n"_a, "srcs"_a)
        .def_prop_ro("count", &ostinato::Fields::count)
        .def_prop_ro("rows", &ostinato::Fields::rows);
    m.def("advise_huge_pages", &ostinato::advise, "address"_a, "nbytes"_a);
    m.def("check_leaves", &ostinato::check_leaves, "values"_a, "dtypes"_a, "shapes"_a, "tensor_type"_a);
#if defined(OSTINATO_HAS_PIECES)
    m.def("read_pieces", &ostinato::read, "fds"_a, "offsets"_a, "widths"_a, "targets"_a, "n"_a, "gap"_a);
#endif
    m.def("shuffle_draw", &ostinato::draw, "perm"_a, "first"_a, "total"_a, "k"_a, "randoms"_a, "out"_a);
    nb::class_<ostinato::SumTree>(m, "SumTree", "Priorities of slots, drawn in proportion.")
        .def(nb::init<std::int64_t>(), "capacity"_a)
        .def("set", &ostinato::tree_set, "slots"_a, "values"_a, "n"_a)
        .def("set_run", &ostinato::tree_set_run, "start"_a, "count"_a, "value"_a)
        .def("get", &ostinato::tree_get, "slots"_a, "n"_a, "out"_a)
        .def("draw", &ostinato::tree_draw, "uniforms"_a, "n"_a, "slots"_a, "values"_a)
        .def("clear", &ostinato::tree_clear)
        .def("leaves", &ostinato::tree_leaves, "out"_a, "n"_a)
        .def("load", &ostinato::tree_load, "values"_a, "n"_a)
        .def_prop_ro("capacity", &ostinato::SumTree::capacity)
        .def_prop_ro("nbytes", &ostinato::SumTree::nbytes)
        .def_prop_ro("total", &ostinato::SumTree::total)
        .def_prop_ro("minimum", &ostinato::SumTree::minimum)
        .def_prop_ro("maximum", &ostinato::SumTree::maximum);
}
