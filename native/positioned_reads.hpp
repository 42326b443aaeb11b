// Positioned reads of many short byte ranges of files, each straight to its memory. Ranges that are close
// together share one system call. No Python here.
#pragma once

#if !defined(_WIN32)
#define OSTINATO_HAS_POSITIONED_READS 1

#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory.hpp"

namespace ostinato {

/// Ranges in the order of their files and offsets; range i is `sizes[i]` bytes at `offsets[i]` of `fds[i]`.
struct FileRanges {
    const std::int64_t* fds;
    const std::int64_t* offsets;
    const std::int64_t* sizes;
    Byte* const* targets;
    std::int64_t count;
};

/// How far a read came: the first range that was not read in full (or the count), and errno (0 at the end of
/// a file).
struct ReadResult {
    std::int64_t range;
    int error;
};

/// Read one range, in as many calls as it takes. False at the end of the file or on an error.
inline bool read_range(const FileRanges& ranges, std::int64_t i, int& error) {
    std::int64_t done = 0;
    while (done < ranges.sizes[i]) {
        const ssize_t got = pread(static_cast<int>(ranges.fds[i]), ranges.targets[i] + done,
                                  static_cast<std::size_t>(ranges.sizes[i] - done), ranges.offsets[i] + done);
        if (got < 0 && errno == EINTR) continue;
        error = got < 0 ? errno : 0;
        if (got <= 0) return false;
        done += got;
    }
    return true;
}

/// Read the successive ranges [first, last) of one file with one call. False unless all bytes were read.
inline bool read_together(const FileRanges& ranges, std::int64_t first, std::int64_t last,
                          std::vector<iovec>& parts, Byte* scratch) {
    parts.clear();
    std::int64_t end = ranges.offsets[first];
    for (std::int64_t i = first; i < last; ++i) {
        if (ranges.offsets[i] > end)
            parts.push_back({scratch, static_cast<std::size_t>(ranges.offsets[i] - end)});
        parts.push_back({ranges.targets[i], static_cast<std::size_t>(ranges.sizes[i])});
        end = ranges.offsets[i] + ranges.sizes[i];
    }
    const ssize_t got = preadv(static_cast<int>(ranges.fds[first]), parts.data(),
                               static_cast<int>(parts.size()), ranges.offsets[first]);
    return got == end - ranges.offsets[first];
}

/// Read all ranges. Ranges of one file with at most `gap` bytes between them share a call, up to 500.
inline ReadResult read_ranges(const FileRanges& ranges, std::int64_t gap) {
    constexpr std::int64_t kMost = 500;  // half of the limit of a call: each range may have a gap before it
    std::vector<iovec> parts;
    std::vector<Byte> scratch(static_cast<std::size_t>(gap) + 1);
    for (std::int64_t first = 0; first < ranges.count;) {
        std::int64_t last = first + 1;
        while (last < ranges.count && last - first < kMost && ranges.fds[last] == ranges.fds[first]) {
            const std::int64_t between =
                ranges.offsets[last] - ranges.offsets[last - 1] - ranges.sizes[last - 1];
            if (between < 0 || between > gap) break;
            ++last;
        }
        if (last == first + 1 || !read_together(ranges, first, last, parts, scratch.data())) {
            for (std::int64_t i = first; i < last; ++i) {
                int error = 0;
                if (!read_range(ranges, i, error)) return {i, error};
            }
        }
        first = last;
    }
    return {ranges.count, 0};
}

}  // namespace ostinato

#endif
