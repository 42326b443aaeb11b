// Typed pointers as arguments of Python functions. Python passes the address of a tensor,
// `tensor.data_ptr()`; C++ gets a `Pointer<T>`, whose type is that of the elements. Memory enters only here.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "memory.hpp"

namespace ostinato {

namespace nb = nanobind;

/// Memory of `T` in a call from Python. Python has checked dtype, contiguity, device and lifetime; whether
/// the address is null is checked when the memory is taken.
template <typename T>
class Pointer {
public:
    Pointer() = default;
    explicit Pointer(T* address) : address_(address) {}

    /// The memory of `count` elements. Raises std::invalid_argument if there are some and the address is
    /// null.
    T* items(std::int64_t count, const char* name) const {
        require_address(address_, count > 0, name);
        return address_;
    }

    /// The memory of an optional argument, or null.
    T* or_null() const { return address_; }

private:
    T* address_ = nullptr;
};

/// Memory of floating-point numbers whose dtype another argument selects.
class FloatPointer {
public:
    FloatPointer() = default;
    explicit FloatPointer(void* address) : address_(address) {}

    /// The memory of `count` elements of type `T`, with the check of Pointer::items.
    template <typename T>
    T* items(std::int64_t count, const char* name) const {
        require_address(address_, count > 0, name);
        return static_cast<T*>(address_);
    }

private:
    void* address_ = nullptr;
};

/// One address for each field, from a Python list.
template <typename T>
struct Pointers : std::vector<T*> {};

/// The names that the stub has for addresses, by the type of the elements.
template <typename T>
constexpr auto address_name() {
    if constexpr (std::is_same_v<T, std::int64_t>) {
        return nb::detail::const_name("Int64Address");
    } else if constexpr (std::is_same_v<T, std::int32_t>) {
        return nb::detail::const_name("Int32Address");
    } else if constexpr (std::is_same_v<T, double>) {
        return nb::detail::const_name("Float64Address");
    } else if constexpr (std::is_same_v<T, float>) {
        return nb::detail::const_name("Float32Address");
    } else if constexpr (std::is_same_v<T, Flag>) {
        return nb::detail::const_name("BoolAddress");
    } else if constexpr (std::is_same_v<T, Byte*>) {
        return nb::detail::const_name("AddressArray");
    } else {
        static_assert(std::is_same_v<T, Byte>, "give addresses of this type a name in the stub");
        return nb::detail::const_name("RowsAddress");
    }
}

/// Convert what Python passes for memory to an address. False if it is not an address.
inline bool load_address(nb::handle source, void*& address) noexcept {
    const unsigned long long number = PyLong_AsUnsignedLongLong(source.ptr());
    if (number == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        return false;
    }
    address = reinterpret_cast<void*>(static_cast<std::uintptr_t>(number));
    return true;
}

}  // namespace ostinato

namespace nanobind::detail {

template <typename T>
struct type_caster<ostinato::Pointer<T>> {
    NB_TYPE_CASTER(ostinato::Pointer<T>, ostinato::address_name<std::remove_const_t<T>>())

    bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept {
        void* address = nullptr;
        if (!ostinato::load_address(source, address)) return false;
        value = ostinato::Pointer<T>(static_cast<T*>(address));
        return true;
    }

    static handle from_cpp(ostinato::Pointer<T> pointer, rv_policy, cleanup_list*) noexcept {
        return PyLong_FromVoidPtr(const_cast<std::remove_const_t<T>*>(pointer.or_null()));
    }
};

template <>
struct type_caster<ostinato::FloatPointer> {
    NB_TYPE_CASTER(ostinato::FloatPointer, const_name("FloatAddress"))

    bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept {
        void* address = nullptr;
        if (!ostinato::load_address(source, address)) return false;
        value = ostinato::FloatPointer(address);
        return true;
    }
};

template <typename T>
struct type_caster<ostinato::Pointers<T>> {
    NB_TYPE_CASTER(ostinato::Pointers<T>,
                   const_name("list[") + ostinato::address_name<std::remove_const_t<T>>() + const_name("]"))

    bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept {
        if (!PyList_Check(source.ptr())) return false;
        const auto count = static_cast<std::size_t>(PyList_Size(source.ptr()));
        value.resize(count);
        for (std::size_t i = 0; i < count; ++i) {
            void* address = nullptr;
            if (!ostinato::load_address(PyList_GetItem(source.ptr(), static_cast<Py_ssize_t>(i)), address))
                return false;
            value[i] = static_cast<T*>(address);
        }
        return true;
    }
};

}  // namespace nanobind::detail
