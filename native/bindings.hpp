// The parts of the Python module, one translation unit each.
#pragma once

#include <nanobind/nanobind.h>

namespace ostinato {

void bind_fields(nanobind::module_& m);
void bind_batches(nanobind::module_& m);
void bind_direct(nanobind::module_& m);
void bind_tensor_check(nanobind::module_& m);
void bind_shuffle(nanobind::module_& m);
void bind_priorities(nanobind::module_& m);
void bind_episodes(nanobind::module_& m);
void bind_nstep(nanobind::module_& m);
void bind_windows(nanobind::module_& m);
void bind_single_copy(nanobind::module_& m);
void bind_positioned_reads(nanobind::module_& m);
void bind_shared_ring(nanobind::module_& m);

}  // namespace ostinato
