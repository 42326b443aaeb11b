// The Python module. Its parts are bound in bind_*.cpp; only these files, gil.hpp, pointers.hpp,
// tensor_check.hpp, exchange.hpp, batches.hpp and direct.hpp include Python headers.
#include <nanobind/nanobind.h>

#include "bindings.hpp"

NB_MODULE(_native, m) {
    // a thread that runs until the process ends keeps its objects: nanobind would report them as leaks
    nanobind::set_leak_warnings(false);
    m.doc() = R"(
        The native extension: batched copies, draws and bookkeeping on CPU memory.

        Memory is passed by address (`tensor.data_ptr()`); the name of an argument's type says what is stored
        there: `Int64Address` is the address of contiguous int64 elements, `BoolAddress` that of bool or uint8
        elements, `FloatAddress` that of float32 or float64 elements (another argument says which), and
        `RowsAddress` that of rows of any dtype. Callers check dtype, shape, device and contiguity, and keep
        the memory alive.

        Every function raises `ValueError` for the address 0, before anything is read or written, unless there
        is nothing to read or write or the argument is documented to allow 0. Tensors without memory (meta
        tensors, fake tensors) have the address 0.
    )";
    ostinato::bind_fields(m);
    ostinato::bind_batches(m);
    ostinato::bind_direct(m);
    ostinato::bind_tensor_check(m);
    ostinato::bind_shuffle(m);
    ostinato::bind_priorities(m);
    ostinato::bind_episodes(m);
    ostinato::bind_nstep(m);
    ostinato::bind_windows(m);
    ostinato::bind_single_copy(m);
    ostinato::bind_positioned_reads(m);
    ostinato::bind_shared_ring(m);
}
