// The Python face of the ring that processes share. Waiting is done here: without the interpreter lock, in
// short spells, so that signals are heard, and never without end.
#pragma once

#include <nanobind/nanobind.h>

#include "shared.hpp"

#if defined(OSTINATO_HAS_SHARED)

#include <sys/mman.h>
#include <sys/syscall.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

namespace ostinato::shared {

namespace nb = nanobind;
using namespace nb::literals;

constexpr std::int64_t kSpell = 50;  // milliseconds between two looks at signals

[[noreturn]] inline void refuse(const std::string& message) {
    const nb::object error = nb::module_::import_("ostinato.errors").attr("UsageError");
    PyErr_SetString(error.ptr(), message.c_str());
    throw nb::python_error();
}

inline std::string show_patience(const SharedRing& ring) { return std::to_string(ring.patience / 1000); }

inline void hear_signals() {
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

inline void lock(SharedRing& ring) {
    if (ring.try_lock()) return;
    for (std::int64_t waited = 0; waited < ring.patience; waited += kSpell) {
        {
            nb::gil_scoped_release unlocked;
            if (ring.lock_for(kSpell)) return;
        }
        hear_signals();
    }
    refuse("the lock of this shared buffer was held for " + show_patience(ring) + " s, last by process " +
           std::to_string(ring.owner()) + ": let it go on, or end it");
}

/// For as long as one native call takes.
class Locked {
public:
    explicit Locked(SharedRing& ring) : ring_(ring) { lock(ring); }
    ~Locked() { ring_.unlock(); }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;

private:
    SharedRing& ring_;
};

inline nb::object enter(const nb::object& ring) {
    lock(nb::cast<SharedRing&>(ring));
    return ring;
}

inline void leave(SharedRing& ring, const nb::args& error) {
    (void)error;
    ring.unlock();
}

inline nb::tuple reserve(SharedRing& ring, std::int64_t rows, std::int64_t total) {
    for (std::int64_t waited = 0;; ++waited) {
        std::optional<SharedRing::Place> place;
        {
            const Locked locked(ring);
            place = ring.reserve(rows, total);
        }
        if (place.has_value()) return nb::make_tuple(place->serial, place->start);
        if (waited >= ring.patience) break;
        {
            nb::gil_scoped_release unlocked;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        hear_signals();
    }
    refuse("no room for " + std::to_string(rows) + " of " + std::to_string(ring.capacity()) + " rows in " +
           show_patience(ring) + " s: writers that live, but do not go on, are in the way (at most " +
           std::to_string(SharedRing::kSeats) +
           " write at a time); write smaller batches, or make the buffer larger");
}

inline void commit(SharedRing& ring, std::int64_t serial) {
    const Locked locked(ring);
    ring.commit(serial);
}

inline void abandon(SharedRing& ring, std::int64_t serial) {
    const Locked locked(ring);
    ring.abandon(serial);
}

inline nb::tuple now(const SharedRing& ring) {
    const Moment moment = ring.now();
    return nb::make_tuple(moment.written, moment.holes, moment.filled, moment.committed);
}

inline void stamps_of(const SharedRing& ring, Address slots, std::int64_t n, Address out) {
    if (n < 0) throw std::invalid_argument("n must be at least 0, got " + std::to_string(n));
    ring.stamps_of(items_at<const std::int64_t>(slots, n, "slots"), n, items_at<std::int64_t>(out, n, "out"));
}

inline std::int64_t changed(const SharedRing& ring, Address slots, std::int64_t n, std::int64_t written,
                            Address out) {
    if (n < 0) throw std::invalid_argument("n must be at least 0, got " + std::to_string(n));
    return ring.changed(items_at<const std::int64_t>(slots, n, "slots"), n, written,
                        items_at<unsigned char>(out, n, "out"));
}

inline std::int64_t present(const SharedRing& ring, Address out, std::int64_t room) {
    auto* slots = items_at<std::int64_t>(out, room, "out");
    nb::gil_scoped_release unlocked;
    return ring.present(slots, room);
}

/// Memory without a name, which goes with the last process that has it; it cannot shrink under anybody's
/// feet.
inline int make_memory() {
    const auto fd = static_cast<int>(syscall(SYS_memfd_create, "ostinato", MFD_CLOEXEC));
    if (fd < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
    return fd;
}

inline void bind(nb::module_& m) {
    m.def("make_shared_memory", &make_memory);
    nb::class_<SharedRing>(m, "SharedRing", "The slots of a ring that processes share.")
        .def(nb::init<Address, std::int64_t, bool, bool>(), "address"_a, "capacity"_a, "ranked"_a, "fresh"_a)
        .def_static("bytes_for", &SharedRing::bytes_for, "capacity"_a, "ranked"_a)
        .def("__enter__", &enter)
        .def("__exit__", &leave)
        .def("reserve", &reserve, "rows"_a, "total"_a)
        .def("holds", &SharedRing::holds, "serial"_a)
        .def("commit", &commit, "serial"_a)
        .def("abandon", &abandon, "serial"_a)
        .def("clear", &SharedRing::clear, "cursor"_a)
        .def("writers", &SharedRing::writers)
        .def("now", &now)
        .def("untouched", &SharedRing::untouched, "written"_a)
        .def("stamps_of", &stamps_of, "slots"_a, "n"_a, "out"_a)
        .def("changed", &changed, "slots"_a, "n"_a, "written"_a, "out"_a)
        .def("present", &present, "out"_a, "room"_a)
        .def("add", &SharedRing::add, "which"_a, "n"_a)
        .def("count", &SharedRing::count, "which"_a)
        .def_prop_ro("capacity", &SharedRing::capacity)
        .def_prop_ro("cursor", &SharedRing::cursor)
        .def_prop_ro("stamps", &SharedRing::stamps)
        .def_prop_ro("priorities", &SharedRing::priorities)
        .def_prop_ro("tree", &SharedRing::tree, nb::rv_policy::reference_internal)
        .def_rw("patience", &SharedRing::patience)
        .def_prop_rw("largest", &SharedRing::largest, &SharedRing::set_largest);
}

}  // namespace ostinato::shared
#endif
