// Which memory belongs to the fields of a storage: a few intervals, asked before every write.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "platform.hpp"

namespace ostinato {

using Address = std::uintptr_t;

/// Addresses [begin, end).
struct Interval {
    Address begin;
    Address end;
};

/// `rows` rows of `bytes` each from `begin` on; what does not fit the address space is cut off.
inline Interval span_of(Address begin, std::uint64_t rows, std::uint64_t bytes) {
    constexpr Address last = std::numeric_limits<Address>::max();
    const std::uint64_t size = rows * bytes;
    const bool fits = multiply_high(rows, bytes) == 0 && size <= last - begin;
    return {begin, fits ? begin + static_cast<Address>(size) : last};
}

/// A set of addresses, kept as disjoint intervals in order; what touches is merged.
class Cover {
public:
    void add(Interval added) {
        if (added.begin >= added.end) return;
        const auto first = std::lower_bound(intervals_.begin(), intervals_.end(), added.begin,
                                            [](const Interval& i, Address at) { return i.end < at; });
        auto rest = first;
        for (; rest != intervals_.end() && rest->begin <= added.end; ++rest) {
            added.begin = std::min(added.begin, rest->begin);
            added.end = std::max(added.end, rest->end);
        }
        intervals_.insert(intervals_.erase(first, rest), added);
    }

    bool overlaps(Interval asked) const {
        if (asked.begin >= asked.end) return false;
        const auto next = std::upper_bound(intervals_.begin(), intervals_.end(), asked.begin,
                                           [](Address at, const Interval& i) { return at < i.end; });
        return next != intervals_.end() && next->begin < asked.end;
    }

private:
    std::vector<Interval> intervals_;
};

}  // namespace ostinato
