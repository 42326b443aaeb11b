// Memory of callers: bytes, flags, the check of null addresses, and which addresses ranges of memory share.
// No Python here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "platform.hpp"

namespace ostinato {

/// Rows of any dtype are copied as bytes.
using Byte = std::byte;

/// An element of a torch.bool or torch.uint8 tensor: false where it is 0.
using Flag = std::uint8_t;

/// Raise std::invalid_argument if an address that is needed is null. Tensors without memory (meta tensors,
/// fake tensors) have the address 0.
inline void require_address(const void* address, bool needed, const char* name) {
    if (address == nullptr && needed) {
        throw std::invalid_argument(
            std::string(name) +
            " must be an address in CPU memory, got 0: tensors without memory, such as "
            "those of the device meta, cannot be read or written");
    }
}

/// Addresses [begin, end).
struct AddressRange {
    std::uintptr_t begin;
    std::uintptr_t end;
};

/// The range of `rows` rows of `row_bytes` each, cut off at the end of the address space.
inline AddressRange range_of(const void* first, std::uint64_t rows, std::uint64_t row_bytes) {
    constexpr std::uintptr_t last = std::numeric_limits<std::uintptr_t>::max();
    const auto begin = reinterpret_cast<std::uintptr_t>(first);
    const std::uint64_t size = rows * row_bytes;
    const bool fits = multiply_high(rows, row_bytes) == 0 && size <= last - begin;
    return {begin, fits ? begin + static_cast<std::uintptr_t>(size) : last};
}

/// A set of addresses: disjoint ranges in ascending order. Ranges that touch are merged.
class AddressRanges {
public:
    void add(AddressRange added) {
        if (added.begin >= added.end) return;
        const auto first =
            std::lower_bound(ranges_.begin(), ranges_.end(), added.begin,
                             [](const AddressRange& range, std::uintptr_t at) { return range.end < at; });
        auto rest = first;
        for (; rest != ranges_.end() && rest->begin <= added.end; ++rest) {
            added.begin = std::min(added.begin, rest->begin);
            added.end = std::max(added.end, rest->end);
        }
        ranges_.insert(ranges_.erase(first, rest), added);
    }

    bool overlaps(AddressRange asked) const {
        if (asked.begin >= asked.end) return false;
        const auto next =
            std::upper_bound(ranges_.begin(), ranges_.end(), asked.begin,
                             [](std::uintptr_t at, const AddressRange& range) { return at < range.end; });
        return next != ranges_.end() && next->begin < asked.end;
    }

private:
    std::vector<AddressRange> ranges_;
};

}  // namespace ostinato
