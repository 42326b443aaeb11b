"""`VectorEnvRecorder`: writes the steps of a vector environment to a buffer as transitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypedDict, Unpack, final

import numpy as np
import torch

from ostinato.buffers import ReplayBuffer, ReplayBufferEnsemble, TensorDictReplayBuffer
from ostinato.core import kinds
from ostinato.core.casts import cast
from ostinato.core.episodes.tracker import as_path
from ostinato.core.index import as_index, read_slots
from ostinato.core.kinds import as_tensor, show_path
from ostinato.core.options import check_choice, check_integer
from ostinato.errors import CapacityError, KindError, OptionError, SchemaError, UsageError
from ostinato.storages import ListStorage

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.episodes.tracker import Episodes, Key
    from ostinato.core.rows import Path

__all__ = ["VectorEnvRecorder"]


class _RecorderOptions(TypedDict, total=False):
    layout: str | None
    keys: Mapping[str, Key] | None
    reward_dtype: torch.dtype


@final
class VectorEnvRecorder:
    """Writes the steps of a vector environment to a buffer, one row per environment and step.

    The next observation of a row is the observation that its action led to: at the end of an episode the final
    observation, never the first observation of the next episode. Its source depends on the autoreset mode of the
    environment (Gymnasium's `AutoresetMode`):

    - NEXT_STEP: the step after the end of an episode resets the environment and ignores the action; it is not a
      transition. With `ndim=1` no row is written for it. With `ndim=2`, where each step writes a row for each
      environment, its row has `mask=False`; a buffer with `episodes=Episodes(mask_key="mask")` never samples it.
    - SAME_STEP: the final observation is taken from `info["final_obs"]`.
    - DISABLED: call `reset(obs, mask)` after resetting environments.

    With `ndim=2` the second dimension of the storage is the environment. With `ndim=1` the rows of the environments
    are interleaved; a buffer that tracks episodes (for a unit or a slice sampler) must then use the field `env`, int64:
    `episodes=Episodes(traj_key="env", end_key=["terminated", "truncated"])`.

    If `reset` interrupts an episode, its newest row is marked as truncated, so that no window continues into the next
    episode. The first `reset` does the same for unfinished episodes that the buffer already contains.

    Not thread-safe. Other threads may sample from the buffer at the same time.

    Args:
        rb: The buffer.
        num_envs: Number of environments.
        autoreset_mode: Gymnasium's `AutoresetMode`, or its name or value. `for_env` reads it from an environment.
        layout: "flat": `obs`, `action`, `reward`, `next_obs`, `terminated`, `truncated`, each `[B, *shape]`. "ted":
            `observation`, `action`, and under `next`: `observation`, `reward`, `done`, `terminated`, `truncated`, the
            last four `[B, 1]`. None: "ted" for TensorDict buffers, otherwise "flat". Each entry of a dict observation
            is a separate field: `pos` and `next_pos`, or `pos` and `("next", "pos")`.
        keys: Other names for parts of a row: `obs`, `action`, `reward`, `next_obs`, `terminated`, `truncated`, `done`
            ("ted"), `env`, `mask`.
        reward_dtype: Dtype to which rewards are cast. Observations are cast to the dtypes of the first observations.
            The rules of these casts are in `docs/casts.md`.

    Raises:
        OptionError: The buffer cannot separate episodes; the message names the missing option.
        CapacityError: The capacity is too small for the windows of all environments.

    Examples:
        >>> import numpy as np
        >>> from ostinato import Episodes, LazyTensorStorage, NStep, ReplayBuffer, VectorEnvRecorder
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(1000, ndim=2), sample_unit=NStep(3, 0.99), episodes=Episodes(mask_key="mask")
        ... )
        >>> recorder = VectorEnvRecorder(rb, num_envs=2, autoreset_mode="NEXT_STEP")
        >>> recorder.reset(np.zeros((2, 4), np.float32))
        >>> next_obs, no = np.ones((2, 4), np.float32), np.zeros(2, bool)
        >>> index = recorder.add_step(np.array([0, 1]), next_obs, np.ones(2), no, no)
        >>> len(rb)
        2
    """

    def __init__(
        self,
        rb: ReplayBuffer,
        num_envs: int,
        autoreset_mode: Any,
        *,
        layout: str | None = None,
        keys: Mapping[str, Key] | None = None,
        reward_dtype: torch.dtype = torch.float32,
    ) -> None:
        _check_arguments(rb, num_envs)
        self._collection = isinstance(rb, TensorDictReplayBuffer) or rb.writer.collections_only
        self._layout = _Layout(layout or ("ted" if self._collection else "flat"), keys)
        self._rb = rb
        self._num_envs = num_envs
        self._mode = _as_mode(autoreset_mode)
        self._reward_dtype = reward_dtype
        self._warned: set[Any] = set()
        self._parts = (rb.storage, rb.sampler)
        self._writes = rb.write_count
        self._episode_fields = _check_buffer(rb, num_envs, self._mode, self._layout)
        self._obs: dict[Path, Tensor] | None = None
        # environments whose episode ended and that were not reset
        self._ended = torch.zeros(num_envs, dtype=torch.bool, device="cpu")
        # environments whose newest row belongs to an unfinished episode
        self._unfinished = torch.zeros(num_envs, dtype=torch.bool, device="cpu")
        self._newest = torch.zeros(num_envs, dtype=torch.int64, device="cpu")

    @classmethod
    def for_env(cls, rb: ReplayBuffer, env: Any, **options: Unpack[_RecorderOptions]) -> Self:
        """Create a recorder for a Gymnasium vector environment from its `num_envs` and `metadata["autoreset_mode"]`.

        Args:
            rb: The buffer.
            env: The environment.
            **options: `layout`, `keys` and `reward_dtype`; see the class.

        Raises:
            OptionError: The metadata has no autoreset mode.
        """
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
        if mode is None:
            msg = (
                f"{type(env).__name__} has no metadata['autoreset_mode'] (Gymnasium 1.1 or later): "
                "use VectorEnvRecorder(rb, num_envs, autoreset_mode)"
            )
            raise OptionError(msg)
        return cls(rb, env.num_envs, mode, **options)

    def __repr__(self) -> str:
        """Return the options."""
        name = "ted" if self._layout.ted else "flat"
        return f"VectorEnvRecorder(num_envs={self._num_envs}, autoreset_mode={self._mode!r}, layout={name!r})"

    def reset(self, obs: Any, mask: Any = None) -> None:
        """Start new episodes with the observations that the environment's `reset` returned.

        Args:
            obs: `[num_envs, *shape]`, or a dict of such arrays.
            mask: bool `[num_envs]`: the environments that were reset; None: all. Observations of the others are
                ignored.

        Raises:
            SchemaError: The number of environments or a shape differs; nothing is changed.
            UsageError: The first call does not reset all environments.
        """
        chosen = (
            torch.ones_like(self._ended) if mask is None else _value_per_env("mask", mask, self._num_envs).bool().cpu()
        )
        fresh = _observations(obs, self._num_envs, self._obs, self._warned)
        if self._obs is None:
            if not bool(chosen.all()):
                msg = "the first reset() must begin an episode in every environment: leave mask out"
                raise UsageError(msg)
            self._find_unfinished()
        else:
            self._refresh()
            kept = {path: chosen.to(value.device).view(-1, *[1] * (value.ndim - 1)) for path, value in fresh.items()}
            fresh = {path: torch.where(kept[path], value, self._obs[path]) for path, value in fresh.items()}
        self._truncate(chosen & self._unfinished)
        self._obs = fresh
        self._ended = self._ended & ~chosen  # not in place: torch.inference_mode may differ between calls
        self._unfinished = self._unfinished & ~chosen

    def add_step(
        self,
        action: Any,
        obs: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Mapping[str, Any] | None = None,
        *,
        extra: Mapping[Any, Any] | None = None,
    ) -> Tensor:
        """Write one step of all environments.

        Args:
            action: The actions taken, `[num_envs, *shape]`, or a dict of such arrays.
            obs: Observations that the environment's `step` returned, `[num_envs, *shape]`, or a dict of such arrays.
            reward: `[num_envs]`.
            terminated: bool `[num_envs]`.
            truncated: bool `[num_envs]`.
            info: Required in mode SAME_STEP when an episode ends.
            extra: Further fields of the rows, `[num_envs, *shape]`, such as the state of a recurrent network before the
                step.

        Returns:
            The result of `ReplayBuffer.extend`: the slot of each environment's row, int64 `[num_envs]`, -1 if no row
            was written (`update_priority` takes `index[index >= 0]`); with `ndim=2`, int64 `[num_envs, 2]`.

        Raises:
            UsageError: `reset` was not called, or the results do not fit the autoreset mode; nothing is changed.
            SchemaError: The number of environments or a shape differs; nothing is changed.
        """
        before, layout = self._obs, self._layout
        if before is None:
            msg = (
                "add_step() was called before reset(): call reset(obs) with the observations of the environment's reset"
            )
            raise UsageError(msg)
        self._refresh()
        after = _observations(obs, self._num_envs, before, self._warned)
        ends = {
            "terminated": _flag_per_env("terminated", terminated, self._num_envs),
            "truncated": _flag_per_env("truncated", truncated, self._num_envs),
        }
        ended = ends["terminated"] | ends["truncated"]
        self._check_mode(ended, info or {})
        following = after
        if self._mode == "SAME_STEP":
            following = _final_observations(after, ended, info or {}, self._warned)
        rewards = cast(
            _value_per_env("reward", reward, self._num_envs), self._reward_dtype, layout["reward"], self._warned
        )
        fields = _join(
            [
                layout.observation(before, after=False),
                {
                    (*layout["action"], *path): value
                    for path, value in _per_env("action", action, self._num_envs).items()
                },
                {layout["reward"]: layout.column(rewards)},
                layout.observation(following, after=True),
                layout.flags(ends),
                self._episode_columns(),
                _per_env("extra", dict(extra or {}), self._num_envs),
            ]
        )
        index = self._write(fields)
        self._writes = self._rb.write_count
        self._obs = after
        self._unfinished = ~(ended | self._ended)
        self._ended = torch.zeros_like(ended) if self._mode == "SAME_STEP" else ended
        return index

    def _refresh(self) -> None:
        """Find the unfinished episodes again if the buffer was modified by others or its parts were replaced."""
        rb = self._rb
        parts = (rb.storage, rb.sampler)
        if parts == self._parts and rb.write_count == self._writes:
            return
        if parts != self._parts:
            self._episode_fields = _check_buffer(rb, self._num_envs, self._mode, self._layout)
        self._parts, self._writes = parts, rb.write_count
        self._unfinished = torch.zeros_like(self._unfinished)
        self._find_unfinished()

    def _check_mode(self, ended: Tensor, info: Mapping[str, Any]) -> None:
        """Raise `UsageError` for results that an environment of this mode does not return."""
        if self._mode == "DISABLED" and bool(self._ended.any()):
            msg = (
                f"environment(s) {_which(self._ended)} ended and have not been reset: with autoreset_mode 'DISABLED' "
                "reset them and call reset(obs, mask) before the next add_step()"
            )
            raise UsageError(msg)
        if self._mode != "NEXT_STEP":
            return
        if bool((ended & self._ended).any()):
            msg = (
                f"environment(s) {_which(ended & self._ended)} ended in the step that resets them, which NEXT_STEP "
                "environments do not: check autoreset_mode"
            )
            raise UsageError(msg)
        if "final_obs" in info:
            msg = "info has 'final_obs', which NEXT_STEP environments do not return: is autoreset_mode 'SAME_STEP'?"
            raise UsageError(msg)

    def _episode_columns(self) -> dict[Path, Tensor]:
        """Return the fields that separate episodes, if the buffer uses them."""
        out = {}
        if self._episode_fields.env:
            out[self._layout["env"]] = torch.arange(self._num_envs, device="cpu")
        if self._episode_fields.mask:
            out[self._layout["mask"]] = ~self._ended
        return out

    def _write(self, fields: dict[Path, Tensor]) -> Tensor:
        """Write rows and store their slots."""
        rb, layout, count = self._rb, self._layout, self._num_envs
        if rb.storage.ndim > 1:
            index: Tensor = rb.add(layout.rows(fields, count, collection=self._collection))
            self._newest = read_slots(index, rb.storage)[0].cpu()
            return index
        written = ~self._ended
        index = torch.full((count,), -1, dtype=torch.int64, device=rb.storage.device)
        if bool(written.all()):
            index = rb.extend(layout.rows(fields, count, collection=self._collection))
        elif bool(written.any()):
            chosen = {path: value[written.to(value.device)] for path, value in fields.items()}
            rows = layout.rows(chosen, int(written.sum()), collection=self._collection)
            index[written.to(index.device)] = rb.extend(rows)
        self._newest = torch.where(written, index.cpu(), self._newest)
        return index

    def _find_unfinished(self) -> None:
        """Find the unfinished episodes in the stored rows."""
        rb, storage, envs = self._rb, self._rb.storage, self._num_envs
        rows, capacity = len(rb), storage.capacity
        if not rows or storage.schema is None:
            return
        order = (torch.arange(rows, device="cpu") + (storage.cursor if rows == capacity else 0)) % capacity
        if self._episode_fields.env:
            ids = self._read_part("env", order)
        elif storage.num_envs == envs:
            ids, order = torch.arange(envs, device="cpu"), order[-envs:]
        else:
            return  # without the number of the environment, rows have no episodes
        newest, unfinished = self._newest.clone(), self._unfinished.clone()
        for env in range(envs):
            at = (ids == env).nonzero()
            if at.numel():
                newest[env] = order[at[-1, 0]]
                unfinished[env] = True
        unfinished &= ~(self._read_part("terminated", newest) | self._read_part("truncated", newest))
        if self._episode_fields.mask:
            unfinished &= self._read_part("mask", newest)
        self._newest, self._unfinished = newest, unfinished

    def _read_part(self, part: str, slots: Tensor) -> Tensor:
        """Return the stored values of a part with one value per row."""
        storage = self._rb.storage
        field: Tensor = storage.read(self._layout[part])
        flat = field.reshape(-1) if storage.ndim == 1 else field.reshape(len(storage))
        return flat[slots.to(flat.device)].cpu()

    def _truncate(self, chosen: Tensor) -> None:
        """Mark the newest rows of interrupted episodes as truncated."""
        rb, storage = self._rb, self._rb.storage
        slots = self._newest[chosen]
        slots = slots[slots < len(rb)].to(storage.device)  # the buffer may have been emptied
        if not slots.numel() or storage.schema is None:
            return
        index: Any = as_index(slots, storage)
        if isinstance(index, tuple) and rb.dim_extend == 1:
            index = index[::-1]
        for part in ("truncated", "done"):
            if part in self._layout.paths:
                path = self._layout[part]
                shape = storage.schema.leaves[storage.schema.find(path)].shape
                true = torch.ones(slots.shape[0], *shape, dtype=torch.bool, device=storage.device)
                rb.set_at_(path, true, index)  # type: ignore[arg-type]


def _which(environments: Tensor) -> list[int]:
    return environments.nonzero().flatten().tolist()


class _EpisodeFields(NamedTuple):
    """Fields that rows need so that the buffer can separate episodes."""

    env: bool
    """Whether rows have the number of the environment."""
    mask: bool
    """Whether rows have the flag for transitions."""


def _check_arguments(rb: Any, num_envs: Any) -> None:
    """Check the buffer and the number of environments.

    Raises:
        KindError: `rb` is not a `ReplayBuffer`.
        OptionError: The storage is a `ListStorage`, or `num_envs` is not a positive integer.
    """
    if not isinstance(rb, ReplayBuffer) or isinstance(rb, ReplayBufferEnsemble):
        msg = f"rb must be a ReplayBuffer, got {type(rb).__name__}"
        raise KindError(msg)
    if isinstance(rb.storage, ListStorage):
        msg = "rows of a step have fields, which ListStorage does not take: use LazyTensorStorage or LazyMemmapStorage"
        raise OptionError(msg)
    check_integer("num_envs", num_envs, 1, OptionError)


def _check_buffer(rb: ReplayBuffer, envs: int, mode: str, layout: _Layout) -> _EpisodeFields:
    """Return the fields that rows need.

    Raises:
        OptionError: The buffer would sample rows that are not transitions, or mix episodes; the message names the
            missing option.
        CapacityError: The capacity is too small for the windows of all environments.
    """
    storage, episodes = rb.storage, rb.episodes
    flat = storage.ndim == 1
    if not flat and storage.laid_out and len(rb) and storage.num_envs != envs:
        msg = f"the storage has {storage.num_envs} environment(s), got num_envs={envs}"
        raise OptionError(msg)
    found = _EpisodeFields(
        env=episodes is not None and episodes.traj_path == layout["env"],
        mask=episodes is not None and episodes.mask_path == layout["mask"],
    )
    if mode == "NEXT_STEP" and not flat and not found.mask:
        msg = (
            "a storage with ndim=2 stores a row for the step that resets a NEXT_STEP environment, which is not a "
            f"transition and must not be sampled: create the buffer with {_advice(layout, None, mask=True)}, or use "
            "ndim=1"
        )
        raise OptionError(msg)
    if episodes is None:
        return found
    if flat and envs > 1 and not found.env:
        msg = (
            f"rows of {envs} environments are interleaved in a storage with ndim=1, and this buffer would treat "
            f"them as one episode: create it with {_advice(layout, 'env', mask=False)} (and pass no keys to unit and "
            "sampler), or use ndim=2"
        )
        raise OptionError(msg)
    _check_ends(episodes, layout, found)
    _check_capacity(rb, envs)
    return found


def _check_ends(episodes: Episodes, layout: _Layout, found: _EpisodeFields) -> None:
    """Raise `OptionError` if the buffer ignores an end flag."""
    if episodes.fixed:
        msg = f"{episodes!r} describes stored rows only: use keys, which also apply to new rows"
        raise OptionError(msg)
    ends = set(episodes.resolve(layout.known(env=found.env, mask=found.mask)).end_paths)
    flags = {layout["terminated"], layout["truncated"]}
    if not flags <= ends and layout.paths.get("done") not in ends:
        read = ", ".join(sorted(map(show_path, ends))) or "none"
        msg = (
            f"the buffer must use both end flags of episodes, it uses {read}: create it with "
            f"{_advice(layout, 'env' if found.env else None, mask=found.mask)} (and pass no keys to unit and sampler)"
        )
        raise OptionError(msg)


def _check_capacity(rb: ReplayBuffer, envs: int) -> None:
    """Raise `CapacityError` if windows would be overwritten before they are complete."""
    unit, storage = rb.sample_unit, rb.storage
    span = max(rb.sampler.slice_steps, 1 if unit is None else unit.span)
    steps = storage.max_size // envs if storage.ndim == 1 else -(-storage.max_size // envs)
    if steps < span:
        msg = (
            f"max_size={storage.max_size} holds {steps} steps of each of {envs} environment(s), a window has {span}: "
            f"use max_size >= {span * envs}, or a shorter window"
        )
        raise CapacityError(msg)


def _advice(layout: _Layout, env: str | None, *, mask: bool) -> str:
    """Return the `episodes=` argument to recommend."""
    usual = layout["terminated"][-1] == "terminated" and layout["truncated"][-1] == "truncated"
    arguments = [] if env is None else [f"traj_key={_key(layout, 'env')}"]
    if env is not None or not usual:
        arguments.append(f"end_key=[{_key(layout, 'terminated')}, {_key(layout, 'truncated')}]")
    if mask:
        arguments.append(f"mask_key={_key(layout, 'mask')}")
    return f"episodes=Episodes({', '.join(arguments)})"


def _key(layout: _Layout, part: str) -> str:
    path = layout[part]
    return repr(path[0]) if len(path) == 1 else repr(path)


_FLAT: dict[str, Path] = {
    part: (part,) for part in ("obs", "action", "reward", "next_obs", "terminated", "truncated", "env", "mask")
}
_TED: dict[str, Path] = {
    **_FLAT,
    "obs": ("observation",),
    "reward": ("next", "reward"),
    "next_obs": ("next", "observation"),
    "terminated": ("next", "terminated"),
    "truncated": ("next", "truncated"),
    "done": ("next", "done"),
}
_LAYOUTS = {"flat": _FLAT, "ted": _TED}


@final
class _Layout:
    """The fields of a row: `flat` (`obs`, ..., `next_obs`) or `ted` (`observation`, ..., `("next", ...)`).

    Args:
        name: "flat" or "ted".
        keys: Other names for some parts.

    Raises:
        OptionError: The layout or a part does not exist, or two parts have the same name.
    """

    def __init__(self, name: str, keys: Mapping[str, Key] | None) -> None:
        usual, given = _LAYOUTS[check_choice("layout", name, _LAYOUTS)], dict(keys or {})
        unknown = sorted(set(given) - set(usual))
        if unknown:
            msg = f"keys must name parts of a step, {list(usual)} in layout {name!r}, got {unknown}"
            raise OptionError(msg)
        self.ted = name == "ted"
        self.paths: dict[str, Path] = {**usual, **{part: as_path(key) for part, key in given.items()}}
        self._obs_named = bool({"obs", "next_obs"} & set(given))
        if len(set(self.paths.values())) < len(self.paths):
            msg = f"parts of a step must have different names, got {self.paths}"
            raise OptionError(msg)

    def __getitem__(self, part: str) -> Path:
        """Return the path of a part."""
        return self.paths[part]

    def flags(self, ends: Mapping[str, Tensor]) -> dict[Path, Tensor]:
        """Return the end flags of a step as fields, from `terminated` and `truncated`, `[n]`."""
        shown = {**ends, "done": ends["terminated"] | ends["truncated"]} if "done" in self.paths else ends
        return {self.paths[part]: self.column(value) for part, value in shown.items()}

    def column(self, values: Tensor) -> Tensor:
        """Return one value per row in the shape of this layout: `[n]`, or `[n, 1]` for `ted`."""
        return values[:, None] if self.ted else values

    def observation(self, parts: Mapping[Path, Tensor], *, after: bool) -> dict[Path, Tensor]:
        """Return the fields of an observation; each entry of a dict is a separate field.

        Raises:
            OptionError: Observations are dicts, and `keys` renames `obs` or `next_obs`.
        """
        if () in parts:
            return {self.paths["next_obs" if after else "obs"]: parts[()]}
        if self._obs_named:
            msg = (
                "the entries of a dict observation are fields with their own names: leave obs and next_obs out of keys"
            )
            raise OptionError(msg)
        return {(self._after(path) if after else path): value for path, value in parts.items()}

    def _after(self, path: Path) -> Path:
        return ("next", *path) if self.ted else (*path[:-1], f"next_{path[-1]}")

    def known(self, *, env: bool, mask: bool) -> set[Path]:
        """Return the fields of rows, except observations."""
        unsaid = {"obs", "next_obs"} | (set() if env else {"env"}) | (set() if mask else {"mask"})
        return {path for part, path in self.paths.items() if part not in unsaid}

    def rows(self, fields: Mapping[Path, Tensor], count: int, *, collection: bool) -> Any:
        """Return rows with the given fields, `[count, ...]`, as a dict or a TensorDict."""
        if not collection:
            return kinds.with_fields({}, fields)
        empty = kinds.make(kinds.Node("tensordict", ()), [], (count,), torch.device("cpu"))
        return kinds.with_fields(empty, fields)


def _join(groups: list[dict[Path, Tensor]]) -> dict[Path, Tensor]:
    """Merge fields into one dict.

    Raises:
        SchemaError: Two fields have the same name.
    """
    out: dict[Path, Tensor] = {}
    for group in groups:
        twice = sorted(kinds.show_path(path) for path in out.keys() & group.keys())
        if twice:
            msg = f"two parts of a step have the name {', '.join(twice)}: rename one of them with keys"
            raise SchemaError(msg)
        out |= group
    return out


_MODES = {"NEXTSTEP": "NEXT_STEP", "SAMESTEP": "SAME_STEP", "DISABLED": "DISABLED"}
_FINAL = ("final_obs", "final_observation")
"""The name since Gymnasium 1.1, and the earlier one, which some simulators still use."""


def _as_mode(mode: Any) -> str:
    """Return the name of an autoreset mode, given as Gymnasium's enum, its name or its value.

    Raises:
        OptionError: There is no such mode.
    """
    found = _MODES.get(str(getattr(mode, "name", mode)).replace("_", "").upper())
    return found or check_choice("autoreset_mode", mode, _MODES.values())


def _value_per_env(name: str, values: Any, envs: int) -> Tensor:
    """Return one value per environment, `[envs]`.

    Raises:
        SchemaError: The shape differs.
    """
    tensor = as_tensor(np.asarray(values) if isinstance(values, (list, tuple)) else values, (name,))
    if tensor.shape not in {(envs,), (envs, 1)}:
        msg = f"{name} must hold one value per environment, shape [{envs}], got {list(tensor.shape)}"
        raise SchemaError(msg)
    return tensor.reshape(envs)


def _flag_per_env(name: str, values: Any, envs: int) -> Tensor:
    """Return one bool per environment, `[envs]`, on the CPU.

    Raises:
        SchemaError: The shape differs, or a value is neither 0 nor 1.
    """
    tensor = _value_per_env(name, values, envs).cpu()
    flags = tensor != 0
    if tensor.dtype is not flags.dtype and not bool((tensor == flags).all()):
        msg = f"{name} must hold bools (or zeros and ones), got {tensor.dtype} {tensor.tolist()[:8]}"
        raise SchemaError(msg)
    return flags


def _per_env(name: str, data: Any, envs: int) -> dict[Path, Tensor]:
    """Return the leaves of an array or a dict of arrays, `[envs, *shape]`, by path; the path of an array is `()`.

    Raises:
        SchemaError: The number of environments differs.
        KindError: `data` is neither.
    """
    if isinstance(data, list):
        data = np.asarray(data)
    nested = isinstance(data, dict) or kinds.is_tensordict(data)
    leaves: dict[Any, Any] = kinds.leaves_by_path(data) if nested else {(): data}
    out: dict[Path, Tensor] = {}
    for path, leaf in leaves.items():
        tensor = as_tensor(leaf, (name, *path))
        if tensor.shape[:1] != (envs,):
            msg = (
                f"{name}{_suffix(path)} must be of {envs} environment(s), [{envs}, ...], got shape {list(tensor.shape)}"
            )
            raise SchemaError(msg)
        out[path] = tensor
    return out


def _observations(data: Any, envs: int, like: dict[Path, Tensor] | None, warned: set[Any]) -> dict[Path, Tensor]:
    """Return observations like `_per_env`, as copies, cast to the dtypes of `like`, which are earlier observations.

    Raises:
        SchemaError: Entries or shapes differ, or values do not fit the dtypes.
    """
    out = _per_env("obs", data, envs)
    if like is not None:
        _check_like(out, like)
        fitted = {path: cast(tensor, like[path].dtype, ("obs", *path), warned) for path, tensor in out.items()}
        return {path: tensor.clone() if tensor is out[path] else tensor for path, tensor in fitted.items()}
    return {path: tensor.clone() for path, tensor in out.items()}


def _check_like(data: dict[Path, Tensor], like: dict[Path, Tensor]) -> None:
    if data.keys() != like.keys():
        msg = (
            f"obs must have the entries of earlier observations, {sorted(map(show_path, like))}, got "
            f"{sorted(map(show_path, data))}"
        )
        raise SchemaError(msg)
    for path, tensor in data.items():
        if tensor.shape != like[path].shape:
            msg = f"obs{_suffix(path)} must have shape {list(like[path].shape)}, as before, got {list(tensor.shape)}"
            raise SchemaError(msg)


def _final_observations(
    after: dict[Path, Tensor], ended: Tensor, info: Mapping[str, Any], warned: set[Any]
) -> dict[Path, Tensor]:
    """Return the observations `after` a step; for environments whose episode ended, the final observations from `info`.

    Raises:
        UsageError: `info` lacks a final observation.
        SchemaError: The shape of a final observation differs, or its values do not fit the dtype.
    """
    which = ended.nonzero().flatten().tolist()
    if not which:
        return after
    name = next((name for name in _FINAL if name in info), None)
    there = None if name is None else info.get(f"_{name}")
    lacking = [env for env in which if name is None or (there is not None and not bool(there[env]))]
    if lacking:
        raise UsageError(_no_final(lacking))
    out = {path: value.clone() for path, value in after.items()}
    for env in which:
        for path, value in out.items():
            last = _entry(info[name], path, env)  # type: ignore[index]
            if last is None:
                raise UsageError(_no_final([env]))
            tensor = as_tensor(last, (str(name), *path))
            if tensor.shape != value.shape[1:]:
                msg = (
                    f"info[{name!r}]{_suffix(path)} of environment {env} must have shape {list(value.shape[1:])}, got "
                    f"{list(tensor.shape)}"
                )
                raise SchemaError(msg)
            value[env] = cast(tensor, value.dtype, (str(name), *path), warned)
    return out


def _no_final(envs: list[int]) -> str:
    return (
        f"environment(s) {envs} ended, and info['final_obs'] has no final observation for them, which autoreset_mode "
        "'SAME_STEP' requires: pass the info that the environment's step returned"
    )


def _entry(final: Any, path: Path, env: int) -> Any:
    """Return the entry of one environment, from an array of dicts or a dict of arrays."""
    node, chosen = final, False
    try:
        for key in path:
            if not (isinstance(node, Mapping) or kinds.is_tensordict(node)):
                node, chosen = node[env], True
            if node is None:
                return None
            node = node[key]
        return node if chosen else node[env]
    except (KeyError, IndexError, TypeError):
        msg = f"info['final_obs'] has no entry{_suffix(path)} of environment {env}, got {type(final).__name__}"
        raise KindError(msg) from None


def _suffix(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path)
