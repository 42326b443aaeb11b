// The fast check of tensors that are about to be written: a few attributes tell whether a tensor is plain
// memory of the expected dtype and shape. It looks attributes up by name on the tensor type, and so needs no
// torch headers.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>

namespace ostinato {

namespace nb = nanobind;

/// The attributes of one tensor type, looked up once. (Looking them up by interned names in each call made
/// the check a tenth slower.)
class TensorAttributes {
public:
    explicit TensorAttributes(nb::handle type)
        : type_(nb::borrow(type)),
          is_cpu_(type, "is_cpu"),
          requires_grad_(type, "requires_grad"),
          dtype_(type, "dtype"),
          shape_(type, "shape"),
          is_neg_(type.attr("is_neg")),
          is_contiguous_(type.attr("is_contiguous")),
          data_ptr_(type.attr("data_ptr")) {}

    bool belong_to(nb::handle type) const { return type.is(type_); }

    /// The address of a tensor that is plain memory of this dtype and shape, else an invalid object. Raises
    /// what the tensor raises.
    nb::object address(nb::handle tensor, nb::handle dtype, nb::handle shape) const {
        const bool plain = is_cpu_.get(tensor).is(Py_True) && requires_grad_.get(tensor).is(Py_False) &&
                           call(is_neg_, tensor).is(Py_False) && dtype_.get(tensor).is(dtype) &&
                           equal(shape_.get(tensor), shape) && call(is_contiguous_, tensor).is(Py_True);
        return plain ? call(data_ptr_, tensor) : nb::object();
    }

private:
    /// An attribute of a type, read through its descriptor.
    class Attribute {
    public:
        Attribute(nb::handle type, const char* name)
            : descriptor_(type.attr(name)),
              get_(reinterpret_cast<descrgetfunc>(
                  PyType_GetSlot(Py_TYPE(descriptor_.ptr()), Py_tp_descr_get))) {
            if (get_ == nullptr) throw nb::type_error("tensor_type must have the attributes of a tensor");
        }

        nb::object get(nb::handle self) const {
            return owned(
                get_(descriptor_.ptr(), self.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(self.ptr()))));
        }

    private:
        nb::object descriptor_;
        descrgetfunc get_;
    };

    static nb::object owned(PyObject* result) {
        if (result == nullptr) throw nb::python_error();
        return nb::steal(result);
    }

    static nb::object call(const nb::object& method, nb::handle self) {
        std::array<PyObject*, 2> arguments{nullptr,
                                           self.ptr()};  // a free entry before the first one saves a copy
        return owned(PyObject_Vectorcall(method.ptr(), arguments.data() + 1,
                                         1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    }

    static bool equal(const nb::object& a, nb::handle b) {
        const int same = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
        if (same < 0) throw nb::python_error();
        return same == 1;
    }

    nb::object type_;
    Attribute is_cpu_, requires_grad_, dtype_, shape_;
    nb::object is_neg_, is_contiguous_, data_ptr_;
};

}  // namespace ostinato
