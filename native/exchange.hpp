// Tensors of torch through its DLPack C exchange API: address, shape and dtype of a tensor without Python
// attributes, and new tensors on memory of a BlockPool. libtorch is not linked.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "block_pool.hpp"
#include "dlpack.hpp"
#include "memory.hpp"

namespace ostinato {

namespace nb = nanobind;

/// Row shape and dtype of a field.
struct Form {
    dlpack::DataType dtype{};
    std::vector<std::int64_t> shape;  // without rows

    std::int64_t items() const {
        return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    }

    std::size_t row_bytes() const { return static_cast<std::size_t>(items()) * dtype.bits / 8; }

    /// Whether a tensor has this dtype, and this shape after `lead` dimensions.
    bool fits(const dlpack::Tensor& tensor, std::int32_t lead) const {
        if (!(tensor.dtype == dtype) || tensor.ndim != lead + static_cast<std::int32_t>(shape.size()))
            return false;
        for (std::size_t i = 0; i < shape.size(); ++i) {
            if (tensor.shape[static_cast<std::size_t>(lead) + i] != shape[i]) return false;
        }
        return true;
    }
};

/// A new tensor, and its memory.
struct NewTensor {
    nb::object object;
    Byte* data;
};

/// The functions of `torch.Tensor.__dlpack_c_exchange_api__`; without it (before torch 2.10) `available()` is
/// false, and the other functions must not be called.
class Exchange {
public:
    /// The exchange of the process.
    static Exchange& torch() {
        static auto& exchange = *new Exchange();
        return exchange;
    }

    /// Take the functions over. Raises std::invalid_argument if the capsule is of another kind or version.
    void open(nb::handle tensor_type, nb::handle capsule) {
        const auto* api = static_cast<const dlpack::ExchangeApi*>(
            PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        if (api == nullptr) throw nb::python_error();
        while (api != nullptr && api->version.major > dlpack::kMajor) api = api->previous;
        if (api == nullptr || api->version.major != dlpack::kMajor || api->view_object == nullptr) {
            throw std::invalid_argument("torch offers no DLPack exchange of version 1");
        }
        tensor_type_ = nb::borrow(tensor_type);
        is_neg_ = tensor_type.attr("is_neg");
        api_ = api;
    }

    bool available() const { return api_ != nullptr; }

    /// Whether an object is exactly a torch.Tensor, of no subclass.
    bool is_tensor(nb::handle object) const { return object.type().is(tensor_type_); }

    /// Describe a tensor on the CPU. False, without an error, if it is on another device, has no plain memory
    /// (sparse, nested, fake), or has a negative bit that its bytes do not show.
    bool view(nb::handle tensor, dlpack::Tensor& out) const {
        return view_unsigned(tensor, out) && (out.dtype.code != dlpack::kFloat || has_plain_sign(tensor));
    }

    /// As `view`, of a tensor whose sign the caller has checked, if it is one of floats. Keeps the
    /// interpreter lock.
    bool view_unsigned(nb::handle tensor, dlpack::Tensor& out) const {
        if (api_->view_object(tensor.ptr(), &out) != 0) {
            PyErr_Clear();
            return false;
        }
        return is_host(out.device.type) && out.dtype.lanes == 1 && out.dtype.code != dlpack::kComplex;
    }

    /// Whether the bytes of a tensor are its elements: it has no negative bit. Releases the interpreter lock.
    bool has_plain_sign(nb::handle tensor) const {
        PyObject* const argument = tensor.ptr();  // PyObject_CallOneArg is not in the stable ABI
        PyObject* const result = PyObject_Vectorcall(is_neg_.ptr(), &argument, 1, nullptr);
        if (result == nullptr) throw nb::python_error();
        return nb::steal(result).is(Py_False);
    }

    /// Whether a tensor's elements lie one after the other, in memory.
    static bool is_contiguous(const dlpack::Tensor& tensor) {
        std::int64_t step = 1;
        for (std::int32_t i = tensor.ndim; i-- > 0;) {
            if (tensor.shape[i] != 1 && tensor.strides[i] != step) return false;
            step *= tensor.shape[i];
        }
        return tensor.data != nullptr && step > 0;
    }

    static Byte* data_of(const dlpack::Tensor& tensor) {
        return static_cast<Byte*>(tensor.data) + tensor.byte_offset;
    }

    /// Allocate a contiguous tensor `[rows, *form.shape]`, uninitialized. Its memory returns to the pool when
    /// torch drops the last reference, views included.
    NewTensor make(const Form& form, std::int64_t rows) const {
        const std::size_t ndim = form.shape.size() + 1;
        const std::size_t header = (sizeof(Owned) + 2 * ndim * sizeof(std::int64_t) + 63) / 64 * 64;
        const std::size_t bytes = header + form.row_bytes() * static_cast<std::size_t>(rows);
        auto* const block = static_cast<Byte*>(BlockPool::shared().take(bytes));
        auto* const owned = new (block) Owned();
        auto* const shape = reinterpret_cast<std::int64_t*>(block + sizeof(Owned));
        shape[0] = rows;
        std::copy(form.shape.begin(), form.shape.end(), shape + 1);
        std::int64_t* const strides = shape + ndim;
        std::int64_t step = 1;
        for (std::size_t i = ndim; i-- > 0; step *= shape[i]) strides[i] = step;
        owned->bytes = bytes;
        owned->managed = {{dlpack::kMajor, 0},
                          nullptr,
                          &drop,
                          0,
                          {block + header,
                           {dlpack::kCpu, 0},
                           static_cast<std::int32_t>(ndim),
                           form.dtype,
                           shape,
                           strides,
                           0}};
        void* object = nullptr;
        if (api_->to_object(&owned->managed, &object) != 0) throw nb::python_error();
        return {nb::steal(static_cast<PyObject*>(object)), block + header};
    }

private:
    /// The head of a block: what torch gets, followed by shape and strides, then by the elements.
    struct Owned {
        dlpack::ManagedTensor managed;
        std::size_t bytes;
    };

    static void drop(dlpack::ManagedTensor* managed) noexcept {
        auto* const owned = reinterpret_cast<Owned*>(managed);
        BlockPool::shared().give(owned, owned->bytes);
    }

    static bool is_host(std::int32_t device) {
        return device == dlpack::kCpu || device == dlpack::kCudaHost || device == dlpack::kRocmHost;
    }

    const dlpack::ExchangeApi* api_ = nullptr;
    nb::object tensor_type_;
    nb::object is_neg_;
};

/// The forms of tensors `[rows, *shape]`. Raises std::invalid_argument if one is not memory of the CPU.
inline std::vector<Form> forms_of(const nb::list& tensors) {
    std::vector<Form> forms;
    for (nb::handle tensor : tensors) {
        dlpack::Tensor view{};
        if (!Exchange::torch().view(tensor, view) || view.ndim < 1)
            throw std::invalid_argument("columns and templates must be tensors [rows, *shape] on the CPU");
        forms.push_back({view.dtype, {view.shape + 1, view.shape + view.ndim}});
    }
    return forms;
}

}  // namespace ostinato
