// n-step returns: weighted sums over windows of rows. No Python here.
#pragma once

#include <cstdint>

namespace ostinato {

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
