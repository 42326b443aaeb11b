// Rows that a caller writes: tensors, NumPy arrays and numbers, each read in place where its bytes are those
// that are stored.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "exchange.hpp"
#include "memory.hpp"

namespace ostinato {

/// The memory of one field of the rows given. What it refers to stays alive until `release`.
class GivenField {
public:
    GivenField() = default;
    GivenField(const GivenField&) = delete;
    GivenField& operator=(const GivenField&) = delete;
    GivenField(GivenField&&) = delete;
    GivenField& operator=(GivenField&&) = delete;
    ~GivenField() { release(); }

    void release() {
        if (held_) PyBuffer_Release(&buffer_);
        held_ = false;
        if (rounded_.capacity() > kKeptItems) rounded_ = {};
    }

    /// Sizes of the first dimensions of a batch; -1 where any is right, which is set then.
    using Lead = std::vector<std::int64_t>;

    /// Read a field `[*lead, *form.shape]`. False if it has to be converted, or does not fit: nothing is
    /// known then, and no error is set. The caller has checked the sign of a tensor of floats.
    bool read(nb::handle value, const Form& form, Lead& lead, nb::handle array_type, nb::handle number_type) {
        if (Exchange::torch().is_tensor(value)) return read_tensor(value, form, lead);
        if (value.type().is(array_type)) return read_buffer(value, form, lead);
        if (!lead.empty() || !form.shape.empty()) return false;
        if (PyFloat_CheckExact(value.ptr()) || PyLong_CheckExact(value.ptr()) || PyBool_Check(value.ptr()))
            return read_number(value, form);
        const int is_number = PyObject_IsInstance(value.ptr(), number_type.ptr());
        if (is_number < 0) PyErr_Clear();  // of a property `__class__`
        return is_number == 1 && read_buffer(value, form, lead);
    }

    const Byte* address() const { return address_; }

private:
    /// `shape` has at least as many dimensions as `lead`.
    template <typename Size>
    static bool takes(Lead& lead, const Size* shape) {
        for (std::size_t i = 0; i < lead.size(); ++i) {
            if (lead[i] < 0) lead[i] = shape[i];
            if (lead[i] != shape[i]) return false;
        }
        return true;
    }

    bool read_tensor(nb::handle value, const Form& form, Lead& lead) {
        dlpack::Tensor view{};
        if (!Exchange::torch().view_unsigned(value, view) ||
            !form.fits(view, static_cast<std::int32_t>(lead.size())))
            return false;
        if (!takes(lead, view.shape) || !Exchange::is_contiguous(view)) return false;
        address_ = Exchange::data_of(view);
        return true;
    }

    bool read_buffer(nb::handle value, const Form& form, Lead& lead) {
        if (PyObject_GetBuffer(value.ptr(), &buffer_, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
            PyErr_Clear();
            return false;
        }
        held_ = true;
        const dlpack::DataType given = dtype_of(buffer_);
        if (buffer_.ndim != static_cast<std::int32_t>(lead.size() + form.shape.size())) return false;
        for (std::size_t i = 0; i < form.shape.size(); ++i) {
            if (buffer_.shape[lead.size() + i] != form.shape[i]) return false;
        }
        if (!takes(lead, buffer_.shape) || buffer_.buf == nullptr || buffer_.len == 0) return false;
        if (PyBuffer_IsContiguous(&buffer_, 'C') == 0) return false;
        address_ = static_cast<const Byte*>(buffer_.buf);
        if (given == form.dtype) return true;
        return given == kDouble && form.dtype == kSingle && round_to_single();
    }

    /// The dtype of a buffer in the byte order of the machine; no lanes for another one.
    static dlpack::DataType dtype_of(const Py_buffer& buffer) {
        const auto bits = static_cast<std::uint8_t>(buffer.itemsize * 8);
        const char* const format = buffer.format == nullptr ? "B" : buffer.format;
        if (format[0] == '\0') return {};
        if (format[0] == 'Z' && (format[1] == 'f' || format[1] == 'd') && format[2] == '\0')
            return {dlpack::kComplex, bits, 1};
        if (format[1] != '\0') return {};
        switch (format[0]) {
            case '?': return {dlpack::kBool, bits, 1};
            case 'b':
            case 'h':
            case 'i':
            case 'l':
            case 'q': return {dlpack::kInt, bits, 1};
            case 'B':
            case 'H':
            case 'I':
            case 'L':
            case 'Q': return {dlpack::kUInt, bits, 1};
            case 'e':
            case 'f':
            case 'd': return {dlpack::kFloat, bits, 1};
            default: return {};
        }
    }

    /// Round float64 to float32, as torch does. False if a finite number would become infinite.
    bool round_to_single() {
        const auto count = static_cast<std::size_t>(buffer_.len) / sizeof(double);
        rounded_.resize(count);
        bool finite = true;
        for (std::size_t i = 0; i < count; ++i) {
            double number = 0;
            std::memcpy(&number, address_ + i * sizeof(double), sizeof(double));
            rounded_[i] = static_cast<float>(number);
            finite &= std::isfinite(number) ? std::isfinite(rounded_[i]) : true;
        }
        address_ = reinterpret_cast<const Byte*>(rounded_.data());
        return finite;
    }

    bool read_number(nb::handle value, const Form& form) {
        address_ = number_.data();
        if (PyFloat_CheckExact(value.ptr())) return store_float(PyFloat_AsDouble(value.ptr()), form.dtype);
        int overflow = 0;
        const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
        return overflow == 0 && store_integer(number, form.dtype);
    }

    bool store_float(double number, dlpack::DataType dtype) {
        if (dtype == kDouble) return store(number);
        if (!(dtype == kSingle)) return false;
        if (std::isfinite(number) && std::abs(number) > std::numeric_limits<float>::max()) return false;
        return store(static_cast<float>(number));
    }

    bool store_integer(std::int64_t number, dlpack::DataType dtype) {
        if (dtype == kDouble)
            return std::abs(number) <= (std::int64_t{1} << 53) && store(static_cast<double>(number));
        if (dtype == kSingle)
            return std::abs(number) <= (std::int64_t{1} << 24) && store(static_cast<float>(number));
        if (dtype.code == dlpack::kBool)
            return (number == 0 || number == 1) && store(static_cast<Flag>(number));
        if (dtype.code == dlpack::kInt) {
            switch (dtype.bits) {
                case 8: return store_within<std::int8_t>(number);
                case 16: return store_within<std::int16_t>(number);
                case 32: return store_within<std::int32_t>(number);
                case 64: return store(number);
                default: return false;
            }
        }
        return dtype == dlpack::DataType{dlpack::kUInt, 8, 1} && store_within<std::uint8_t>(number);
    }

    template <typename T>
    bool store_within(std::int64_t number) {
        const bool fits = number >= std::numeric_limits<T>::min() && number <= std::numeric_limits<T>::max();
        return fits && store(static_cast<T>(number));
    }

    template <typename T>
    bool store(T number) {
        std::memcpy(number_.data(), &number, sizeof(T));
        return true;
    }

    static constexpr dlpack::DataType kDouble{dlpack::kFloat, 64, 1};
    static constexpr dlpack::DataType kSingle{dlpack::kFloat, 32, 1};
    static constexpr std::size_t kKeptItems = std::size_t{1} << 16;  // of `rounded_`, for the next rows

    const Byte* address_ = nullptr;
    alignas(8) std::array<Byte, 8> number_{};
    std::vector<float> rounded_;
    Py_buffer buffer_{};
    bool held_ = false;
};

}  // namespace ostinato
