"""Looks at the first rows of a buffer: whether its windows would join rows that do not follow each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.core.episodes.continuity import FLAGS, Continuity, compare, contradicts_order, find_mates
from ostinato.core.kinds import show_path
from ostinato.core.records import Request
from ostinato.errors import EpisodesWarning, warn_caller
from ostinato.storages import TensorStorage

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.episodes.tracker import Episodes, EpisodeTracker
    from ostinato.core.ring import Ring
    from ostinato.core.rows import Leaf, Path, Schema
    from ostinato.samplers import Sampler
    from ostinato.units import SampleUnit

_LEAST_ROWS, _MOST_ROWS = 64, 4096
_MOST_BYTES = 16 << 20
_MOST_ROW_BYTES = 64 << 10
_CORNER = 32
"""Steps and environments that are looked at to tell the order of dimensions."""
_IDS = {"env", "env_id", "env_ids", "env_index", "traj_id", "traj_ids", "episode", "episode_id", "episode_index"}
_STEPS = {"step", "step_count", "timestep", "frame_index"}


@final
class ContinuityCheck:
    """Looks at the first rows of a buffer that forms windows, and warns if they do not follow each other.

    It looks before draws and writes, when there are 64 rows and whenever they have doubled, until it has seen 4,096
    (of large observations fewer: 16 MB), or has warned. Each look compares the next observation of all these rows with
    the observation of the row after them in their episode. A buffer whose rows were edited or deleted is not looked at.
    """

    def __init__(self) -> None:
        self._seen = 0

    @staticmethod
    def begin(tracker: EpisodeTracker | None, unit: SampleUnit | None, sampler: Sampler) -> ContinuityCheck | None:
        """Return the check of a buffer; None if it forms no windows, or these cross the ends of episodes anyway."""
        windows = (unit is not None and unit.joins) or sampler.episodes is not None
        if tracker is None or not windows:
            return None
        wanted = tracker.wanted
        endless = wanted.end_key is not None and not wanted.end_paths and wanted.traj_key is None
        return None if endless else ContinuityCheck()

    def is_due(self, ring: Ring) -> bool:
        """Whether there are enough new rows to look at."""
        return self._seen < ring.rows >= min(max(_LEAST_ROWS, 2 * self._seen), ring.capacity)

    def look(self, storage: Any, tracker: EpisodeTracker, ring: Ring) -> bool:
        """Look at the rows, and return whether the check is over. The caller holds the lock.

        Warns: `EpisodesWarning`, if windows join rows that do not follow each other.
        """
        self._seen = ring.rows
        if not isinstance(storage, TensorStorage) or storage.schema is None or not ring.counts.in_order:
            return True
        fields = _observations(storage.schema)
        row_bytes = sum(2 * leaf.nbytes for leaf, _ in fields)
        if not row_bytes:
            return True
        most = max(1, min(_MOST_ROWS, _MOST_BYTES // row_bytes, ring.rows))
        slots = torch.arange(most, device=storage.device)
        after = tracker.table(storage).shift(slots, 1)
        inside = after != slots
        slots, after = slots[inside], after[inside]
        found = _compare(storage, fields, slots, after)
        if found.joined:
            first = [int(x[found.first]) for x in (slots, after)]
            warn_caller(_joined(found, fields[0], first, _shown(tracker.wanted, storage.schema)), EpisodesWarning)
            return True
        return most < ring.rows or most in {_MOST_ROWS, ring.capacity}


def _observations(schema: Schema) -> list[tuple[Leaf, Leaf]]:
    """Return observations and their next observations, small fields first, of bounded size together."""
    leaves = {leaf.path: leaf for leaf in schema.leaves}
    mates = find_mates(list(leaves)).items()
    pairs = [(leaves[obs], leaves[after]) for after, obs in mates if leaves[obs].shape == leaves[after].shape]
    pairs = sorted((pair for pair in pairs if pair[0].nbytes), key=lambda pair: pair[0].nbytes)
    size = 0
    chosen: list[tuple[Leaf, Leaf]] = []
    for pair in pairs:
        size += pair[0].nbytes
        if size <= _MOST_ROW_BYTES or not chosen:
            chosen.append(pair)
    return chosen


def _compare(storage: TensorStorage, fields: list[tuple[Leaf, Leaf]], slots: Tensor, after: Tensor) -> Continuity:
    """Compare the next observations of rows with the observations of the rows that follow; ragged fields are not."""
    if not slots.shape[0] or storage.schema is None:
        return Continuity()
    find, reads = storage.schema.find, []
    for obs, nexts in fields:
        reads += [(obs, slots), (nexts, slots), (obs, after)]
    read = storage.fetch([Request(find(leaf.path), at) for leaf, at in reads])
    triples = zip(read[::3], read[1::3], read[2::3], strict=True)
    return compare([each for each in triples if not any(x.is_nested for x in each)])


def _shown(wanted: Episodes, schema: Schema) -> str:
    """Return what tells the episodes of rows, in words."""
    if wanted.fixed:
        return repr(wanted)
    found = wanted.resolve({leaf.path for leaf in schema.leaves})
    ends = f"which end at {' or '.join(map(show_path, found.end_paths))}" if found.end_paths else "which no flag ends"
    return ends if found.traj_path is None else f"of one {show_path(found.traj_path)}, {ends}"


def _joined(found: Continuity, field: tuple[Leaf, Leaf], first: list[int], episodes: str) -> str:
    obs, nexts = (show_path(leaf.path) for leaf in field)
    silence = "Given once per buffer; warnings.filterwarnings('ignore', category=ostinato.errors.EpisodesWarning)"
    seen = (
        f"in {found.apart:,} of {found.pairs:,} pairs of rows that follow each other in an episode ({episodes}), "
        f"{nexts} of the first is not {obs} of the second (rows {first[0]} and {first[1]} are the first ones): windows "
        "would join them, and "
    )
    if found.mostly_equal:
        return (
            f"{seen}episodes seem to end there, though no flag says so. Store the ends by time limits too, as "
            "'truncated' beside 'terminated', and mark the last row before a reset; VectorEnvRecorder does both. Rows "
            "of several environments in pieces need a storage with ndim=2, or Episodes(traj_key=...). "
            f"{silence} silences it"
        )
    return (
        f"{seen}rows of several environments seem to lie in turn. Use LazyTensorStorage(..., ndim=2) and extend with "
        "[environments, time], or add [environments]; or a field with the number of the environment and "
        "Episodes(traj_key=..., end_key=['terminated', 'truncated']); VectorEnvRecorder writes either. If they are of "
        f"one environment, and their next observations are made in another way (augmented, normalized): {silence} "
        "silences it"
    )


def warn_of_order(storage: Any, payload: Any, wanted: Episodes | None) -> bool:
    """Warn if the first rows of a storage with `ndim=2` seem to have time and environments exchanged; return whether.

    Cost: at most 32 steps of 32 environments are compared.
    """
    if not isinstance(storage, TensorStorage) or storage.schema is None:
        return False
    leaves = storage.schema.leaves

    def corner(path: Path) -> Tensor:
        values: Any = storage.scores(payload, path)
        grid: Tensor = values.reshape(-1, storage.num_envs, *values.shape[1:])
        return grid[:_CORNER, :_CORNER]

    named = [leaf for leaf in leaves if leaf.path]  # rows of single tensors have no names
    single = {leaf.path: corner(leaf.path) for leaf in named if leaf.nbytes == leaf.dtype.itemsize}
    single = {path: value.reshape(value.shape[:2]) for path, value in single.items()}
    read = [] if wanted is None or wanted.fixed else wanted.resolve({leaf.path for leaf in leaves}).end_paths
    ends = [single[path] != 0 for path in read or single if path in single and (read or path[-1] in FLAGS)]
    numbers = {path[-1]: value for path, value in single.items() if not value.is_floating_point()}
    why = contradicts_order(
        [(corner(obs.path), corner(nexts.path)) for obs, nexts in _observations(storage.schema)],
        torch.stack(ends).any(0) if ends else None,
        [value for name, value in numbers.items() if name in _IDS],
        [value for name, value in numbers.items() if name in _STEPS],
    )
    if why is None:
        return False
    msg = (
        f"the first rows are stored as {storage.num_envs} environment(s), and time and environments seem to be "
        f"exchanged: {why}. extend() takes [environments, time]: transpose the first two dimensions, or give the "
        "buffer dim_extend=0, with which it takes [time, environments]. "
        "warnings.filterwarnings('ignore', category=ostinato.errors.EpisodesWarning) silences it"
    )
    warn_caller(msg, EpisodesWarning)
    return True
