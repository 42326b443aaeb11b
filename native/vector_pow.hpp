// x ** y for an array of x: a loop without branches and calls, which compilers vectorize. Accurate to two
// units in the last place. No Python here.
//
// x = m * 2**e with m around 1; log2(m) from the series of the inverse hyperbolic tangent; y * log2(x) = n +
// r with an integer n; 2**r from the exponential series. Arguments whose result may not be a normal number go
// through std::pow.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "platform.hpp"

namespace ostinato {

namespace power {

constexpr std::uint64_t kOne = std::uint64_t{0x3ff} << 52;    // the bits of 1.0
constexpr std::uint64_t kRoot = 0x3fe6a09e667f3bcd;           // the bits of sqrt(1/2), the lower end of m
constexpr std::uint64_t kWhole = std::uint64_t{0x433} << 52;  // the bits of 2**52, whose last bit is 1
constexpr std::uint64_t kHigh = ~((std::uint64_t{1} << 27) - 1);
constexpr double kRound = 0x1.8p52;  // adding and subtracting it rounds to an integer
constexpr double kLog2 = 0.693147180559945309417;

/// 2 / log(2) * atanh(f), for |f| up to 0.1716.
inline double log2_of(double f) {
    const double s = f * f;
    double sum = 1.0 / 21;
    for (int k = 19; k > 1; k -= 2) sum = sum * s + 1.0 / k;
    return (f + f * s * sum) * (2 / kLog2);
}

/// exp(r), for |r| up to 0.35.
inline double exp_of(double r) {
    constexpr double kInverse[] = {1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,
                                   1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                                   1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
    double sum = kInverse[11];
    for (int k = 10; k >= 0; --k) sum = sum * r + kInverse[k];
    return 1 + (r + r * r * sum);
}

/// x ** y where the result is a normal number. `high` and `low` are the upper and lower bits of y.
inline double of_normal(double x, double y, double high, double low) {
    const auto bits = std::bit_cast<std::uint64_t>(x);
    const std::uint64_t exponent = (bits - kRoot + kOne) >> 52;  // e + 1023
    const auto m = std::bit_cast<double>(bits - (exponent << 52) + kOne);
    const double e = std::bit_cast<double>(exponent | kWhole) - (0x1p52 + 1023);
    const double rest = log2_of((m - 1) / (m + 1)) * y + e * low;
    const double whole = ((e * high + rest) + kRound) - kRound;  // e * high is exact
    const double power = exp_of(((e * high - whole) + rest) * kLog2);
    return std::bit_cast<double>(std::bit_cast<std::uint64_t>(power) +
                                 (std::bit_cast<std::uint64_t>(whole + kRound) << 52));
}

}  // namespace power

/// Replace `x[i]`, at least 0, by `x[i] ** y`. A result does not depend on the other elements.
OSTINATO_CLONES inline void pow_in_place(double* x, std::int64_t n, double y) {
    constexpr double kMaxPower = 4;  // for larger ones the error of the logarithm exceeds the bound
    constexpr double kMax = 0x1p249, kMin = 0x1p-249;
    constexpr std::int64_t kBlock = 64;
    if (y == 1) return;
    if (!(std::abs(y) <= kMaxPower)) {
        std::transform(x, x + n, x, [y](double number) { return std::pow(number, y); });
        return;
    }
    const auto high = std::bit_cast<double>(std::bit_cast<std::uint64_t>(y) & power::kHigh);
    double result[kBlock];
    for (std::int64_t first = 0; first < n; first += kBlock) {
        double* const block = x + first;
        const std::int64_t count = std::min(kBlock, n - first);
        for (std::int64_t i = 0; i < count; ++i) result[i] = power::of_normal(block[i], y, high, y - high);
        for (std::int64_t i = 0; i < count; ++i) {
            if (!(block[i] >= kMin && block[i] <= kMax)) result[i] = std::pow(block[i], y);
        }
        std::copy_n(result, count, block);
    }
}

}  // namespace ostinato
