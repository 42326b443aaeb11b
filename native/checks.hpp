// Checks of counts and indices. They raise before anything is read or written. No Python here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ostinato {

/// Raise std::invalid_argument if a count is negative.
inline void require_count(std::int64_t count, const char* name = "n") {
    if (count < 0) {
        throw std::invalid_argument(std::string(name) + " must be at least 0, got " + std::to_string(count));
    }
}

/// The first position whose value is outside [0, rows), or n.
inline std::int64_t find_out_of_range(const std::int64_t* values, std::int64_t n, std::int64_t rows) {
    const auto last = static_cast<std::uint64_t>(rows) - 1;
    std::uint64_t seen = 0;
    for (std::int64_t i = 0; rows > 0 && i < n; ++i) {
        const auto value = static_cast<std::uint64_t>(values[i]);
        seen |= value | (last - value);  // the sign bit stays set once a value was negative or above `last`
    }
    if (rows > 0 && (seen >> 63) == 0) return n;
    return std::find_if(values, values + n, [rows](std::int64_t v) { return v < 0 || v >= rows; }) - values;
}

/// Raise std::out_of_range unless every value lies in [0, rows).
inline void require_in_range(const std::int64_t* values, std::int64_t n, std::int64_t rows) {
    const std::int64_t bad = find_out_of_range(values, n, rows);
    if (bad != n) {
        throw std::out_of_range("index " + std::to_string(values[bad]) + " is out of range for " +
                                std::to_string(rows) + " rows");
    }
}

}  // namespace ostinato
