// The Python face of the native part. Only here and in bind_episodes.hpp the interpreter lock is known.
// Numbers come in and go out; memory comes as addresses, which the Python side has checked (dtype, shape,
// device, lifetime). An address of 0 raises where there are items to read or write (items_at).
#include <nanobind/nanobind.h>

#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind_episodes.hpp"
#include "bind_shared.hpp"
#include "bind_steps.hpp"
#include "fields.hpp"
#include "gather.hpp"
#include "leaves.hpp"
#include "mirror.hpp"
#include "pieces.hpp"
#include "platform.hpp"
#include "ranks.hpp"
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
auto run_bytes(std::size_t row_bytes, std::int64_t n, Work work) {
    if (n < 0) throw std::invalid_argument("n must be at least 0, got " + std::to_string(n));
    std::optional<nb::gil_scoped_release> unlocked;
    if (row_bytes * static_cast<std::size_t>(n) >= kReleaseBytes) unlocked.emplace();
    return work();
}

template <typename Work>
void run(const Plan& plan, Work work) {
    run_bytes(plan.bytes(), 1, work);
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

void gather_counts(const Fields& fields, const nb::list& indices, const std::vector<std::int64_t>& counts,
                   const nb::list& outs) {
    const Plan plan = fields.plan_gather(to_addresses(indices), counts, to_addresses(outs));
    run(plan, [&] {
        check_slots(plan);
        gather_rows(plan);
    });
}

void gather(const Fields& fields, const nb::list& indices, std::int64_t n, const nb::list& outs) {
    gather_counts(fields, indices, {n}, outs);
}

void gather_each(const Fields& fields, const nb::list& indices, const nb::list& counts,
                 const nb::list& outs) {
    std::vector<std::int64_t> rows;
    for (nb::handle count : counts) rows.push_back(nb::cast<std::int64_t>(count));
    gather_counts(fields, indices, rows, outs);
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
    run(plan, [&] { write_rows(plan); });
    return true;
}

bool scatter(const Fields& fields, Address slots, Address rows, std::int64_t n, const nb::list& srcs) {
    Plan plan = fields.plan_write(slots, n, to_addresses(srcs));
    require_address(slots, n > 0, "slots");
    plan.picks = at_address<const std::int64_t>(rows);
    const std::shared_ptr<const Cover> cover = fields.cover();
    bool apart = true;
    run(plan, [&] {
        check_slots(plan);
        if (plan.picks != nullptr) require_in_range(plan.picks, n, std::numeric_limits<std::int64_t>::max());
        apart = !picks_from_fields(*cover, plan, n);
        if (apart) scatter_rows(plan);
    });
    return apart;
}

void choose(Address slots, Address pick, std::int64_t n, std::int64_t rows, Address out) {
    if (n < 0) throw std::invalid_argument("n must be at least 0, got " + std::to_string(n));
    choose_slots(items_at<const std::int64_t>(slots, n, "slots"), items_at<const Byte>(pick, n, "pick"), n,
                 rows, items_at<std::int64_t>(out, n, "out"));
}

void draw(Address perm, std::int64_t first, std::int64_t total, std::int64_t k, Address randoms,
          Address out) {
    if (first < 0 || k < 0 || first > total || (total == 0 && k > 0)) {
        throw nb::value_error("first must be in [0, total], k at least 0, and 0 where there are no rows");
    }
    auto* order = items_at<std::int64_t>(perm, k, "perm");
    const auto* numbers = items_at<const std::int64_t>(randoms, k, "randoms");
    auto* drawn = items_at<std::int64_t>(out, k, "out");
    nb::gil_scoped_release unlocked;
    shuffle_draw(order, first, total, k, numbers, drawn);
}

#if defined(OSTINATO_HAS_PIECES)
nb::tuple read(Address fds, Address offsets, Address widths, Address targets, std::int64_t n,
               std::int64_t gap) {
    if (n < 0 || gap < 0) throw nb::value_error("n and gap must be at least 0");
    const Pieces pieces{items_at<const std::int64_t>(fds, n, "fds"),
                        items_at<const std::int64_t>(offsets, n, "offsets"),
                        items_at<const std::int64_t>(widths, n, "widths"),
                        items_at<const std::int64_t>(targets, n, "targets"), n};
    for (std::int64_t i = 0; i < n; ++i) {
        require_address(static_cast<Address>(pieces.targets[i]), pieces.widths[i] > 0, "targets");
    }
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
    require_address(address, nbytes > 0, "address");
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

// Next observations that are stored once.
std::int64_t mirror_compare(const Mirror& mirror, std::int64_t cursor, std::int64_t n, const nb::list& obs,
                            const nb::list& nexts, Address agree, Address relink) {
    const auto first = to_addresses(obs), second = to_addresses(nexts);
    auto* same = items_at<Byte>(agree, n, "agree");
    auto* before = items_at<Byte>(relink, n, "relink");
    return run_bytes(mirror.row_bytes(), n,
                     [&] { return mirror.compare(cursor, n, first, second, same, before); });
}

void mirror_link(Mirror& mirror, std::int64_t start, std::int64_t n, std::int64_t skip, const nb::list& nexts,
                 Address agree, Address relink) {
    const auto from = to_addresses(nexts);
    const auto* same = items_at<const Byte>(agree, n, "agree");
    run_bytes(mirror.row_bytes(), n,
              [&] { mirror.link_run(start, n, skip, from, same, at_address<const Byte>(relink)); });
}

void mirror_put(Mirror& mirror, Address slots, std::int64_t n, const nb::list& nexts) {
    const auto from = to_addresses(nexts);
    const auto* chosen = items_at<const std::int64_t>(slots, n, "slots");
    run_bytes(mirror.row_bytes(), n, [&] { mirror.put_rows(chosen, n, from); });
}

void mirror_drop(Mirror& mirror, Address slots, std::int64_t n) {
    mirror.drop_rows(items_at<const std::int64_t>(slots, n, "slots"), n);
}

void mirror_read(const Mirror& mirror, const nb::list& leaves, Address slots, Address pick, std::int64_t n,
                 const nb::list& outs) {
    std::vector<std::size_t> which;
    for (const Address leaf : to_addresses(leaves)) which.push_back(leaf);
    const auto to = to_addresses(outs);
    for (const Address out : to) require_address(out, n > 0, "outs");
    const auto* chosen = items_at<const std::int64_t>(slots, n, "slots");
    run_bytes(mirror.row_bytes(), n,
              [&] { mirror.read(which, chosen, at_address<const Byte>(pick), n, to); });
}

void mirror_chunk(Mirror& mirror, const nb::list& bases) { mirror.add_chunk(to_addresses(bases)); }

// The sum tree. Few leaves are done before the interpreter lock would be back.
constexpr std::int64_t kReleaseLeaves = 1024;

template <typename Work>
void run_tree(std::int64_t n, Work work) {
    std::optional<nb::gil_scoped_release> unlocked;
    if (n >= kReleaseLeaves) unlocked.emplace();
    work();
}

void tree_set(SumTree& tree, Address slots, Address values, std::int64_t n) {
    const auto* at = items_at<const std::int64_t>(slots, n, "slots");
    const auto* numbers = items_at<const double>(values, n, "values");
    run_tree(n, [&] { tree.set(at, numbers, n); });
}

void tree_set_run(SumTree& tree, std::int64_t start, std::int64_t count, double value) {
    run_tree(count, [&] { tree.set_run(start, count, value); });
}

void tree_get(const SumTree& tree, Address slots, std::int64_t n, Address out) {
    const auto* at = items_at<const std::int64_t>(slots, n, "slots");
    auto* numbers = items_at<double>(out, n, "out");
    run_tree(n, [&] { tree.get(at, n, numbers); });
}

void tree_draw(const SumTree& tree, Address uniforms, std::int64_t n, Address slots, Address values) {
    const auto* numbers = items_at<const double>(uniforms, n, "uniforms");
    auto* drawn = items_at<std::int64_t>(slots, n, "slots");
    auto* found = items_at<double>(values, n, "values");
    run_tree(n, [&] { tree.draw(numbers, n, drawn, found); });
}

void tree_clear(SumTree& tree) {
    run_tree(tree.capacity(), [&] { tree.clear(); });
}

void tree_leaves(const SumTree& tree, Address out, std::int64_t n) {
    auto* numbers = items_at<double>(out, n, "out");
    run_tree(n, [&] { tree.copy_to(numbers, n); });
}

void tree_load(SumTree& tree, Address values, std::int64_t n) {
    const auto* numbers = items_at<const double>(values, n, "values");
    run_tree(tree.capacity(), [&] { tree.load(numbers, n); });
}

Stamps to_stamps(const nb::tuple& numbers) {
    if (numbers.size() != 6) throw nb::value_error("stamps must be six numbers");
    const auto number = [&numbers](std::size_t i) { return nb::cast<std::int64_t>(numbers[i]); };
    return {items_at<const std::int64_t>(to_address(numbers[0].ptr()), number(1), "stamps"),
            number(1),
            number(2),
            number(3),
            number(4),
            number(5)};
}

void tree_sample(const SumTree& tree, Address uniforms, std::int64_t n, double beta, const nb::tuple& stamps,
                 Address slots, Address weights, bool single, Address out) {
    if (n < 0) throw std::invalid_argument("n must be at least 0, got " + std::to_string(n));
    const Stamps known = to_stamps(stamps);
    const auto* numbers = items_at<const double>(uniforms, n, "uniforms");
    auto* drawn = items_at<std::int64_t>(slots, n, "slots");
    auto* given = items_at<std::int64_t>(out, n, "out");
    require_address(weights, n > 0, "weights");
    run_tree(n, [&] {
        if (single) {
            sample(tree, numbers, n, beta, known, drawn, at_address<float>(weights), given);
        } else {
            sample(tree, numbers, n, beta, known, drawn, at_address<double>(weights), given);
        }
    });
}

nb::tuple tree_learn(SumTree& tree, Address slots, Address values, bool single, std::int64_t n, Address given,
                     const nb::tuple& stamps, Address priorities, Address hidden, std::int64_t rows,
                     double eps, double alpha, bool within) {
    if (n < 0) throw std::invalid_argument("n must be at least 0, got " + std::to_string(n));
    if (rows < 0 || rows > tree.capacity()) {
        throw std::invalid_argument("rows must be in [0, " + std::to_string(tree.capacity()) + "], got " +
                                    std::to_string(rows));
    }
    const Stamps known = to_stamps(stamps);
    const Ranks ranks{items_at<double>(priorities, rows, "priorities"),
                      at_address<const unsigned char>(hidden), rows, eps, alpha};
    const auto* at = items_at<const std::int64_t>(slots, n, "slots");
    const auto* old = at_address<const std::int64_t>(given);
    require_address(values, n > 0, "values");
    Learned learned;
    run_tree(n, [&] {
        if (single) {
            learned = Update(tree, ranks, at, at_address<const float>(values), n).run(old, known, within);
        } else {
            learned = Update(tree, ranks, at, at_address<const double>(values), n).run(old, known, within);
        }
    });
    return nb::make_tuple(learned.stale, learned.given, learned.gone, learned.left);
}

}  // namespace
}  // namespace ostinato

NB_MODULE(_native, m) {
    // a thread that runs until the process ends, such as one that saves, keeps its objects: no leak of ours
    nb::set_leak_warnings(false);
    m.doc() = "Batched copies between storages and batches: numbers in and out only, memory as addresses.";
    nb::class_<ostinato::Fields>(m, "Fields", "The fields of a storage, registered once.")
        .def(nb::init<>())
        .def("add", &ostinato::add, "segments"_a, "row_bytes"_a, "stride"_a)
        .def("gather", &ostinato::gather, "indices"_a, "n"_a, "outs"_a)
        .def("gather_each", &ostinato::gather_each, "indices"_a, "counts"_a, "outs"_a)
        .def("write_run", &ostinato::write_run, "start"_a, "n"_a, "skip"_a, "srcs"_a)
        .def("scatter", &ostinato::scatter, "slots"_a, "rows"_a, "n"_a, "srcs"_a)
        .def_prop_ro("count", &ostinato::Fields::count)
        .def_prop_ro("rows", &ostinato::Fields::rows);
    m.def("advise_huge_pages", &ostinato::advise, "address"_a, "nbytes"_a);
    m.def("choose_slots", &ostinato::choose, "slots"_a, "pick"_a, "n"_a, "rows"_a, "out"_a);
    m.def("check_leaves", &ostinato::check_leaves, "values"_a, "dtypes"_a, "shapes"_a, "tensor_type"_a);
#if defined(OSTINATO_HAS_PIECES)
    m.def("read_pieces", &ostinato::read, "fds"_a, "offsets"_a, "widths"_a, "targets"_a, "n"_a, "gap"_a);
#endif
    m.def("shuffle_draw", &ostinato::draw, "perm"_a, "first"_a, "total"_a, "k"_a, "randoms"_a, "out"_a);
    ostinato::episodes::bind(m);
    ostinato::steps::bind(m);
    nb::class_<ostinato::Mirror>(m, "Mirror", "Next observations that are stored once.")
        .def(nb::init<std::int64_t, std::int64_t, std::int64_t, ostinato::Address>(), "capacity"_a, "lanes"_a,
             "chunk_rows"_a, "apart"_a)
        .def("add_group", &ostinato::Mirror::add_group, "base"_a, "stride"_a, "nbytes"_a)
        .def("add_leaf", &ostinato::Mirror::add_leaf, "group"_a, "offset"_a, "nbytes"_a)
        .def("add_chunk", &ostinato::mirror_chunk, "bases"_a)
        .def("guard", &ostinato::Mirror::guard, "base"_a, "nbytes"_a)
        .def("clear", &ostinato::Mirror::clear)
        .def("compare", &ostinato::mirror_compare, "cursor"_a, "n"_a, "obs"_a, "nexts"_a, "agree"_a,
             "relink"_a)
        .def("detach_run", &ostinato::Mirror::detach_run, "start"_a, "n"_a, "spare"_a)
        .def("link_run", &ostinato::mirror_link, "start"_a, "n"_a, "skip"_a, "nexts"_a, "agree"_a, "relink"_a)
        .def("put_rows", &ostinato::mirror_put, "slots"_a, "n"_a, "nexts"_a)
        .def("drop_rows", &ostinato::mirror_drop, "slots"_a, "n"_a)
        .def("read", &ostinato::mirror_read, "leaves"_a, "slots"_a, "pick"_a, "n"_a, "outs"_a)
        .def_prop_ro("room", &ostinato::Mirror::room)
        .def_prop_ro("used", &ostinato::Mirror::used)
        .def_prop_ro("nbytes", &ostinato::Mirror::nbytes);
    nb::class_<ostinato::SumTree>(m, "SumTree", "Priorities of slots, drawn in proportion.")
        .def(nb::init<std::int64_t>(), "capacity"_a)
        .def("set", &ostinato::tree_set, "slots"_a, "values"_a, "n"_a)
        .def("set_run", &ostinato::tree_set_run, "start"_a, "count"_a, "value"_a)
        .def("get", &ostinato::tree_get, "slots"_a, "n"_a, "out"_a)
        .def("draw", &ostinato::tree_draw, "uniforms"_a, "n"_a, "slots"_a, "values"_a)
        .def("sample", &ostinato::tree_sample, "uniforms"_a, "n"_a, "beta"_a, "stamps"_a, "slots"_a,
             "weights"_a, "single"_a, "out"_a)
        .def("learn", &ostinato::tree_learn, "slots"_a, "values"_a, "single"_a, "n"_a, "given"_a, "stamps"_a,
             "priorities"_a, "hidden"_a, "rows"_a, "eps"_a, "alpha"_a, "within"_a)
        .def("clear", &ostinato::tree_clear)
        .def("leaves", &ostinato::tree_leaves, "out"_a, "n"_a)
        .def("load", &ostinato::tree_load, "values"_a, "n"_a)
        .def_prop_ro("capacity", &ostinato::SumTree::capacity)
        .def_prop_ro("nbytes", &ostinato::SumTree::nbytes)
        .def_prop_ro("total", &ostinato::SumTree::total)
        .def_prop_ro("minimum", &ostinato::SumTree::minimum)
        .def_prop_ro("maximum", &ostinato::SumTree::maximum);
#if defined(OSTINATO_HAS_SHARED)
    ostinato::shared::bind(m);
#endif
}
