// One ring of slots for the threads of many processes, in memory that all of them map: which slots hold whole
// rows, who is writing where, and, for prioritized sampling, the tree. No Python here, and no rows: these are
// copied by others, outside the lock, between `reserve` and `commit`.
//
// A writer reserves slots under the lock (their stamps become negative: open), copies its rows, and commits
// them under the lock (stamps become the positive serial numbers of the rows). Whoever reads looks at the
// stamps before the copy and after it. For the time of its copy a writer holds a seat, whose lock the kernel
// gives back when its owner dies: so a dead writer is told from a slow one, its slots are taken over when the
// ring comes round, and the slots of a slow one are passed over. Whoever finds that the owner of the main
// lock has died repairs first: everything follows from the stamps, the seats and the leaves.
#pragma once

#if defined(__linux__)
#define OSTINATO_HAS_SHARED

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

#include "platform.hpp"
#include "sum_tree.hpp"

namespace ostinato {

using Word = std::atomic<std::int64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == sizeof(std::int64_t));

/// What became of an attempt to take a lock.
enum class Taken { yes, from_the_dead, no };

/// A lock between processes. The kernel gives it back when its owner dies, and tells the next one so.
class RobustLock {
public:
    /// Once, in zeroed memory.
    void make() {
        pthread_mutexattr_t how;
        require(pthread_mutexattr_init(&how));
        require(pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED));
        require(pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST));
        require(pthread_mutexattr_settype(&how, PTHREAD_MUTEX_ERRORCHECK));
        require(pthread_mutex_init(&mutex_, &how));
        pthread_mutexattr_destroy(&how);
    }

    Taken try_lock() { return taken(pthread_mutex_trylock(&mutex_)); }

    Taken lock_for(std::int64_t milliseconds) {
        timespec until{};
        clock_gettime(CLOCK_REALTIME, &until);
        const std::int64_t nanoseconds = until.tv_nsec + milliseconds % 1000 * 1'000'000;
        until.tv_sec += static_cast<time_t>(milliseconds / 1000 + nanoseconds / 1'000'000'000);
        until.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000);
        return taken(pthread_mutex_timedlock(&mutex_, &until));
    }

    /// What the dead one has left is in order again.
    void heal() { pthread_mutex_consistent(&mutex_); }

    void unlock() { pthread_mutex_unlock(&mutex_); }

private:
    static void require(int error) {
        if (error != 0) throw std::system_error(error, std::generic_category(), "a lock between processes");
    }

    static Taken taken(int error) {
        if (error == 0) return Taken::yes;
        if (error == EOWNERDEAD) return Taken::from_the_dead;
        if (error == EBUSY || error == ETIMEDOUT || error == EDEADLK) return Taken::no;
        require(error);
        return Taken::no;
    }

    pthread_mutex_t mutex_;
};

/// Where a writer copies to; its lock is held from `reserve` to `commit`. No rows: nobody writes.
struct alignas(128) Seat {
    RobustLock lock;
    std::int64_t start, rows, serial, total, era;
};

/// What a reader must know before it draws.
struct Moment {
    std::int64_t written, holes, filled, committed;
};

class SharedRing {
public:
    static constexpr std::int64_t kSeats = 64;

    /// What `reserve` gave.
    struct Place {
        std::int64_t serial, start;
    };

    /// Counts that all processes add to.
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

    static std::size_t bytes_for(std::int64_t capacity, bool ranked) {
        const std::size_t words = to_lines(static_cast<std::size_t>(capacity) * sizeof(Word));
        const std::size_t ranks = ranked ? words + SumTree::bytes_for(capacity) : 0;
        return to_lines(sizeof(Control)) + words + ranks;
    }

    /// `fresh`: memory of zeros, which nobody else has seen yet; else it holds a ring of this form.
    SharedRing(Address address, std::int64_t capacity, bool ranked, bool fresh)
        : control_(at_address<Control>(address)), capacity_(capacity) {
        if (capacity < 1 || address == 0 || address % kLine != 0) {
            throw std::invalid_argument(
                "a shared ring needs a capacity of at least 1 and memory in whole lines");
        }
        const std::size_t words = to_lines(static_cast<std::size_t>(capacity) * sizeof(Word));
        const Address stamps = address + to_lines(sizeof(Control));
        stamps_ = at_address<Word>(stamps);
        if (ranked) {
            priorities_ = at_address<double>(stamps + words);
            tree_ = std::make_unique<SumTree>(capacity, at_address<void>(stamps + 2 * words));
        }
        if (fresh) {
            begin(ranked);
        } else if (control_->magic != kMagic || control_->capacity != capacity ||
                   (control_->ranked != 0) != ranked) {
            throw std::invalid_argument("this memory holds no shared ring of that form");
        }
    }

    std::int64_t patience = 30'000;  // milliseconds that this process waits before a wait is an error

    std::int64_t capacity() const { return capacity_; }
    std::int64_t owner() const { return control_->owner.load(std::memory_order_relaxed); }
    SumTree* tree() { return tree_.get(); }
    Address stamps() const { return reinterpret_cast<Address>(stamps_); }
    Address priorities() const { return reinterpret_cast<Address>(priorities_); }
    double largest() const { return control_->largest.load(std::memory_order_relaxed); }
    void set_largest(double value) { control_->largest.store(value, std::memory_order_relaxed); }
    std::int64_t cursor() const { return control_->cursor.load(std::memory_order_relaxed); }
    std::int64_t count(std::size_t which) const { return control_->counts[checked(which)].load(); }
    std::int64_t add(std::size_t which, std::int64_t n) {
        return control_->counts[checked(which)].fetch_add(n);
    }

    /// The holes are asked for before the rows: see `reserve`.
    Moment now() const {
        const std::int64_t written = control_->written.load(std::memory_order_acquire);
        const std::int64_t holes = control_->holes.load(std::memory_order_acquire);
        const std::int64_t filled = control_->filled.load(std::memory_order_acquire);
        return {written, holes, filled, control_->committed.load(std::memory_order_relaxed)};
    }

    // -- the lock
    // ---------------------------------------------------------------------------------------------

    bool try_lock() { return lock_by(0); }
    bool lock_for(std::int64_t milliseconds) { return lock_by(milliseconds); }

    void unlock() {
        if (--depth_ > 0) return;
        holder_.store(0, std::memory_order_relaxed);
        control_->lock.unlock();
    }

    // -- writing; the caller holds the lock
    // -------------------------------------------------------------------

    /// The next `rows` slots, for the last rows of a batch of `total`; nothing while living writers are in
    /// the way of all places. Readers that saw no hole before these stores, and the same `written` after
    /// their copy, met none of them: so holes come first and `filled` last.
    std::optional<Place> reserve(std::int64_t rows, std::int64_t total) {
        if (rows < 1 || rows > capacity_ || total < rows) {
            throw std::invalid_argument("rows must be in [1, capacity], and total no less");
        }
        const std::optional<std::int64_t> start =
            find_room((load(control_->cursor) + total - rows) % capacity_, rows);
        const std::int64_t number = start.has_value() ? take_seat() : kSeats;
        if (number == kSeats) return std::nullopt;
        Seat& seat = control_->seats[number];
        const std::int64_t serial = load(control_->written) + 1 + (total - rows);
        seat.start = *start;
        seat.serial = serial;
        seat.total = total;
        seat.era = load(control_->era);
        seat.rows = rows;
        std::int64_t gone = 0;
        for_run(*start, rows,
                [&](std::int64_t slot, std::int64_t) { gone += load(stamps_[slot]) > 0 ? 1 : 0; });
        const std::int64_t filled = std::max(load(control_->filled), std::min(*start + rows, capacity_));
        const std::int64_t committed = load(control_->committed) - gone;
        store(control_->committed, committed);
        store(control_->holes, filled - committed);
        store(control_->written, load(control_->written) + total);
        for_run(*start, rows,
                [&](std::int64_t slot, std::int64_t i) { store(stamps_[slot], -(serial + i)); });
        if (gone > 0 && tree_ != nullptr) {
            tree_->set_run(*start, rows, 0.0);
            for_run(*start, rows, [&](std::int64_t slot, std::int64_t) { priorities_[slot] = 0.0; });
        }
        store(control_->cursor, (*start + rows) % capacity_);
        store(control_->filled, filled);
        std::atomic_thread_fence(std::memory_order_release);
        return Place{serial, *start};
    }

    /// Whether the rows reserved from this serial number on are still wanted: not so if the ring was emptied
    /// since.
    bool holds(std::int64_t serial) const { return required(serial).era == load(control_->era); }

    /// The rows reserved from this serial number on are whole.
    void commit(std::int64_t serial) {
        Seat& own = required(serial);
        if (holds(serial)) {
            std::atomic_thread_fence(std::memory_order_release);
            for_run(own.start, own.rows,
                    [&](std::int64_t slot, std::int64_t i) { store(stamps_[slot], own.serial + i); });
            store(control_->committed, load(control_->committed) + own.rows);
            store(control_->holes, load(control_->filled) - load(control_->committed));
            add(kRowsWritten, own.total);
            add(kSinceEmpty, own.total);
        }
        leave(own);
    }

    /// These rows will never be whole. (Nothing happens if they are: a signal may come after the commit.)
    void abandon(std::int64_t serial) {
        Seat* own = find(serial);
        if (own == nullptr) return;
        close(*own);
        leave(*own);
    }

    /// How many living writers are between reserve and commit; the dead are cleared away.
    std::int64_t writers() {
        return std::count_if(control_->seats, control_->seats + control_->used,
                             [this](Seat& seat) { return seat.rows > 0 && !bury(seat); });
    }

    void clear(std::int64_t cursor) {
        require_in_range(&cursor, 1, capacity_);
        store(control_->era, load(control_->era) + 1);
        store(control_->written, load(control_->written) + 1);
        for (std::int64_t slot = 0; slot < load(control_->filled); ++slot) store(stamps_[slot], 0);
        store(control_->committed, 0);
        store(control_->filled, 0);
        store(control_->holes, 0);
        store(control_->cursor, cursor);
        control_->counts[kSinceEmpty].store(0);
        if (tree_ == nullptr) return;
        tree_->clear();
        std::fill_n(priorities_, capacity_, 0.0);
        set_largest(0.0);
    }

    // -- reading; no lock needed
    // ------------------------------------------------------------------------------

    /// Whether no slot was reserved since the write number `written`. To be asked after a copy.
    bool untouched(std::int64_t written) const {
        std::atomic_thread_fence(std::memory_order_acquire);
        return control_->written.load(std::memory_order_relaxed) == written;
    }

    void stamps_of(const std::int64_t* slots, std::int64_t n, std::int64_t* out) const {
        require_in_range(slots, n, capacity_);
        for (std::int64_t i = 0; i < n; ++i) {
            if (i + kAhead < n) prefetch<false>(stamps_ + slots[i + kAhead]);
            out[i] = stamps_[slots[i]].load(std::memory_order_acquire);
        }
    }

    /// Marks slots that do not hold a whole row now, or one newer than the write number `written`; how many
    /// there are. To be asked after a copy of slots that held whole rows before it.
    std::int64_t changed(const std::int64_t* slots, std::int64_t n, std::int64_t written,
                         unsigned char* out) const {
        require_in_range(slots, n, capacity_);
        std::atomic_thread_fence(std::memory_order_acquire);
        std::int64_t found = 0;
        for (std::int64_t i = 0; i < n; ++i) {
            if (i + kAhead < n) prefetch<false>(stamps_ + slots[i + kAhead]);
            const std::int64_t stamp = stamps_[slots[i]].load(std::memory_order_acquire);
            out[i] = stamp > 0 && stamp <= written ? 0 : 1;
            found += out[i];
        }
        return found;
    }

    /// The slots below `room` that hold whole rows, in order; how many there are. O(rows).
    std::int64_t present(std::int64_t* out, std::int64_t room) const {
        std::int64_t found = 0;
        const std::int64_t end = std::min(room, capacity_);
        for (std::int64_t slot = 0; slot < end; ++slot) {
            out[found] = slot;
            found += stamps_[slot].load(std::memory_order_acquire) > 0 ? 1 : 0;
        }
        return found;
    }

private:
    static constexpr std::size_t kLine = 64;
    static constexpr std::int64_t kAhead = 32;
    static constexpr std::int64_t kGate = 10;  // milliseconds
    static constexpr std::uint64_t kMagic = 0x676e697274736f31;

    struct Control {
        std::uint64_t magic;
        std::int64_t capacity, ranked;
        RobustLock lock, gate;
        Word owner;         // process that took the lock last
        Word cursor, era;   // era: how often the ring was emptied
        Word committed;     // slots that hold whole rows
        std::int64_t used;  // seats that were ever taken
        std::atomic<double> largest;
        Word counts[kCounts];
        alignas(kLine) Word written;  // what every reader reads has a line of its own
        Word holes;                   // slots below `filled` that hold no whole row
        Word filled;                  // slots from here on were never reserved
        alignas(kLine) Seat seats[kSeats];
    };

    static std::size_t to_lines(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
    static std::int64_t load(const Word& word) { return word.load(std::memory_order_relaxed); }
    static void store(Word& word, std::int64_t value) { word.store(value, std::memory_order_release); }

    static std::size_t checked(std::size_t which) {
        if (which >= kCounts) throw std::out_of_range("there is no such count");
        return which;
    }

    Seat* find(std::int64_t serial) const {
        Seat* end = control_->seats + control_->used;
        Seat* found = std::find_if(control_->seats, end, [serial](const Seat& seat) {
            return seat.rows > 0 && seat.serial == serial;
        });
        return found == end ? nullptr : found;
    }

    Seat& required(std::int64_t serial) const {
        Seat* found = find(serial);
        if (found == nullptr)
            throw std::out_of_range("nothing is reserved from the number " + std::to_string(serial));
        return *found;
    }

    template <typename Work>
    void for_run(std::int64_t start, std::int64_t rows, Work work) const {
        const std::int64_t before = std::min(rows, capacity_ - start);
        for (std::int64_t i = 0; i < before; ++i) work(start + i, i);
        for (std::int64_t i = before; i < rows; ++i) work(i - before, i);
    }

    void begin(bool ranked) {
        control_ = new (control_) Control{};
        control_->capacity = capacity_;
        control_->ranked = ranked ? 1 : 0;
        control_->lock.make();
        control_->gate.make();
        for (Seat& seat : control_->seats) seat.lock.make();
        control_->magic = kMagic;
    }

    /// Who waits has the gate, and comes next: else a process that takes the lock again and again would get
    /// it each time. A gate that does not open soon is that of a process that was stopped: then go round it.
    bool lock_by(std::int64_t milliseconds) {
        const auto self = static_cast<std::uintptr_t>(pthread_self());
        // (a process that was forked while another thread had the lock has a copy of `holder_`, but not the
        // lock)
        if (holder_.load(std::memory_order_relaxed) == self && owner() == getpid()) {
            ++depth_;
            return true;
        }
        const Taken gate = milliseconds > 0 ? control_->gate.lock_for(std::min(milliseconds, kGate))
                                            : control_->gate.try_lock();
        if (gate == Taken::from_the_dead) control_->gate.heal();
        if (gate == Taken::no && milliseconds == 0) return false;
        const Taken taken =
            milliseconds > 0 ? control_->lock.lock_for(milliseconds) : control_->lock.try_lock();
        if (gate != Taken::no) control_->gate.unlock();
        if (taken == Taken::no) return false;
        holder_.store(self, std::memory_order_relaxed);
        depth_ = 1;
        entered(taken);
        return true;
    }

    void entered(Taken taken) {
        store(control_->owner, getpid());
        if (taken == Taken::from_the_dead) {
            repair();
            add(kRepairs, 1);
            control_->lock.heal();
        }
    }

    /// Where `rows` slots begin that no living writer is at, from `start` on; the dead are cleared away.
    std::optional<std::int64_t> find_room(std::int64_t start, std::int64_t rows) {
        for (std::int64_t passed = 0; passed < capacity_;) {
            const Seat* busy = nullptr;
            for (std::int64_t i = 0; i < control_->used && busy == nullptr; ++i) {
                Seat& other = control_->seats[i];
                if (other.rows > 0 && overlap(start, rows, other) && !bury(other)) busy = &other;
            }
            if (busy == nullptr) return start;
            const std::int64_t next = (busy->start + busy->rows) % capacity_;
            passed += next > start ? next - start : next - start + capacity_;
            start = next;
        }
        return std::nullopt;
    }

    bool overlap(std::int64_t start, std::int64_t rows, const Seat& other) const {
        const auto distance = [this](std::int64_t from, std::int64_t to) {
            return to >= from ? to - from : to - from + capacity_;
        };
        return distance(start, other.start) < rows || distance(other.start, start) < other.rows;
    }

    /// Clears a seat whose owner has died; false if the owner lives.
    bool bury(Seat& seat) {
        const Taken taken = seat.lock.try_lock();
        if (taken == Taken::no) return false;
        if (taken == Taken::from_the_dead) seat.lock.heal();
        add(kLost, close(seat));
        leave(seat);
        return true;
    }

    /// The open slots of a seat hold nothing; how many there were.
    std::int64_t close(Seat& seat) {
        std::int64_t open = 0;
        for_run(seat.start, seat.rows, [&](std::int64_t slot, std::int64_t i) {
            if (load(stamps_[slot]) != -(seat.serial + i)) return;
            store(stamps_[slot], 0);
            ++open;
        });
        return open;
    }

    static void leave(Seat& seat) {
        seat.rows = 0;
        seat.lock.unlock();
    }

    /// A seat that nobody is in, its lock taken; kSeats if there is none.
    std::int64_t take_seat() {
        for (const bool dead : {false, true}) {
            for (std::int64_t i = 0; i < control_->used; ++i) {
                Seat& seat = control_->seats[i];
                if (dead && seat.rows > 0) bury(seat);
                if (seat.rows == 0 && sit_down(seat)) return i;
            }
            if (control_->used < kSeats && sit_down(control_->seats[control_->used])) return control_->used++;
        }
        return kSeats;
    }

    static bool sit_down(Seat& seat) {
        const Taken taken = seat.lock.try_lock();
        if (taken == Taken::from_the_dead) seat.lock.heal();
        return taken != Taken::no;
    }

    /// Brings all in order that somebody who died with the lock may have left half done. It may itself be cut
    /// short, and is begun anew then. Takes no memory.
    void repair() {
        for (std::int64_t i = 0; i < kSeats; ++i) bury(control_->seats[i]);
        std::int64_t committed = 0, filled = 0, newest = load(control_->written);
        double largest = this->largest();
        for (std::int64_t slot = 0; slot < capacity_; ++slot) {
            std::int64_t stamp = load(stamps_[slot]);
            if (stamp < 0 && !is_open(-stamp)) store(stamps_[slot], stamp = 0);
            newest = std::max(newest, stamp < 0 ? -stamp : stamp);
            committed += stamp > 0 ? 1 : 0;
            if (stamp != 0) filled = slot + 1;
            if (tree_ == nullptr) continue;
            if (stamp > 0) {
                largest = std::max(largest, priorities_[slot]);
            } else {
                tree_->leaves()[slot] = priorities_[slot] = 0.0;
            }
        }
        filled = std::max(filled, load(control_->filled));
        store(control_->committed, committed);
        store(control_->holes, filled - committed);
        store(control_->written, newest + 1);  // readers in the middle of a copy look closely
        store(control_->filled, filled);
        if (tree_ == nullptr) return;
        set_largest(largest);
        tree_->rebuild();
    }

    /// Whether a living writer has this serial number in its hands.
    bool is_open(std::int64_t serial) const {
        return std::any_of(control_->seats, control_->seats + control_->used,
                           [serial, this](const Seat& seat) {
                               return seat.rows > 0 && seat.era == load(control_->era) &&
                                      serial >= seat.serial && serial < seat.serial + seat.rows;
                           });
    }

    Control* control_;
    std::int64_t capacity_;
    Word* stamps_ = nullptr;
    double* priorities_ = nullptr;
    std::unique_ptr<SumTree> tree_;
    std::atomic<std::uintptr_t> holder_ = 0;  // thread of this process that has the lock
    std::int64_t depth_ = 0;                  // how often; guarded by the lock
};

}  // namespace ostinato
#endif
