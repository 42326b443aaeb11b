// Memory of batches. Large blocks are kept when a batch is dropped, since fresh memory costs a page fault for
// every 4 KB. No Python here.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace ostinato {

/// Blocks of memory, aligned to 64 bytes. Thread-safe, without the interpreter lock: torch drops tensors in
/// any thread. A process that is forked while another thread is in a call goes on without the pool.
class BlockPool {
public:
    /// The pool of the process. It is never destroyed: tensors may outlive static objects.
    static BlockPool& shared() {
        static auto& pool = *new BlockPool();
        return pool;
    }

    /// Returns a block of at least `bytes`. Raises std::bad_alloc.
    void* take(std::size_t bytes) {
        const std::size_t size = rounded(bytes);
        if (size >= kPooledBytes) {
            const std::unique_lock lock(mutex_, std::try_to_lock);
            if (lock.owns_lock()) {
                for (std::size_t i = kept_.size(); i > 0; --i) {
                    if (kept_[i - 1].size != size) continue;
                    void* const block = kept_[i - 1].address;
                    forget(i - 1);
                    return block;
                }
            }
        }
        void* const block = allocate(size);
        if (block == nullptr) throw std::bad_alloc();
        return block;
    }

    /// Takes back a block of `take(bytes)`.
    void give(void* block, std::size_t bytes) noexcept {
        const std::size_t size = rounded(bytes);
        if (size >= kPooledBytes && size <= kMostBytes) {
            const std::unique_lock lock(mutex_, std::try_to_lock);
            if (lock.owns_lock()) {
                while (kept_bytes_ + size > kMostBytes || kept_.size() == kMostBlocks) {
                    release(kept_.front().address);
                    forget(0);
                }
                kept_.push_back({block, size});
                kept_bytes_ += size;
                return;
            }
        }
        release(block);
    }

    /// Bytes that are kept for later batches.
    std::size_t kept_bytes() {
        const std::lock_guard lock(mutex_);
        return kept_bytes_;
    }

private:
    static constexpr std::size_t kAlignment = 64;
    static constexpr std::size_t kPooledBytes = std::size_t{32} << 10;  // malloc keeps smaller ones itself
    static constexpr std::size_t kMostBytes = std::size_t{128} << 20;
    static constexpr std::size_t kMostBlocks = 64;

    struct Block {
        void* address;
        std::size_t size;
    };

    BlockPool() { kept_.reserve(kMostBlocks); }

    static std::size_t rounded(std::size_t bytes) {
        const std::size_t step = bytes >= kPooledBytes ? 4096 : kAlignment;
        return (bytes + step - 1) / step * step;
    }

    static void* allocate(std::size_t size) {
#ifdef _WIN32
        return _aligned_malloc(size, kAlignment);
#else
        return std::aligned_alloc(kAlignment, size);
#endif
    }

    static void release(void* block) {
#ifdef _WIN32
        _aligned_free(block);
#else
        std::free(block);
#endif
    }

    void forget(std::size_t i) {
        kept_bytes_ -= kept_[i].size;
        kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(i));
    }

    std::mutex mutex_;
    std::vector<Block> kept_;  // in the order of `give`
    std::size_t kept_bytes_ = 0;
};

}  // namespace ostinato
