"""The workloads: what is measured, at which size, with which targets. How each library does it: `peers/`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.targets import AddsAtMost, AheadOfAll, AtMost, Target, TimesPeer, WithinLimit, WorstWithin

MILLION = 1_000_000
IMAGE_ROWS = 10_000
US = 1e-6


@dataclass(frozen=True)
class Workload:
    """One thing that every library does as well as it can.

    Attributes:
        name: `family.kind`; `--only` selects families or whole names. The kind says which batches go in and
            come out: `dict` stands for the library's own kind where it has no choice (numpy, Batch).
        title: One line for the table.
        limit: What the limit rows do.
        rows: Capacity of the buffer, full before the first measured call.
        batch: Rows per call.
        seconds: How long one round lasts.
        min_calls: Calls per round at least, whatever they take.
        targets: Judged on the results.
    """

    name: str
    title: str
    limit: str
    rows: int
    batch: int
    seconds: float = 0.15
    min_calls: int = 20
    warmup_s: float = 0.03
    targets: tuple[Target, ...] = ()

    @property
    def family(self) -> str:
        """The part of the name before the dot."""
        return self.name.partition(".")[0]

    @property
    def kind(self) -> str:
        """The part of the name after the dot."""
        return self.name.partition(".")[2]

    def quick(self) -> Workload:
        """Return a smaller one for a look in passing; its numbers are not those of the full size."""
        rows = max(self.rows // 20, 4 * self.batch) if self.rows else 0
        title = f"{self.title} (quick: {rows:,} rows)" if rows else self.title
        calls = max(self.min_calls // 10, 1)
        return replace(self, title=title, rows=rows, seconds=0.03, warmup_s=0.01, min_calls=calls)


_GATHER = (
    "bare C: draw fresh random rows, copy them into preallocated memory (packed rows, or field by field)"
)
_RING = "bare C: memcpy the rows to the ring's cursor (packed rows, or field by field)"


def _both(
    base: Workload, dict_targets: tuple[Target, ...], td_targets: tuple[Target, ...]
) -> tuple[Workload, ...]:
    return (
        replace(base, name=f"{base.name}.dict", title=f"{base.title}, dict", targets=dict_targets),
        replace(base, name=f"{base.name}.tensordict", title=f"{base.title}, TensorDict", targets=td_targets),
    )


_EXTEND = (TimesPeer("torchrl", 12),)
_ADD = (TimesPeer("torchrl", 10),)
_IMAGES = (AheadOfAll(), WithinLimit(1.2))
_MMAP = (TimesPeer("torchrl", 6),)
_AMP = (AtMost(400 * US), WorstWithin(5))
_CPPRB = TimesPeer("cpprb", 1)

WORKLOADS: tuple[Workload, ...] = (
    *_both(
        Workload("uniform", "uniform sample(256) of 1,000,000 rows", _GATHER, MILLION, 256),
        (AtMost(30 * US), TimesPeer("torchrl", 6), TimesPeer("cpprb", 2.3)),
        (AtMost(35 * US), TimesPeer("torchrl", 6)),
    ),
    *_both(
        Workload("extend", "extend of 256 rows, ring of 1,000,000", _RING, MILLION, 256),
        (*_EXTEND, _CPPRB),
        _EXTEND,
    ),
    *_both(Workload("add", "add of one row, ring of 1,000,000", _RING, MILLION, 1), (*_ADD, _CPPRB), _ADD),
    *_both(
        Workload(
            "images", "sample(32) of 10,000 rows of two 84x84x4 uint8", _GATHER, IMAGE_ROWS, 32, min_calls=100
        ),
        _IMAGES,
        _IMAGES,
    ),
    *_both(
        Workload(
            "mmap",
            "memory-mapped: extend(256) + sample(256), 1,000,000 rows",
            f"{_RING}, then {_GATHER}",
            MILLION,
            256,
        ),
        (*_MMAP, _CPPRB),
        _MMAP,
    ),
    *_both(
        # More calls than one pass over the ring has batches (244), so that every round meets its reshuffle.
        Workload(
            "amp",
            "store 4096 + sample 4096 without replacement, 64 float32, ring of 1,000,000",
            "bare C, or torch's index_select(out=): copy to the ring, then gather along a ready permutation",
            MILLION,
            4096,
            min_calls=260,
        ),
        _AMP,
        _AMP,
    ),
    Workload(
        "start.import",
        "process that imports torch and the library",
        "process that imports torch alone",
        0,
        0,
        seconds=0,
        min_calls=1,
        warmup_s=0,
        targets=(AddsAtMost(0.1, "limit-torch"),),
    ),
    Workload(
        "start.first-batch",
        "process start to the first batch of 256",
        "process that imports torch alone",
        0,
        256,
        seconds=0,
        min_calls=1,
        warmup_s=0,
    ),
)


def select(only: str | None, *, quick: bool) -> tuple[Workload, ...]:
    """Return the workloads whose name or family stands in `only` (all when None).

    Raises:
        ValueError: A word in `only` names none.
    """
    chosen = WORKLOADS
    if only is not None:
        words = [word.strip() for word in only.split(",") if word.strip()]
        known = {name for load in WORKLOADS for name in (load.name, load.family)}
        unknown = [word for word in words if word not in known]
        if unknown:
            msg = f"workloads must be among {', '.join(sorted(known))}; got {', '.join(unknown)}"
            raise ValueError(msg)
        chosen = tuple(load for load in WORKLOADS if load.name in words or load.family in words)
    return tuple(load.quick() for load in chosen) if quick else chosen
