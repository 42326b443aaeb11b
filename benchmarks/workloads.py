"""The workloads: what is measured, at which size, with which targets. How each library does it: `peers/`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.adapter import KINDS
from benchmarks.targets import (
    AheadOfAll,
    AtMost,
    AtMostAbove,
    GrowthWithinLimit,
    TailWithin,
    Target,
    TimesPeer,
    WithinLimit,
    WorstWithin,
)

MILLION = 1_000_000
IMAGE_ROWS = 10_000
US = 1e-6


@dataclass(frozen=True)
class Workload:
    """One thing that every library does as well as it can.

    Attributes:
        name: `family.kind`; `--only` selects families or whole names. The kind says which batches go in and
            come out, see `adapter.Setup`.
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
    seconds: float = 0.12
    min_calls: int = 20
    warmup_s: float = 0.02
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
        seconds, warmup_s = (0.03, 0.01) if rows else (0.0, 0.0)
        return replace(self, title=title, rows=rows, seconds=seconds, warmup_s=warmup_s, min_calls=calls)


_GATHER = "draw fresh random rows and copy them into preallocated memory, nothing else"
_TREE = "draw from a bare sum tree, copy the rows, write 256 new leaves, nothing else"
_RING = "copy the rows to the ring's cursor, nothing else"
_SLICES = "copy slices drawn in advance to preallocated memory (and 256 rows in), nothing else"
_PLAIN = "Ostinato's plain sample of rows that hold the same bytes ready-made"
_START = "a process that imports torch alone"


def _kinds(base: Workload, targets: tuple[Target, ...], **more: tuple[Target, ...]) -> tuple[Workload, ...]:
    """Return one workload per kind of batch: `targets` hold for each, `more` for one kind."""
    titles = zip(KINDS, ("dict", "TensorDict", "TensorDictReplayBuffer"), strict=True)
    return tuple(
        replace(
            base,
            name=f"{base.name}.{kind}",
            title=f"{base.title}, {words}",
            targets=(*more.get(kind, ()), *targets),
        )
        for kind, words in titles
    )


_CPPRB = TimesPeer("cpprb", 1)
_RLOX = TimesPeer("rlox", 1)
_EXTEND = (WithinLimit(1.5), _RLOX, TimesPeer("sb3", 1), _CPPRB)
_ADD = (TimesPeer("sb3", 1 / 2), _CPPRB)
_UNIT = (WithinLimit(1.5),)
_IMAGES = (WithinLimit(1.05),)
_SLICES_TARGET = WithinLimit(1.8)


def _above_dict(family: str) -> tuple[Target, ...]:
    return (AtMostAbove(f"{family}.dict", 5 * US),)


WORKLOADS: tuple[Workload, ...] = (
    *_kinds(
        Workload("uniform", "uniform sample(256) of 1,000,000 rows", _GATHER, MILLION, 256),
        (TimesPeer("torchrl", 6),),
        dict=(WithinLimit(1.5), _RLOX, TimesPeer("cpprb", 2.3)),
        tensordict=_above_dict("uniform"),
    ),
    Workload(
        "uniform-out.dict",
        "sample(256, out=batch) of 1,000,000 rows",
        _GATHER,
        MILLION,
        256,
        targets=(WithinLimit(1.25),),
    ),
    *_kinds(
        Workload("extend", "extend of 256 rows, ring of 1,000,000", _RING, MILLION, 256),
        (TimesPeer("torchrl", 12),),
        dict=_EXTEND,
        tensordict=_above_dict("extend"),
    ),
    Workload(
        "extend.numpy", "extend of 256 rows of NumPy arrays, ring of 1,000,000", _RING, MILLION, 256, targets=_EXTEND
    ),
    *_kinds(
        Workload("add", "add of one row, ring of 1,000,000", _RING, MILLION, 1),
        (TimesPeer("torchrl", 10),),
        dict=_ADD,
        tensordict=_above_dict("add"),
    ),
    Workload(
        "add.numpy",
        "add of one row of NumPy arrays and Python scalars, ring of 1,000,000",
        _RING,
        MILLION,
        1,
        targets=_ADD,
    ),
    *_kinds(
        Workload(
            "prioritized", "prioritized sample + update of 256 of 1,000,000 rows", _TREE, MILLION, 256, min_calls=100
        ),
        (TimesPeer("torchrl", 6),),
        dict=(WithinLimit(1.4), TimesPeer("cpprb", 4.5), TimesPeer("tianshou", 2.5), _RLOX),
        tensordict=_above_dict("prioritized"),
    ),
    *(
        Workload(
            f"prioritized-rows.{rows:.0e}".replace("+0", ""),
            f"the same of {rows:,} rows, dict",
            _TREE,
            rows,
            256,
            min_calls=100,
            targets=targets,
        )
        for rows, targets in ((10_000, ()), (100_000, ()), (10_000_000, (GrowthWithinLimit("prioritized-rows.1e4"),)))
    ),
    *(
        Workload(
            f"prioritized-threads.{threads}",
            f"prioritized sample(4096) of 1,000,000 rows in {threads} thread{'s' * (threads > 1)}, time per sample",
            "nothing",
            MILLION,
            4096,
            min_calls=10,
        )
        for threads in (1, 2)
    ),
    *(
        Workload(
            f"priority-update.{count:.0e}-of-{rows:.0e}".replace("+0", ""),
            f"update of {count:,} priorities of {rows:,} rows, time per 1,000",
            "nothing",
            rows,
            count,
            min_calls=10,
        )
        for rows in (MILLION, 10 * MILLION)
        for count in (1_000, 100_000)
    ),
    *_kinds(
        Workload("slices", "64 slices of 16 of 1,000,000 rows", _SLICES, MILLION, 1024),
        (TimesPeer("torchrl", 12),),
        dict=(_SLICES_TARGET, _RLOX),
    ),
    *_kinds(
        Workload(
            "slices-writing", "extend(256) + 64 slices of 16, 1,000,000 rows", _SLICES, MILLION, 1024, min_calls=20
        ),
        (TimesPeer("torchrl", 50),),
        dict=(_SLICES_TARGET, _RLOX),
    ),
    *(
        Workload(
            f"slices-rows.{rows:.0e}".replace("+0", ""),
            f"64 slices of 16 of {rows:,} rows, dict",
            _SLICES,
            rows,
            1024,
            targets=(_SLICES_TARGET,),
        )
        for rows in (100_000, 10_000_000)
    ),
    Workload(
        "n-step.dict",
        "256 transitions over 3 steps, 1,000,000 rows",
        _PLAIN,
        MILLION,
        256,
        targets=(WithinLimit(1.6),),
    ),
    Workload(
        "frame-stack.dict",
        "32 stacks of 4 frames 84x84, 10,000 rows",
        _PLAIN,
        IMAGE_ROWS,
        32,
        min_calls=100,
        targets=(WithinLimit(1.2),),
    ),
    Workload("single-copy.dict", "256 transitions of rows stored once, 1,000,000", _PLAIN, MILLION, 256, targets=_UNIT),
    *(
        Workload(
            f"shared.{kind}",
            f"{title}, 1,000,000 rows that processes share",
            "the same in a buffer of one process",
            MILLION,
            256,
            min_calls=100,
            targets=_UNIT,
        )
        for kind, title in (
            ("sample", "uniform sample(256)"),
            ("extend", "extend of 256 rows"),
            ("prioritized", "prioritized sample + update of 256"),
        )
    ),
    Workload(
        "images.dict",
        "sample(32) of 10,000 rows of two 84x84x4 uint8",
        _GATHER,
        IMAGE_ROWS,
        32,
        min_calls=100,
        targets=(AheadOfAll(), *_IMAGES),
    ),
    Workload(
        "images-out.dict",
        "sample(32, out=batch) of 10,000 rows of two 84x84x4 uint8",
        _GATHER,
        IMAGE_ROWS,
        32,
        min_calls=100,
        targets=_IMAGES,
    ),
    Workload(
        "threads.4",
        "uniform sample(256) of 1,000,000 rows in 4 threads, time per sample",
        "as many samples in one thread",
        MILLION,
        256,
        min_calls=10,
        targets=(WithinLimit(1),),
    ),
    Workload(
        "latency.dict",
        "uniform sample(256) while another thread extends by 256 rows without pause",
        "nothing",
        MILLION,
        256,
        seconds=0.5,
        min_calls=200,
        targets=(TailWithin(3),),
    ),
    Workload(
        "mmap.dict",
        "memory-mapped: extend(256) + sample(256), 1,000,000 rows",
        "both in bare C (packed rows, or field by field)",
        MILLION,
        256,
        targets=(WithinLimit(1.6), TimesPeer("torchrl", 6), _CPPRB),
    ),
    # More calls than one pass over the ring has batches (244), so that every round meets its reshuffle.
    Workload(
        "amp.dict",
        "store 4096 + sample 4096 without replacement, 64 float32, ring of 1,000,000",
        "bare C, or torch's index_select(out=): copy to the ring, then gather along a ready permutation",
        MILLION,
        4096,
        min_calls=260,
        targets=(WithinLimit(1.6), WorstWithin(5)),
    ),
    *(
        Workload(
            f"trajectories.{name}",
            f"256 transitions from 200 rollouts in {name} files, two 64x64x3 uint8 each",
            "read 512 pictures by os.preadv into preallocated memory",
            200 * 200,
            256,
            min_calls=5,
            targets=(TimesPeer("rlinf", times),),
        )
        for name, times in (("safetensors", 100), ("pt", 20))
    ),
    *(
        Workload(
            f"checkpoint.{name}",
            title,
            "write and sync, or read into new memory, as many bytes of one plain file",
            MILLION,
            256,
            min_calls=3,
            targets=targets,
        )
        for name, title, targets in (
            ("save", "save 1,000,000 rows (165 MB), synced", (WithinLimit(1.25),)),
            ("load", "load 1,000,000 rows, checksums compared", (WithinLimit(1.25),)),
            ("patch", "extend by 256 of 1,000,000 rows and save what has changed", ()),
            ("map", "open 1,000,000 rows by mapping their files", (AtMost(0.05),)),
        )
    ),
    *(
        Workload(
            f"dataset.{kind}",
            f"{batch} windows of 8 frames {size} of two cameras, {how}",
            "nothing",
            rows,
            batch,
            seconds=0.5,
            min_calls=1,
            targets=(TimesPeer("lerobot", times),),
        )
        for size, name, rows, batch in (("96x96", "96", 2_000, 16), ("480x640", "480", 400, 4))
        for kind, how, times in (
            (name, "each decoded for its batch", 2.5),
            (f"{name}-cached", "decoded once and kept in memory", 20),
        )
    ),
    Workload(
        "dataset.open",
        "open a dataset of 10,000 episodes and sample its first 16 windows",
        "nothing",
        100_000,
        16,
        seconds=0,
        min_calls=3,
        warmup_s=0,
        targets=(AtMost(1), TimesPeer("lerobot", 1)),
    ),
    Workload(
        "start.import",
        "import of the buffer and its storage, in a process that has imported torch",
        "nothing",
        0,
        0,
        seconds=0,
        min_calls=1,
        warmup_s=0,
        targets=(AtMost(0.1),),
    ),
    Workload(
        "start.first-batch",
        "process start to the first batch of 256",
        _START,
        0,
        256,
        seconds=0,
        min_calls=1,
        warmup_s=0,
    ),
)


def select(only: str | None, *, quick: bool) -> tuple[Workload, ...]:
    """Return the workloads whose name or family stands in `only`.

    None selects all, or in a quick run all but those that start processes: they take most of the time.

    Raises:
        ValueError: A word in `only` names none.
    """
    chosen = tuple(load for load in WORKLOADS if load.rows or not quick)
    if only is not None:
        words = [word.strip() for word in only.split(",") if word.strip()]
        known = {name for load in WORKLOADS for name in (load.name, load.family)}
        unknown = [word for word in words if word not in known]
        if unknown:
            msg = f"workloads must be among {', '.join(sorted(known))}; got {', '.join(unknown)}"
            raise ValueError(msg)
        chosen = tuple(load for load in WORKLOADS if load.name in words or load.family in words)
    return tuple(load.quick() for load in chosen) if quick else chosen
