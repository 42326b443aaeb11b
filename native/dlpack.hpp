// The structs of DLPack 1.x that torch's C exchange API uses (https://dmlc.github.io/dlpack, version 1.3).
// Only the layout is declared: field for field that of the standard. No Python here.
#pragma once

#include <cstdint>

namespace ostinato::dlpack {

constexpr std::uint32_t kMajor = 1;
constexpr std::int32_t kCpu = 1;
constexpr std::int32_t kCudaHost = 3;   // page-locked memory of the CPU
constexpr std::int32_t kRocmHost = 11;  // the same

struct Version {
    std::uint32_t major;
    std::uint32_t minor;
};

struct Device {
    std::int32_t type;
    std::int32_t id;
};

enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

struct DataType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;

    bool operator==(const DataType&) const = default;
};

struct Tensor {
    void* data;
    Device device;
    std::int32_t ndim;
    DataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;  // in elements
    std::uint64_t byte_offset;
};

struct ManagedTensor {
    Version version;
    void* context;
    void (*deleter)(ManagedTensor* self);
    std::uint64_t flags;
    Tensor tensor;
};

/// Functions by which a library hands its tensors to C code; those that are not used here are untyped.
struct ExchangeApi {
    Version version;
    const ExchangeApi* previous;
    void* allocate;
    void* from_object;
    int (*to_object)(ManagedTensor* tensor, void** object);
    int (*view_object)(void* object, Tensor* out);  // may be null
    void* current_stream;
};

}  // namespace ostinato::dlpack
