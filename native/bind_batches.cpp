// Python bindings of batches: gathers that return tensors, or fill those of the caller.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "batches.hpp"
#include "bindings.hpp"
#include "block_pool.hpp"
#include "exchange.hpp"

namespace ostinato {
namespace {

using namespace nb::literals;

using TensorList = nb::typed<nb::list, nb::object>;

void open_exchange(nb::object tensor_type, nb::object capsule) {
    Exchange::torch().open(tensor_type, capsule);
}

nb::list as_list(std::vector<nb::object>& tensors) {
    nb::list list;
    for (nb::object& tensor : tensors) list.append(std::move(tensor));
    return list;
}

TensorList gather(const Batches& batches, nb::object slots) {
    std::int64_t n = 0;
    const std::int64_t* const at = slots_of(slots, n);
    NewBatch batch = batches.make({n});
    batches.copy({at}, {n}, batch.addresses);
    return nb::borrow<TensorList>(as_list(batch.tensors));
}

TensorList gather_each(const Batches& batches, const nb::list& slots) {
    std::vector<const std::int64_t*> at;
    std::vector<std::int64_t> counts;
    for (nb::handle tensor : slots) {
        std::int64_t n = 0;
        at.push_back(slots_of(tensor, n));
        counts.push_back(n);
    }
    NewBatch batch = batches.make(counts);
    batches.copy(at, counts, batch.addresses);
    return nb::borrow<TensorList>(as_list(batch.tensors));
}

std::vector<nb::object> as_objects(const nb::list& tensors) {
    std::vector<nb::object> objects;
    for (nb::handle tensor : tensors) objects.push_back(nb::borrow(tensor));
    return objects;
}

void gather_into(const Batches& batches, nb::object slots, const nb::list& outs) {
    std::int64_t n = 0;
    const std::int64_t* const at = slots_of(slots, n);
    batches.copy({at}, {n}, batches.addresses(as_objects(outs), n));
}

void check_outs(const Batches& batches, const nb::list& outs, std::int64_t n) {
    (void)batches.addresses(as_objects(outs), n);
}

std::size_t kept_bytes() { return BlockPool::shared().kept_bytes(); }

constexpr const char* kBatchesDoc = R"(
    Gathers rows of fields into tensors `[n, *shape]`. Thread-safe.

    Args:
        fields: The fields.
        columns: A tensor `[rows, *shape]` for each field, which tells its dtype and shape.

    Raises:
        ValueError: A column is not plain memory on the CPU.
)";

constexpr const char* kGatherDoc = R"(
    Copy rows to new contiguous tensors, one for each field.

    Args:
        slots: int64 `[n]`, contiguous.

    Raises:
        IndexError: A slot is outside the fields; nothing was read.
        ValueError: The slots are of another form.
)";

constexpr const char* kGatherEachDoc = R"(
    Copy rows as `gather` does, with one tensor of slots for each field.
)";

constexpr const char* kGatherIntoDoc = R"(
    Copy rows to the tensors of the caller, in the order of the fields.

    Raises:
        IndexError: A slot is outside the fields; nothing was written.
        ValueError: See `check_outs`; nothing was written.
)";

constexpr const char* kCheckOutsDoc = R"(
    Check that tensors can take `n` rows: dtype, shape, contiguity, memory of their own.

    Raises:
        ValueError: `position:reason` for the first that cannot.
)";

}  // namespace

void bind_batches(nb::module_& m) {
    m.def("open_exchange", &open_exchange, "tensor_type"_a, "capsule"_a,
          nb::sig("def open_exchange(tensor_type: type, capsule: object) -> None"),
          "Use the C exchange API of torch, `torch.Tensor.__dlpack_c_exchange_api__`.");
    m.def("kept_bytes", &kept_bytes, "Bytes of dropped batches that are kept for later ones.");
    nb::class_<Batches>(m, "Batches", kBatchesDoc)
        .def(nb::init<nb::object, const nb::list&>(), "fields"_a, "columns"_a,
             nb::sig("def __init__(self, fields: Fields, columns: list[typing.Any]) -> None"))
        .def("gather", &gather, "slots"_a, nb::sig("def gather(self, slots: typing.Any) -> list[typing.Any]"),
             kGatherDoc)
        .def("gather_each", &gather_each, "slots"_a,
             nb::sig("def gather_each(self, slots: list[typing.Any]) -> list[typing.Any]"), kGatherEachDoc)
        .def("gather_into", &gather_into, "slots"_a, "outs"_a,
             nb::sig("def gather_into(self, slots: typing.Any, outs: list[typing.Any]) -> None"),
             kGatherIntoDoc)
        .def("check_outs", &check_outs, "outs"_a, "n"_a,
             nb::sig("def check_outs(self, outs: list[typing.Any], n: int) -> None"), kCheckOutsDoc);
}

}  // namespace ostinato
