// n-step returns: the weights, lengths and discounts of windows, and weighted sums over them. No Python here.
#pragma once

#include <cstdint>

#include "memory.hpp"

namespace ostinato {

/// Windows of `width` rows that begin at each of `n` rows. The entries of a window inside its episode come
/// first, at least one.
struct Windows {
    const std::int64_t* slots;  // [n, width]
    const Flag* valid;          // [n, width]
    std::int64_t n;
    std::int64_t width;
};

/// For each window: the weights of its entries, the number of valid ones, the discount `powers[number]` and
/// the last slot.
template <typename Weight>
void discount_windows(const Windows& windows, const Weight* powers, Weight* weights, std::int64_t* steps,
                      float* discounts, std::int64_t* last) {
    for (std::int64_t i = 0; i < windows.n; ++i) {
        const std::int64_t at = i * windows.width;
        std::int64_t count = 0;
        for (std::int64_t k = 0; k < windows.width; ++k) {
            const bool valid = windows.valid[at + k] != 0;
            weights[at + k] = valid ? powers[k] : Weight{0};
            count += valid ? 1 : 0;
        }
        steps[i] = count;
        discounts[i] = static_cast<float>(powers[count]);
        last[i] = windows.slots[at + windows.width - 1];
    }
}

/// Shape `[n, width, cells]` of the rows of weighted sums.
struct SumShape {
    std::int64_t n;
    std::int64_t width;
    std::int64_t cells;
};

/// `out[i, c] = sum_k weights[i, k] * rows[i, k, c]`, in float64. Rows of weight 0 may hold infinities.
template <typename Value>
void weighted_sums(const Value* rows, const Value* weights, const SumShape& shape, Value* out) {
    for (std::int64_t i = 0; i < shape.n; ++i) {
        for (std::int64_t c = 0; c < shape.cells; ++c) {
            double sum = 0;
            for (std::int64_t k = 0; k < shape.width; ++k) {
                const Value weight = weights[i * shape.width + k];
                const Value value = rows[(i * shape.width + k) * shape.cells + c];
                sum += weight == 0 ? 0.0 : static_cast<double>(weight) * static_cast<double>(value);
            }
            out[i * shape.cells + c] = static_cast<Value>(sum);
        }
    }
}

}  // namespace ostinato
