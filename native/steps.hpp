// Transitions over several steps: what a window says of them, and discounted sums. No Python here.
#pragma once

#include <cstdint>

namespace ostinato {

/// Windows of `width` rows from each of `n` rows on, and how many entries of each lie in its episode: the
/// first ones, and at least one.
struct Ahead {
    const std::int64_t* slots;  // [n, width]
    const std::uint8_t* valid;  // [n, width]
    std::int64_t n;
    std::int64_t width;
};

/// For each window its valid entries, `powers` of that number, its last slot, and the weight of each entry.
template <typename Weight>
void discount(const Ahead& ahead, const Weight* powers, Weight* weights, std::int64_t* steps,
              float* discounts, std::int64_t* last) {
    for (std::int64_t i = 0; i < ahead.n; ++i) {
        const std::int64_t at = i * ahead.width;
        std::int64_t count = 0;
        for (std::int64_t k = 0; k < ahead.width; ++k) {
            const bool good = ahead.valid[at + k] != 0;
            weights[at + k] = good ? powers[k] : Weight{0};
            count += good ? 1 : 0;
        }
        steps[i] = count;
        discounts[i] = static_cast<float>(powers[count]);
        last[i] = ahead.slots[at + ahead.width - 1];
    }
}

/// Rows to add up: `n` times `width`, of `cells` numbers.
struct Form {
    std::int64_t n;
    std::int64_t width;
    std::int64_t cells;
};

/// `out[i, c] = sum_k weights[i, k] * rows[i, k, c]`; what has no weight may be infinite.
template <typename Value>
void weigh(const Value* rows, const Value* weights, const Form& form, Value* out) {
    for (std::int64_t i = 0; i < form.n; ++i) {
        for (std::int64_t c = 0; c < form.cells; ++c) {
            double sum = 0;
            for (std::int64_t k = 0; k < form.width; ++k) {
                const Value weight = weights[i * form.width + k];
                const Value value = rows[(i * form.width + k) * form.cells + c];
                sum += weight == 0 ? 0.0 : static_cast<double>(weight) * static_cast<double>(value);
            }
            out[i * form.cells + c] = static_cast<Value>(sum);
        }
    }
}

}  // namespace ostinato
