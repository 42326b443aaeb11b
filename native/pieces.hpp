// Positioned reads of many short pieces of files, each straight to its place; what lies close is read in one
// call.
#pragma once

#if !defined(_WIN32)
#define OSTINATO_HAS_PIECES 1

#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ostinato {

/// Pieces in the order of their files and offsets; piece i is `widths[i]` bytes at `offsets[i]` of `fds[i]`.
struct Pieces {
    const std::int64_t* fds;
    const std::int64_t* offsets;
    const std::int64_t* widths;
    const std::int64_t* targets;
    std::int64_t count;
};

/// How far a read came: the piece that could not be read in full (or the count), and errno (0 at the end of a
/// file).
struct Reached {
    std::int64_t piece;
    int error;
};

/// One piece, however many calls it takes. False at the end of the file or an error.
inline bool read_piece(const Pieces& pieces, std::int64_t i, int& error) {
    auto* target = reinterpret_cast<char*>(static_cast<std::uintptr_t>(pieces.targets[i]));
    std::int64_t done = 0;
    while (done < pieces.widths[i]) {
        const ssize_t got =
            pread(static_cast<int>(pieces.fds[i]), target + done,
                  static_cast<std::size_t>(pieces.widths[i] - done), pieces.offsets[i] + done);
        if (got < 0 && errno == EINTR) continue;
        error = got < 0 ? errno : 0;
        if (got <= 0) return false;
        done += got;
    }
    return true;
}

/// Reads pieces [first, last), which follow each other in one file, with one call; false where it fell short.
inline bool read_run(const Pieces& pieces, std::int64_t first, std::int64_t last, std::vector<iovec>& parts,
                     char* scratch) {
    parts.clear();
    std::int64_t end = pieces.offsets[first];
    for (std::int64_t i = first; i < last; ++i) {
        if (pieces.offsets[i] > end)
            parts.push_back({scratch, static_cast<std::size_t>(pieces.offsets[i] - end)});
        parts.push_back({reinterpret_cast<void*>(static_cast<std::uintptr_t>(pieces.targets[i])),
                         static_cast<std::size_t>(pieces.widths[i])});
        end = pieces.offsets[i] + pieces.widths[i];
    }
    const ssize_t got = preadv(static_cast<int>(pieces.fds[first]), parts.data(),
                               static_cast<int>(parts.size()), pieces.offsets[first]);
    return got == end - pieces.offsets[first];
}

/// Reads all pieces. Those of one file whose gap is at most `gap` bytes share a call, up to 500 of them.
inline Reached read_pieces(const Pieces& pieces, std::int64_t gap) {
    constexpr std::int64_t kMost = 500;  // half of what a call takes: each may have a gap before it
    std::vector<iovec> parts;
    std::vector<char> scratch(static_cast<std::size_t>(gap) + 1);
    for (std::int64_t first = 0; first < pieces.count;) {
        std::int64_t last = first + 1;
        while (last < pieces.count && last - first < kMost && pieces.fds[last] == pieces.fds[first]) {
            const std::int64_t between =
                pieces.offsets[last] - pieces.offsets[last - 1] - pieces.widths[last - 1];
            if (between < 0 || between > gap) break;
            ++last;
        }
        if (last == first + 1 || !read_run(pieces, first, last, parts, scratch.data())) {
            for (std::int64_t i = first; i < last; ++i) {
                int error = 0;
                if (!read_piece(pieces, i, error)) return {i, error};
            }
        }
        first = last;
    }
    return {pieces.count, 0};
}

}  // namespace ostinato

#endif
