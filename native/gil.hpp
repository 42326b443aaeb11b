// When native work runs without the interpreter lock.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace ostinato {

namespace nb = nanobind;

/// Bytes of a copy that are worth releasing the interpreter lock. For less, the release costs more than the
/// copy, and under contention taking the lock again takes milliseconds.
constexpr std::size_t kReleaseBytes = 1 << 18;

/// Run `work`, without the interpreter lock if it is `large`.
template <typename Work>
auto run_released_if(bool large, Work work) {
    std::optional<nb::gil_scoped_release> released;
    if (large) released.emplace();
    return work();
}

}  // namespace ostinato
