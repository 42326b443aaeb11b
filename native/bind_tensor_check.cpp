// Python binding of the fast check of tensors that are about to be written.
#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>

#include "bindings.hpp"
#include "pointers.hpp"
#include "tensor_check.hpp"

namespace ostinato {
namespace {

using namespace nb::literals;

/// An item of a list that Python code may have shortened during the call.
nb::object item_of(const nb::list& list, std::size_t i) {
    PyObject* found = PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(i));
    if (found == nullptr) throw nb::python_error();
    return nb::borrow(found);
}

/// The attributes of the last tensor type. A call holds its own reference: torch may run Python code in
/// between.
std::shared_ptr<const TensorAttributes> attributes_of(nb::handle type) {
    // never freed: the interpreter is gone before static objects are destroyed
    static auto& last = *new std::shared_ptr<const TensorAttributes>();
    static auto& mutex = *new nb::ft_mutex();
    const nb::ft_lock_guard guard(mutex);
    if (last == nullptr || !last->belong_to(type)) last = std::make_shared<const TensorAttributes>(type);
    return last;
}

nb::object check_leaves(const nb::list& values, const nb::list& dtypes, const nb::list& shapes,
                        nb::type_object tensor_type) {
    const std::size_t count = values.size();
    if (dtypes.size() != count || shapes.size() != count) {
        throw nb::value_error("values, dtypes and shapes must have the same length");
    }
    const std::shared_ptr<const TensorAttributes> attributes = attributes_of(tensor_type);
    try {
        nb::list addresses;
        for (std::size_t i = 0; i < count; ++i) {
            const nb::object value = item_of(values, i);
            if (!value.type().is(tensor_type)) return nb::none();
            const nb::object address = attributes->address(value, item_of(dtypes, i), item_of(shapes, i));
            void* memory = nullptr;
            if (!address.is_valid() || !load_address(address, memory) || memory == nullptr) return nb::none();
            addresses.append(address);
        }
        return addresses;
    } catch (const nb::python_error& error) {  // tensors without plain memory raise
        if (!error.matches(PyExc_Exception)) throw;
        return nb::none();
    }
}

constexpr const char* kCheckLeavesDoc = R"(
    Return the addresses of tensors that are plain memory of the expected dtypes and shapes.

    Plain means: exactly `tensor_type` (no subclass), on the CPU, contiguous, without gradient and without a
    negative bit. The conjugate bit is not checked: complex tensors must not be passed.

    Args:
        values: The tensors.
        dtypes: The expected dtype of each.
        shapes: The expected shape of each; identical `torch.Size` objects compare fastest.
        tensor_type: `torch.Tensor`.

    Returns:
        The addresses. None if any value is not plain, has another dtype or shape, has no memory (address 0:
        empty tensors too) or raises; None does not say which.

    Raises:
        ValueError: The lists differ in length.
        AttributeError: `tensor_type` lacks an attribute of tensors.
        TypeError: `tensor_type` is no type, or its attributes are not those of tensors.
)";

}  // namespace

void bind_tensor_check(nb::module_& m) {
    m.def(
        "check_leaves", &check_leaves, "values"_a, "dtypes"_a, "shapes"_a, "tensor_type"_a,
        nb::sig(
            "def check_leaves(values: list[typing.Any], dtypes: list[typing.Any], shapes: list[typing.Any], "
            "tensor_type: type) -> list[int] | None"),
        kCheckLeavesDoc);
}

}  // namespace ostinato
