// Python bindings of the ring that processes share. Waits are here: without the interpreter lock, in short
// intervals between which signals are handled, and limited by a timeout.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "bindings.hpp"
#include "pointers.hpp"
#include "shared_ring.hpp"

#if defined(OSTINATO_HAS_SHARED_RING)

#include <sys/mman.h>
#include <sys/syscall.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

namespace ostinato {
namespace {

using namespace nb::literals;

constexpr std::int64_t kInterval = 50;  // milliseconds between two checks for signals

[[noreturn]] void raise_usage_error(const std::string& message) {
    const nb::object error = nb::module_::import_("ostinato.errors").attr("UsageError");
    PyErr_SetString(error.ptr(), message.c_str());
    throw nb::python_error();
}

std::string timeout_of(const SharedRing& ring) { return std::to_string(ring.timeout_ms / 1000); }

void handle_signals() {
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void lock(SharedRing& ring) {
    if (ring.try_lock()) return;
    for (std::int64_t waited = 0; waited < ring.timeout_ms; waited += kInterval) {
        {
            nb::gil_scoped_release released;
            if (ring.lock_for(kInterval)) return;
        }
        handle_signals();
    }
    raise_usage_error("the lock of this shared buffer was held for " + timeout_of(ring) +
                      " s, last by process " + std::to_string(ring.owner()) +
                      ": let that process go on, or end it");
}

/// Holds the lock during one native call.
class LockGuard {
public:
    explicit LockGuard(SharedRing& ring) : ring_(ring) { lock(ring); }
    ~LockGuard() { ring_.unlock(); }
    LockGuard(const LockGuard&) = delete;
    LockGuard& operator=(const LockGuard&) = delete;

private:
    SharedRing& ring_;
};

void make(SharedRing* self, Pointer<Byte> memory, std::int64_t capacity, bool prioritized, bool create) {
    new (self) SharedRing(memory.or_null(), capacity, prioritized, create);
}

nb::object enter(const nb::object& ring) {
    lock(nb::cast<SharedRing&>(ring));
    return ring;
}

void leave(SharedRing& ring, const nb::args&) { ring.unlock(); }

std::pair<std::int64_t, std::int64_t> reserve(SharedRing& ring, std::int64_t rows, std::int64_t total) {
    for (std::int64_t waited = 0;; ++waited) {
        std::optional<SharedRing::Reservation> reserved;
        {
            const LockGuard locked(ring);
            reserved = ring.reserve(rows, total);
        }
        if (reserved.has_value()) return {reserved->serial, reserved->start};
        if (waited >= ring.timeout_ms) break;
        {
            nb::gil_scoped_release released;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        handle_signals();
    }
    raise_usage_error("no room for " + std::to_string(rows) + " of " + std::to_string(ring.capacity()) +
                      " rows in " + timeout_of(ring) +
                      " s: other writers are alive, but do not finish (at most " +
                      std::to_string(SharedRing::kMaxWriters) +
                      " write at a time); write smaller batches, or make the buffer larger");
}

void commit(SharedRing& ring, std::int64_t serial) {
    const LockGuard locked(ring);
    ring.commit(serial);
}

void abandon(SharedRing& ring, std::int64_t serial) {
    const LockGuard locked(ring);
    ring.abandon(serial);
}

std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> state(const SharedRing& ring) {
    const RingState now = ring.state();
    return {now.written, now.holes, now.filled, now.committed};
}

void generations_of(const SharedRing& ring, Pointer<const std::int64_t> slots, std::int64_t n,
                    Pointer<std::int64_t> out) {
    require_count(n);
    ring.generations_of(slots.items(n, "slots"), n, out.items(n, "out"));
}

std::int64_t changed(const SharedRing& ring, Pointer<const std::int64_t> slots, std::int64_t n,
                     std::int64_t written, Pointer<Flag> out) {
    require_count(n);
    return ring.changed(slots.items(n, "slots"), n, written, out.items(n, "out"));
}

std::int64_t committed_slots(const SharedRing& ring, Pointer<std::int64_t> out, std::int64_t limit) {
    auto* slots = out.items(limit, "out");
    nb::gil_scoped_release released;
    return ring.committed_slots(slots, limit);
}

/// The address of the generations; Python reads the atomic words as plain int64.
Pointer<std::int64_t> generations(const SharedRing& ring) {
    return Pointer<std::int64_t>(reinterpret_cast<std::int64_t*>(ring.generations()));
}

Pointer<double> priorities(const SharedRing& ring) { return Pointer<double>(ring.priorities()); }

int make_shared_memory() {
    const auto fd = static_cast<int>(syscall(SYS_memfd_create, "ostinato", MFD_CLOEXEC));
    if (fd < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
    return fd;
}

constexpr const char* kMakeSharedMemoryDoc = R"(
    Create anonymous shared memory of size 0, and return its file descriptor. Linux only.

    The memory is freed when the last process that has it ends.

    Raises:
        OSError: The system call failed.
)";

constexpr const char* kSharedRingDoc = R"(
    The slots of a ring that processes share, in memory that all of them map. Linux only.

    As a context manager it holds the lock between processes, which a thread may take several times. Every
    wait handles signals, and ends after `timeout_ms` milliseconds with `ostinato.errors.UsageError`. A
    process that takes the lock after its owner died repairs the ring first.
)";

constexpr const char* kInitDoc = R"(
    Create a ring in memory of zeros (`create`), or attach to an existing one.

    Raises:
        ValueError: The memory holds no ring of this capacity and kind, or is not aligned to 64 bytes.
)";

constexpr const char* kReserveDoc = R"(
    Reserve slots for the last `rows` rows of a batch of `total`.

    Returns:
        The serial number of the first of them, and its slot.
)";

constexpr const char* kIsCurrentDoc = R"(
    Return whether the ring was not cleared since this serial number was reserved. Needs the lock.
)";

constexpr const char* kCommitDoc = R"(
    Make the rows that were reserved from this serial number on readable.

    Raises:
        IndexError: Nothing is reserved from this number.
)";

constexpr const char* kGenerationsOfDoc = R"(
    Write the generations of int64 `[n]` at `slots` to int64 `[n]` at `out`.

    Raises:
        IndexError: A slot out of range.
)";

constexpr const char* kChangedDoc = R"(
    Mark slots that hold no complete row now, or a row newer than `written`, and return their number.

    Args:
        slots: Address of int64 `[n]`.
        n: Number of slots.
        written: A serial number.
        out: Address of bool `[n]` to write.

    Raises:
        IndexError: A slot out of range.
)";

}  // namespace

void bind_shared_ring(nb::module_& m) {
    m.def("make_shared_memory", &make_shared_memory, kMakeSharedMemoryDoc);
    nb::class_<SharedRing>(m, "SharedRing", kSharedRingDoc)
        .def("__init__", &make, "address"_a, "capacity"_a, "prioritized"_a, "create"_a, kInitDoc)
        .def_static("bytes_for", &SharedRing::bytes_for, "capacity"_a, "prioritized"_a,
                    "Return the bytes of memory that a ring needs.")
        .def("__enter__", &enter, nb::sig("def __enter__(self) -> typing.Self"))
        .def("__exit__", &leave, nb::sig("def __exit__(self, *args: object) -> None"))
        .def_rw("timeout_ms", &SharedRing::timeout_ms, "Milliseconds that this process waits.")
        .def_prop_rw("max_priority", &SharedRing::max_priority, &SharedRing::set_max_priority,
                     "Largest priority ever set.")
        .def_prop_ro("capacity", &SharedRing::capacity, "Slots.")
        .def_prop_ro("cursor", &SharedRing::cursor, "Slot of the next reservation.")
        .def_prop_ro("rows", &SharedRing::rows, "Slots from this one on were never reserved.")
        .def_prop_ro(
            "written", &SharedRing::written,
            "The last serial number. For a reader, after its copy: where it is that of the draw, no slot "
            "was reserved.")
        .def_prop_ro(
            "in_order", [](const SharedRing&) { return true; }, "Whether rows are written in ring order.")
        .def_prop_ro(
            "reserved_from", [](const SharedRing&) { return std::numeric_limits<std::int64_t>::max(); },
            "See `RingCounts`: no write has to be looked at.")
        .def_prop_ro("generations", &generations, "Address of int64 `[capacity]`.")
        .def_prop_ro("priorities", &priorities, "Address of float64 `[capacity]`; 0 without priorities.")
        .def_prop_ro("tree", &SharedRing::tree, nb::rv_policy::reference_internal,
                     nb::sig("def tree(self) -> SumTree | None"),
                     "The tree of leaves; None without priorities.")
        .def("reserve", &reserve, "rows"_a, "total"_a, kReserveDoc)
        .def("is_current", &SharedRing::is_current, "serial"_a, kIsCurrentDoc)
        .def("commit", &commit, "serial"_a, kCommitDoc)
        .def("abandon", &abandon, "serial"_a,
             "Give up a reservation from this serial number on, if it was not committed.")
        .def("clear", &SharedRing::clear, "cursor"_a,
             "Remove all rows and continue at a slot. Needs the lock.")
        .def("writers", &SharedRing::writers,
             "Count living writers between reserve and commit. Needs the lock.")
        .def("state", &state, "Return the last serial number, holes, slots ever reserved, and complete rows.")
        .def("generations_of", &generations_of, "slots"_a, "n"_a, "out"_a, kGenerationsOfDoc)
        .def("changed", &changed, "slots"_a, "n"_a, "written"_a, "out"_a, kChangedDoc)
        .def("committed_slots", &committed_slots, "out"_a, "limit"_a,
             "Write the slots below `limit` that hold complete rows to int64 `[limit]` at `out`; return "
             "their number.")
        .def("add", &SharedRing::add, "which"_a, "n"_a,
             "Add to a count of all processes; return its old value.")
        .def("count", &SharedRing::count, "which"_a, "Return a count of all processes.");
}

}  // namespace ostinato

#else

void ostinato::bind_shared_ring(nanobind::module_&) {}

#endif
