// One ring of slots for the threads of many processes, in shared memory: which slots hold complete rows,
// which writers are active, and, for prioritized sampling, the sum tree. Rows themselves are not here:
// writers copy them outside the lock, between `reserve` and `commit`. No Python here.
//
// A writer reserves slots under the lock (their generations become negative: open), copies its rows, and
// commits them under the lock (generations become the positive serial numbers of the rows). A reader compares
// the generations before and after its copy. During its copy a writer holds the lock of an entry in the table
// of writers, which the kernel releases when the process dies. This distinguishes dead writers from slow
// ones: the slots of a dead writer are reused when the ring reaches them, those of a slow writer are skipped.
// A process that takes the main lock after its owner died repairs the ring first: everything follows from the
// generations, the table of writers and the leaves.
#pragma once

#if defined(__linux__)
#define OSTINATO_HAS_SHARED_RING 1

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>

#include "checks.hpp"
#include "memory.hpp"
#include "platform.hpp"
#include "sum_tree.hpp"

namespace ostinato {

using Word = std::atomic<std::int64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == sizeof(std::int64_t));

/// The outcome of an attempt to take a lock.
enum class LockResult { acquired, owner_died, busy };

/// A lock between processes (a robust mutex). If its owner dies, the kernel releases it and tells the next
/// owner.
class RobustLock {
public:
    /// Initialize the lock, once, in zeroed memory.
    void initialize() {
        pthread_mutexattr_t attributes;
        require(pthread_mutexattr_init(&attributes));
        require(pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED));
        require(pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST));
        require(pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK));
        require(pthread_mutex_init(&mutex_, &attributes));
        pthread_mutexattr_destroy(&attributes);
    }

    LockResult try_lock() { return result_of(pthread_mutex_trylock(&mutex_)); }

    LockResult lock_for(std::int64_t milliseconds) {
        timespec until{};
        clock_gettime(CLOCK_REALTIME, &until);
        const std::int64_t nanoseconds = until.tv_nsec + milliseconds % 1000 * 1'000'000;
        until.tv_sec += static_cast<time_t>(milliseconds / 1000 + nanoseconds / 1'000'000'000);
        until.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000);
        return result_of(pthread_mutex_timedlock(&mutex_, &until));
    }

    /// After `owner_died`: the data that the lock guards is consistent again.
    void mark_consistent() { pthread_mutex_consistent(&mutex_); }

    void unlock() { pthread_mutex_unlock(&mutex_); }

private:
    static void require(int error) {
        if (error != 0) throw std::system_error(error, std::generic_category(), "a lock between processes");
    }

    static LockResult result_of(int error) {
        if (error == 0) return LockResult::acquired;
        if (error == EOWNERDEAD) return LockResult::owner_died;
        if (error == EBUSY || error == ETIMEDOUT || error == EDEADLK) return LockResult::busy;
        require(error);
        return LockResult::busy;
    }

    pthread_mutex_t mutex_;
};

/// An entry of the table of writers: the run that a writer copies to. The writer holds its lock from
/// `reserve` to `commit`. No rows: the entry is free.
struct alignas(128) WriterEntry {
    RobustLock lock;
    std::int64_t start, rows, serial, total, epoch;
};

/// What a reader must know before it draws.
struct RingState {
    std::int64_t written, holes, filled, committed;
};

class SharedRing {
public:
    static constexpr std::int64_t kMaxWriters = 64;

    /// The outcome of `reserve`: the serial number and the slot of the first row.
    struct Reservation {
        std::int64_t serial, start;
    };

    /// Counts of all processes.
    enum Count : std::size_t {
        kDrawn,
        kStaleUpdates,
        kRedone,
        kProcesses,
        kLost,
        kRowsWritten,
        kSinceEmpty,
        kRepairs,
        kCounts
    };

    static std::size_t bytes_for(std::int64_t capacity, bool prioritized) {
        const std::size_t words = to_lines(static_cast<std::size_t>(capacity) * sizeof(Word));
        const std::size_t priorities = prioritized ? words + SumTree::bytes_for(capacity) : 0;
        return to_lines(sizeof(Control)) + words + priorities;
    }

    /// `create`: a new ring in memory of zeros that no other process has seen yet; else an existing ring.
    SharedRing(Byte* memory, std::int64_t capacity, bool prioritized, bool create)
        : control_(reinterpret_cast<Control*>(memory)), capacity_(capacity) {
        if (capacity < 1 || memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % kLine != 0) {
            throw std::invalid_argument(
                "a shared ring needs a capacity of at least 1 and the address of memory aligned to " +
                std::to_string(kLine) + " bytes");
        }
        const std::size_t words = to_lines(static_cast<std::size_t>(capacity) * sizeof(Word));
        Byte* const after_control = memory + to_lines(sizeof(Control));
        generations_ = reinterpret_cast<Word*>(after_control);
        if (prioritized) {
            priorities_ = reinterpret_cast<double*>(after_control + words);
            tree_ = std::make_unique<SumTree>(capacity, after_control + 2 * words);
        }
        if (create) {
            initialize(prioritized);
        } else if (control_->magic != kMagic || control_->capacity != capacity ||
                   (control_->prioritized != 0) != prioritized) {
            throw std::invalid_argument("this memory holds no shared ring of that capacity and kind");
        }
    }

    std::int64_t timeout_ms = 30'000;  // how long this process waits before a wait is an error

    std::int64_t capacity() const { return capacity_; }
    std::int64_t owner() const { return control_->owner.load(std::memory_order_relaxed); }
    SumTree* tree() { return tree_.get(); }
    Word* generations() const { return generations_; }
    double* priorities() const { return priorities_; }
    double max_priority() const { return control_->max_priority.load(std::memory_order_relaxed); }
    void set_max_priority(double value) { control_->max_priority.store(value, std::memory_order_relaxed); }
    std::int64_t cursor() const { return control_->cursor.load(std::memory_order_relaxed); }
    std::int64_t count(std::size_t which) const { return control_->counts[checked(which)].load(); }
    std::int64_t add(std::size_t which, std::int64_t n) {
        return control_->counts[checked(which)].fetch_add(n);
    }

    /// `holes` is loaded before `filled`: see `reserve`.
    RingState state() const {
        const std::int64_t written = control_->written.load(std::memory_order_acquire);
        const std::int64_t holes = control_->holes.load(std::memory_order_acquire);
        const std::int64_t filled = control_->filled.load(std::memory_order_acquire);
        return {written, holes, filled, control_->committed.load(std::memory_order_relaxed)};
    }

    /// The last serial number. For a reader, after its copy: where it is that of the draw, no slot was
    /// reserved.
    std::int64_t written() const {
        std::atomic_thread_fence(std::memory_order_acquire);
        return control_->written.load(std::memory_order_relaxed);
    }
    /// Slots from here on were never reserved.
    std::int64_t rows() const { return control_->filled.load(std::memory_order_acquire); }

    // -- the lock ----------------------------------------------------------------------------------------

    bool try_lock() { return lock_within(0); }
    bool lock_for(std::int64_t milliseconds) { return lock_within(milliseconds); }

    void unlock() {
        if (--depth_ > 0) return;
        holder_.store(0, std::memory_order_relaxed);
        control_->lock.unlock();
    }

    // -- writing; the caller holds the lock --------------------------------------------------------------

    /// Reserve the next `rows` slots for the last rows of a batch of `total`. Nothing if active writers leave
    /// no room. A reader that saw no hole before these stores, and the same `written` after its copy, read
    /// none of these slots: therefore `holes` is stored first and `filled` last.
    std::optional<Reservation> reserve(std::int64_t rows, std::int64_t total) {
        if (rows < 1 || rows > capacity_ || total < rows) {
            throw std::invalid_argument("rows must be in [1, capacity], and total no less");
        }
        const std::optional<std::int64_t> start =
            find_room((load(control_->cursor) + total - rows) % capacity_, rows);
        const std::int64_t number = start.has_value() ? claim_entry() : kMaxWriters;
        if (number == kMaxWriters) return std::nullopt;
        WriterEntry& entry = control_->writers[number];
        const std::int64_t serial = load(control_->written) + 1 + (total - rows);
        entry.start = *start;
        entry.serial = serial;
        entry.total = total;
        entry.epoch = load(control_->epoch);
        entry.rows = rows;
        std::int64_t overwritten = 0;
        for_run(*start, rows, [&](std::int64_t slot, std::int64_t) {
            overwritten += load(generations_[slot]) > 0 ? 1 : 0;
        });
        const std::int64_t filled = std::max(load(control_->filled), std::min(*start + rows, capacity_));
        const std::int64_t committed = load(control_->committed) - overwritten;
        store(control_->committed, committed);
        store(control_->holes, filled - committed);
        store(control_->written, load(control_->written) + total);
        for_run(*start, rows,
                [&](std::int64_t slot, std::int64_t i) { store(generations_[slot], -(serial + i)); });
        if (overwritten > 0 && tree_ != nullptr) {
            tree_->set_run(*start, rows, 0.0);
            for_run(*start, rows, [&](std::int64_t slot, std::int64_t) { priorities_[slot] = 0.0; });
        }
        store(control_->cursor, (*start + rows) % capacity_);
        store(control_->filled, filled);
        std::atomic_thread_fence(std::memory_order_release);
        return Reservation{serial, *start};
    }

    /// Whether the ring was not cleared since the rows from this serial number on were reserved.
    bool is_current(std::int64_t serial) const { return required(serial).epoch == load(control_->epoch); }

    /// The rows reserved from this serial number on are complete: let them be read.
    void commit(std::int64_t serial) {
        WriterEntry& own = required(serial);
        if (is_current(serial)) {
            std::atomic_thread_fence(std::memory_order_release);
            for_run(own.start, own.rows,
                    [&](std::int64_t slot, std::int64_t i) { store(generations_[slot], own.serial + i); });
            store(control_->committed, load(control_->committed) + own.rows);
            store(control_->holes, load(control_->filled) - load(control_->committed));
            add(kRowsWritten, own.total);
            add(kSinceEmpty, own.total);
        }
        release(own);
    }

    /// Give up a reservation. Does nothing after its commit, where a signal may have interrupted the caller.
    void abandon(std::int64_t serial) {
        WriterEntry* own = find(serial);
        if (own == nullptr) return;
        discard(*own);
        release(*own);
    }

    /// The number of living writers between reserve and commit. Releases the entries of dead ones.
    std::int64_t writers() {
        return std::count_if(
            control_->writers, control_->writers + control_->used,
            [this](WriterEntry& entry) { return entry.rows > 0 && !release_if_dead(entry); });
    }

    /// Remove all rows and go on at slot `cursor`.
    void clear(std::int64_t cursor) {
        require_in_range(&cursor, 1, capacity_);
        store(control_->epoch, load(control_->epoch) + 1);
        store(control_->written, load(control_->written) + 1);
        for (std::int64_t slot = 0; slot < load(control_->filled); ++slot) store(generations_[slot], 0);
        store(control_->committed, 0);
        store(control_->filled, 0);
        store(control_->holes, 0);
        store(control_->cursor, cursor);
        control_->counts[kSinceEmpty].store(0);
        if (tree_ == nullptr) return;
        tree_->clear();
        std::fill_n(priorities_, capacity_, 0.0);
        set_max_priority(0.0);
    }

    // -- reading; no lock needed -------------------------------------------------------------------------

    void generations_of(const std::int64_t* slots, std::int64_t n, std::int64_t* out) const {
        require_in_range(slots, n, capacity_);
        for (std::int64_t i = 0; i < n; ++i) {
            if (i + kAhead < n) prefetch<false>(generations_ + slots[i + kAhead]);
            out[i] = generations_[slots[i]].load(std::memory_order_acquire);
        }
    }

    /// Mark slots that hold no complete row now, or a row newer than the serial number `written`, and return
    /// their number. For a reader, after a copy of slots that held complete rows before.
    std::int64_t changed(const std::int64_t* slots, std::int64_t n, std::int64_t written, Flag* out) const {
        require_in_range(slots, n, capacity_);
        std::atomic_thread_fence(std::memory_order_acquire);
        std::int64_t found = 0;
        for (std::int64_t i = 0; i < n; ++i) {
            if (i + kAhead < n) prefetch<false>(generations_ + slots[i + kAhead]);
            const std::int64_t generation = generations_[slots[i]].load(std::memory_order_acquire);
            out[i] = generation > 0 && generation <= written ? 0 : 1;
            found += out[i];
        }
        return found;
    }

    /// Write the slots below `limit` that hold complete rows, in order, and return their number. O(limit).
    std::int64_t committed_slots(std::int64_t* out, std::int64_t limit) const {
        std::int64_t found = 0;
        const std::int64_t end = std::min(limit, capacity_);
        for (std::int64_t slot = 0; slot < end; ++slot) {
            out[found] = slot;
            found += generations_[slot].load(std::memory_order_acquire) > 0 ? 1 : 0;
        }
        return found;
    }

private:
    static constexpr std::size_t kLine = 64;
    static constexpr std::int64_t kAhead = 32;
    static constexpr std::int64_t kQueueWait = 10;  // milliseconds
    static constexpr std::uint64_t kMagic = 0x676e697274736f31;

    struct Control {
        std::uint64_t magic;
        std::int64_t capacity, prioritized;
        RobustLock lock, queue;
        Word owner;          // process that took the lock last
        Word cursor, epoch;  // epoch: how often the ring was cleared
        Word committed;      // slots that hold complete rows
        std::int64_t used;   // entries of `writers` that were ever taken
        std::atomic<double> max_priority;
        Word counts[kCounts];
        alignas(kLine) Word written;  // every reader loads these three: they have a cache line of their own
        Word holes;                   // slots below `filled` that hold no complete row
        Word filled;                  // slots from here on were never reserved
        WriterEntry writers[kMaxWriters];
    };

    static std::size_t to_lines(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
    static std::int64_t load(const Word& word) { return word.load(std::memory_order_relaxed); }
    static void store(Word& word, std::int64_t value) { word.store(value, std::memory_order_release); }

    static std::size_t checked(std::size_t which) {
        if (which >= kCounts) throw std::out_of_range("there is no such count");
        return which;
    }

    WriterEntry* find(std::int64_t serial) const {
        WriterEntry* end = control_->writers + control_->used;
        WriterEntry* found = std::find_if(control_->writers, end, [serial](const WriterEntry& entry) {
            return entry.rows > 0 && entry.serial == serial;
        });
        return found == end ? nullptr : found;
    }

    WriterEntry& required(std::int64_t serial) const {
        WriterEntry* found = find(serial);
        if (found == nullptr)
            throw std::out_of_range("nothing is reserved from the number " + std::to_string(serial));
        return *found;
    }

    template <typename Work>
    void for_run(std::int64_t start, std::int64_t rows, Work work) const {
        const std::int64_t before_end = std::min(rows, capacity_ - start);
        for (std::int64_t i = 0; i < before_end; ++i) work(start + i, i);
        for (std::int64_t i = before_end; i < rows; ++i) work(i - before_end, i);
    }

    void initialize(bool prioritized) {
        control_ = new (control_) Control{};
        control_->capacity = capacity_;
        control_->prioritized = prioritized ? 1 : 0;
        control_->lock.initialize();
        control_->queue.initialize();
        for (WriterEntry& entry : control_->writers) entry.lock.initialize();
        control_->magic = kMagic;
    }

    /// A waiting process holds the queue lock and is next: otherwise a process that takes the main lock again
    /// and again would get it each time. If the queue lock stays taken, its owner may have been stopped: then
    /// go on without it.
    bool lock_within(std::int64_t milliseconds) {
        const auto self = static_cast<std::uintptr_t>(pthread_self());
        // (a process that was forked while another thread held the lock has a copy of `holder_`, but not the
        // lock)
        if (holder_.load(std::memory_order_relaxed) == self && owner() == getpid()) {
            ++depth_;
            return true;
        }
        const LockResult queue = milliseconds > 0
                                     ? control_->queue.lock_for(std::min(milliseconds, kQueueWait))
                                     : control_->queue.try_lock();
        if (queue == LockResult::owner_died) control_->queue.mark_consistent();
        if (queue == LockResult::busy && milliseconds == 0) return false;
        const LockResult result =
            milliseconds > 0 ? control_->lock.lock_for(milliseconds) : control_->lock.try_lock();
        if (queue != LockResult::busy) control_->queue.unlock();
        if (result == LockResult::busy) return false;
        holder_.store(self, std::memory_order_relaxed);
        depth_ = 1;
        store(control_->owner, getpid());
        if (result == LockResult::owner_died) {
            repair();
            add(kRepairs, 1);
            control_->lock.mark_consistent();
        }
        return true;
    }

    /// The first slot from `start` on where `rows` slots overlap no active writer. Releases the entries of
    /// dead writers.
    std::optional<std::int64_t> find_room(std::int64_t start, std::int64_t rows) {
        for (std::int64_t passed = 0; passed < capacity_;) {
            const WriterEntry* active = nullptr;
            for (std::int64_t i = 0; i < control_->used && active == nullptr; ++i) {
                WriterEntry& other = control_->writers[i];
                if (other.rows > 0 && overlap(start, rows, other) && !release_if_dead(other)) active = &other;
            }
            if (active == nullptr) return start;
            const std::int64_t next = (active->start + active->rows) % capacity_;
            passed += next > start ? next - start : next - start + capacity_;
            start = next;
        }
        return std::nullopt;
    }

    bool overlap(std::int64_t start, std::int64_t rows, const WriterEntry& other) const {
        const auto distance = [this](std::int64_t from, std::int64_t to) {
            return to >= from ? to - from : to - from + capacity_;
        };
        return distance(start, other.start) < rows || distance(other.start, start) < other.rows;
    }

    /// Release the entry of a writer that died. False if it is alive.
    bool release_if_dead(WriterEntry& entry) {
        if (!try_claim(entry)) return false;
        add(kLost, discard(entry));
        release(entry);
        return true;
    }

    /// The open slots of an entry hold no row any more; returns their number.
    std::int64_t discard(WriterEntry& entry) {
        std::int64_t open = 0;
        for_run(entry.start, entry.rows, [&](std::int64_t slot, std::int64_t i) {
            if (load(generations_[slot]) != -(entry.serial + i)) return;
            store(generations_[slot], 0);
            ++open;
        });
        return open;
    }

    static void release(WriterEntry& entry) {
        entry.rows = 0;
        entry.lock.unlock();
    }

    /// The number of a free entry, its lock taken; kMaxWriters if there is none.
    std::int64_t claim_entry() {
        for (const bool release_dead : {false, true}) {
            for (std::int64_t i = 0; i < control_->used; ++i) {
                WriterEntry& entry = control_->writers[i];
                if (release_dead && entry.rows > 0) release_if_dead(entry);
                if (entry.rows == 0 && try_claim(entry)) return i;
            }
            const std::int64_t unused = control_->used;
            if (unused < kMaxWriters && try_claim(control_->writers[unused])) return control_->used++;
        }
        return kMaxWriters;
    }

    static bool try_claim(WriterEntry& entry) {
        const LockResult result = entry.lock.try_lock();
        if (result == LockResult::owner_died) entry.lock.mark_consistent();
        return result != LockResult::busy;
    }

    /// Restore everything that a process may have left incomplete when it died with the lock. Starts again if
    /// it is interrupted. Allocates no memory.
    void repair() {
        for (WriterEntry& entry : control_->writers) release_if_dead(entry);
        std::int64_t committed = 0, filled = 0, newest = load(control_->written);
        double largest = max_priority();
        for (std::int64_t slot = 0; slot < capacity_; ++slot) {
            std::int64_t generation = load(generations_[slot]);
            if (generation < 0 && !is_open(-generation)) store(generations_[slot], generation = 0);
            newest = std::max(newest, generation < 0 ? -generation : generation);
            committed += generation > 0 ? 1 : 0;
            if (generation != 0) filled = slot + 1;
            if (tree_ == nullptr) continue;
            if (generation > 0) {
                largest = std::max(largest, priorities_[slot]);
            } else {
                tree_->leaves()[slot] = priorities_[slot] = 0.0;
            }
        }
        filled = std::max(filled, load(control_->filled));
        store(control_->committed, committed);
        store(control_->holes, filled - committed);
        store(control_->written, newest + 1);  // readers in the middle of a copy compare generations
        store(control_->filled, filled);
        if (tree_ == nullptr) return;
        set_max_priority(largest);
        tree_->rebuild();
    }

    /// Whether a living writer has reserved the row of this serial number.
    bool is_open(std::int64_t serial) const {
        return std::any_of(control_->writers, control_->writers + control_->used,
                           [serial, this](const WriterEntry& entry) {
                               return entry.rows > 0 && entry.epoch == load(control_->epoch) &&
                                      serial >= entry.serial && serial < entry.serial + entry.rows;
                           });
    }

    Control* control_;
    std::int64_t capacity_;
    Word* generations_ = nullptr;
    double* priorities_ = nullptr;
    std::unique_ptr<SumTree> tree_;
    std::atomic<std::uintptr_t> holder_ = 0;  // thread of this process that holds the lock
    std::int64_t depth_ = 0;                  // how many times; guarded by the lock
};

}  // namespace ostinato
#endif
