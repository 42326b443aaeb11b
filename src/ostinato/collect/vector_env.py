"""What environments return: checked, on tensors, and without aliases of memory that the next step overwrites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import numpy as np
import torch

from ostinato.buffers import ReplayBuffer, TensorDictReplayBuffer
from ostinato.buffers.options import leaves_by_path
from ostinato.core import kinds
from ostinato.core.casts import cast
from ostinato.core.episodes.keys import as_path
from ostinato.core.kinds import as_tensor, show_path
from ostinato.errors import CapacityError, KindError, OptionError, SchemaError, UsageError
from ostinato.storages import ListStorage

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.episodes.keys import Episodes, Key
    from ostinato.core.rows import Path

__all__ = ["VectorEnvRecorder"]


@final
class VectorEnvRecorder:
    """Writes the steps of a vector environment to a buffer, one row per environment and step.

    Each row is a true transition: its next observation is what the action led to, at the end of an episode the last
    observation, never the first one of the next episode. How that is known depends on the environment's mode
    (Gymnasium's `AutoresetMode`):

    - NEXT_STEP: the step after an end resets, and its action is ignored. That is no transition. With `ndim=1` no row
      is written; with `ndim=2`, where every step has a row of each environment, the row's field `mask` is False, and
      the buffer, made with `episodes=Episodes(mask_key="mask")`, never draws it.
    - SAME_STEP: the last observation is taken from `info["final_obs"]`.
    - DISABLED: call `reset(obs, mask)` after resetting environments.

    With `ndim=2` lanes are environments. With `ndim=1` rows of the environments follow each other; a buffer that
    keeps account of episodes (for a unit or a slice sampler) must then read the field `env`, int64:
    `episodes=Episodes(traj_key="env", end_key=["terminated", "truncated"])`.

    An episode that `reset` breaks off has its newest row marked as truncated, so that no window goes on into the next
    one; so have those which a buffer with rows in it comes with, when the first `reset` begins new ones.

    Not thread-safe: one thread steps. Other threads may sample meanwhile.

    Args:
        rb: the buffer.
        num_envs: environments.
        autoreset_mode: Gymnasium's `AutoresetMode`, or its name or value; `for_env` reads it off an environment.
        layout: "flat": `obs`, `action`, `reward`, `next_obs`, `terminated`, `truncated`, each `[B, *shape]`. "ted":
            `observation`, `action`, and under `next`: `observation`, `reward`, `done`, `terminated`, `truncated`, the
            last four `[B, 1]`. None takes "ted" for TensorDict buffers. Each entry of a dict observation is a field
            of its own: `pos` and `next_pos`, or `pos` and `("next", "pos")`.
        keys: other names for parts of a row: `obs`, `action`, `reward`, `next_obs`, `terminated`, `truncated`, `done`
            ("ted"), `env`, `mask`.
        reward_dtype: dtype in which rewards are stored; they are cast to it, and observations to the dtypes of the
            first ones, as `docs/casts.md` says.

    Raises:
        OptionError: if the buffer could not keep episodes apart, saying how to make it.
        CapacityError: if it is too small for the windows of so many environments.

    Example:
        >>> import numpy as np
        >>> from ostinato import Episodes, LazyTensorStorage, NStep, ReplayBuffer, VectorEnvRecorder
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(1000, ndim=2), sample_unit=NStep(3, 0.99), episodes=Episodes(mask_key="mask")
        ... )
        >>> steps = VectorEnvRecorder(rb, num_envs=2, autoreset_mode="NEXT_STEP")
        >>> steps.reset(np.zeros((2, 4), np.float32))
        >>> after, no = np.ones((2, 4), np.float32), np.zeros(2, bool)
        >>> index = steps.add_step(np.array([0, 1]), after, np.ones(2), no, no)
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
        self._envs = num_envs
        self._mode = _as_mode(autoreset_mode)
        self._reward_dtype = reward_dtype
        self._warned: set[Any] = set()
        self._parts = (rb.storage, rb.sampler)
        self._writes = rb.write_count
        self._match = _match(rb, num_envs, self._mode, self._layout)
        self._obs: dict[Path, Tensor] | None = None
        # whether the episode is over, and the next one has not begun
        self._idle = torch.zeros(num_envs, dtype=torch.bool, device="cpu")
        # whether the newest row is one of an episode that goes on
        self._open = torch.zeros(num_envs, dtype=torch.bool, device="cpu")
        self._newest = torch.zeros(num_envs, dtype=torch.int64, device="cpu")

    @classmethod
    def for_env(cls, rb: ReplayBuffer, env: Any, **options: Any) -> Self:
        """Make one for a Gymnasium vector environment: `env.num_envs`, and the mode in `env.metadata`.

        Raises:
            OptionError: if the environment does not say its mode.
        """
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
        if mode is None:
            msg = (
                f"{type(env).__name__} does not say how it resets (metadata['autoreset_mode'], since Gymnasium 1.1): "
                "use VectorEnvRecorder(rb, num_envs, autoreset_mode)"
            )
            raise OptionError(msg)
        return cls(rb, env.num_envs, mode, **options)

    def __repr__(self) -> str:
        """Options."""
        name = "ted" if self._layout.ted else "flat"
        return f"VectorEnvRecorder(num_envs={self._envs}, autoreset_mode={self._mode!r}, layout={name!r})"

    def reset(self, obs: Any, mask: Any = None) -> None:
        """Begin new episodes with the observations that the environment's `reset` returned.

        Args:
            obs: `[num_envs, *shape]`, or a dict of these.
            mask: bool `[num_envs]`: the environments that were reset; None for all. Observations of others are not
                read.

        Raises:
            SchemaError: for another number of environments, or other shapes; nothing is changed.
            UsageError: if the first call leaves environments out.
        """
        chosen = torch.ones_like(self._idle) if mask is None else _one_each("mask", mask, self._envs).bool().cpu()
        fresh = _observations(obs, self._envs, self._obs, self._warned)
        if self._obs is None:
            if not bool(chosen.all()):
                msg = "the first reset() must begin an episode in every environment: leave mask out"
                raise UsageError(msg)
            self._find_newest()
        else:
            self._follow()
            kept = {path: chosen.to(value.device).view(-1, *[1] * (value.ndim - 1)) for path, value in fresh.items()}
            fresh = {path: torch.where(kept[path], value, self._obs[path]) for path, value in fresh.items()}
        self._break_off(chosen & self._open)
        self._obs = fresh
        self._idle = self._idle & ~chosen  # not in place: the mode (torch.inference_mode) may be another by now
        self._open = self._open & ~chosen

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
        """Write one step of all environments: the action taken, and what the environment's `step` returned for it.

        Args:
            action: `[num_envs, *shape]`, or a dict of these.
            obs: `[num_envs, *shape]`, or a dict of these.
            reward: `[num_envs]`.
            terminated: bool `[num_envs]`.
            truncated: bool `[num_envs]`.
            info: needed in mode SAME_STEP, where an episode ends.
            extra: more fields of the rows, `[num_envs, *shape]`, such as the state of a recurrent network before the
                step.

        Returns:
            As `ReplayBuffer.extend`: the slot of each environment's row, int64 `[num_envs]`, -1 where none was
            written; with `ndim=2` int64 `[num_envs, 2]`.

        Raises:
            UsageError: before the first `reset`, or if the results do not fit the mode; nothing is changed.
            SchemaError: for another number of environments, or other shapes; nothing is changed.
        """
        before, layout = self._obs, self._layout
        if before is None:
            msg = "add_step() came before reset(): call reset(obs) with the observations of the environment's reset"
            raise UsageError(msg)
        self._follow()
        after = _observations(obs, self._envs, before, self._warned)
        ends = {
            "terminated": _flag_each("terminated", terminated, self._envs),
            "truncated": _flag_each("truncated", truncated, self._envs),
        }
        ended = ends["terminated"] | ends["truncated"]
        self._check_mode(ended, info or {})
        following = after
        if self._mode == "SAME_STEP":
            following = _final_observations(after, ended, info or {}, self._warned)
        rewards = cast(_one_each("reward", reward, self._envs), self._reward_dtype, layout["reward"], self._warned)
        fields = _join(
            [
                layout.observation(before, after=False),
                {(*layout["action"], *path): value for path, value in _per_env("action", action, self._envs).items()},
                {layout["reward"]: layout.column(rewards)},
                layout.observation(following, after=True),
                layout.flags(ends),
                self._origin(),
                _per_env("extra", dict(extra or {}), self._envs),
            ]
        )
        index = self._write(fields)
        self._writes = self._rb.write_count
        self._obs = after
        self._open = ~(ended | self._idle)
        self._idle = torch.zeros_like(ended) if self._mode == "SAME_STEP" else ended
        return index

    def _follow(self) -> None:
        """Look anew which episodes go on, where parts were exchanged, or others have written or emptied the buffer."""
        rb = self._rb
        parts = (rb.storage, rb.sampler)
        if parts == self._parts and rb.write_count == self._writes:
            return
        if parts != self._parts:
            self._match = _match(rb, self._envs, self._mode, self._layout)
        self._parts, self._writes = parts, rb.write_count
        self._open = torch.zeros_like(self._open)
        self._find_newest()

    def _check_mode(self, ended: Tensor, info: Mapping[str, Any]) -> None:
        """Refuse results that an environment of the mode does not give."""
        if self._mode == "DISABLED" and bool(self._idle.any()):
            msg = (
                f"environment(s) {_names(self._idle)} ended and have not been reset: with autoreset_mode 'DISABLED' "
                "reset them and call reset(obs, mask) before the next add_step()"
            )
            raise UsageError(msg)
        if self._mode != "NEXT_STEP":
            return
        if bool((ended & self._idle).any()):
            msg = (
                f"environment(s) {_names(ended & self._idle)} ended in the step that resets them, which NEXT_STEP "
                "environments do not: is autoreset_mode right?"
            )
            raise UsageError(msg)
        if "final_obs" in info:
            msg = "info has 'final_obs', which NEXT_STEP environments do not give: is autoreset_mode 'SAME_STEP'?"
            raise UsageError(msg)

    def _origin(self) -> dict[Path, Tensor]:
        """Return the fields that tell episodes apart, where the buffer reads them."""
        out = {}
        if self._match.env:
            out[self._layout["env"]] = torch.arange(self._envs, device="cpu")
        if self._match.mask:
            out[self._layout["mask"]] = ~self._idle
        return out

    def _write(self, fields: dict[Path, Tensor]) -> Tensor:
        """Write rows and remember where they are."""
        rb, layout, whole = self._rb, self._layout, self._envs
        if rb.storage.ndim > 1:
            index: Tensor = rb.add(layout.rows(fields, whole, collection=self._collection))
            self._newest = (index[:, 0] * rb.storage.num_envs + index[:, 1]).cpu()
            return index
        written = ~self._idle
        index = torch.full((whole,), -1, dtype=torch.int64, device=rb.storage.device)
        if bool(written.all()):
            index = rb.extend(layout.rows(fields, whole, collection=self._collection))
        elif bool(written.any()):
            chosen = {path: value[written.to(value.device)] for path, value in fields.items()}
            rows = layout.rows(chosen, int(written.sum()), collection=self._collection)
            index[written.to(index.device)] = rb.extend(rows)
        self._newest = torch.where(written, index.cpu(), self._newest)
        return index

    def _find_newest(self) -> None:
        """Look which episodes go on in the rows that a buffer comes with."""
        rb, storage, envs = self._rb, self._rb.storage, self._envs
        rows, capacity = len(rb), storage.capacity
        if not rows or storage.schema is None:
            return
        order = (torch.arange(rows, device="cpu") + (storage.cursor if rows == capacity else 0)) % capacity
        if self._match.env:
            ids = self._stored("env", order)
        elif storage.num_envs == envs:
            ids, order = torch.arange(envs, device="cpu"), order[-envs:]
        else:
            return  # rows that do not say where they are from have no episodes
        newest, goes_on = self._newest.clone(), self._open.clone()
        for env in range(envs):
            at = (ids == env).nonzero()
            if at.numel():
                newest[env] = order[at[-1, 0]]
                goes_on[env] = True
        goes_on &= ~(self._stored("terminated", newest) | self._stored("truncated", newest))
        if self._match.mask:
            goes_on &= self._stored("mask", newest)
        self._newest, self._open = newest, goes_on

    def _stored(self, part: str, slots: Tensor) -> Tensor:
        """Return what rows hold in a part with one value each."""
        storage = self._rb.storage
        field: Tensor = storage.read(self._layout[part])
        flat = field.reshape(-1) if storage.ndim == 1 else field.reshape(len(storage))
        return flat[slots.to(flat.device)].cpu()

    def _break_off(self, chosen: Tensor) -> None:
        """Mark the newest rows of episodes that do not go on."""
        rb, storage = self._rb, self._rb.storage
        slots = self._newest[chosen]
        slots = slots[slots < len(rb)].to(storage.device)  # the buffer may have been emptied
        if not slots.numel() or storage.schema is None:
            return
        index: Any = slots
        if storage.ndim > 1:
            steps, lanes = slots // storage.num_envs, slots % storage.num_envs
            index = (lanes, steps) if rb.dim_extend == 1 else (steps, lanes)
        for part in ("truncated", "done"):
            if part in self._layout.paths:
                path = self._layout[part]
                shape = storage.schema.leaves[storage.schema.find(path)].shape
                true = torch.ones(slots.shape[0], *shape, dtype=torch.bool, device=storage.device)
                rb.set_at_(path, true, index)  # type: ignore[arg-type]


def _names(environments: Tensor) -> list[int]:
    return environments.nonzero().flatten().tolist()


class _Match(NamedTuple):
    """What rows must say, besides the step itself, so that the buffer can tell episodes apart."""

    env: bool
    """Rows have the field of their environment's number."""
    mask: bool
    """Rows have the field that says whether they are transitions."""


def _check_arguments(rb: Any, num_envs: Any) -> None:
    """Refuse what is no buffer, or no number of environments.

    Raises:
        KindError: for another kind of buffer.
        OptionError: for a storage of objects, or a number below 1.
    """
    if not isinstance(rb, ReplayBuffer):
        msg = f"rb must be a ReplayBuffer, got {type(rb).__name__}"
        raise KindError(msg)
    if isinstance(rb.storage, ListStorage):
        msg = "a step is rows of fields, which ListStorage does not take: use LazyTensorStorage or LazyMemmapStorage"
        raise OptionError(msg)
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
        msg = f"num_envs must be an integer of at least 1, got {num_envs!r}"
        raise OptionError(msg)


def _match(rb: ReplayBuffer, envs: int, mode: str, layout: _Layout) -> _Match:
    """Return which fields rows need.

    Raises:
        OptionError: if the buffer would draw rows that are no transitions, or mix episodes; it says how to make it.
        CapacityError: if it is too small for the windows of so many environments.
    """
    storage, episodes = rb.storage, rb.episodes
    flat = storage.ndim == 1
    if not flat and storage.laid_out and len(rb) and storage.num_envs != envs:
        msg = f"the storage has {storage.num_envs} lane(s), one for each environment, got num_envs={envs}"
        raise OptionError(msg)
    found = _Match(
        env=episodes is not None and episodes.traj_path == layout["env"],
        mask=episodes is not None and episodes.mask_path == layout["mask"],
    )
    if mode == "NEXT_STEP" and not flat and not found.mask:
        msg = (
            "a storage with ndim=2 keeps the row of the step that resets a NEXT_STEP environment, which is no "
            f"transition and must not be drawn: make the buffer with {_advice(layout, None, mask=True)}, or use ndim=1"
        )
        raise OptionError(msg)
    if episodes is None:
        return found
    if flat and envs > 1 and not found.env:
        msg = (
            f"rows of {envs} environments follow each other in a storage with ndim=1, and this buffer would take them "
            f"for one episode: make it with {_advice(layout, 'env', mask=False)} (and name no keys in unit and "
            "sampler), or use ndim=2"
        )
        raise OptionError(msg)
    _check_ends(episodes, layout, found)
    _check_room(rb, envs)
    return found


def _check_ends(episodes: Episodes, layout: _Layout, found: _Match) -> None:
    """Refuse a buffer that overlooks ends."""
    if episodes.fixed:
        msg = f"{episodes!r} tells the episodes of rows that stay as they are: use keys for rows that are to come"
        raise OptionError(msg)
    ends = set(episodes.resolve(layout.known(env=found.env, mask=found.mask)).end_paths)
    flags = {layout["terminated"], layout["truncated"]}
    if not flags <= ends and layout.paths.get("done") not in ends:
        read = ", ".join(sorted(map(show_path, ends))) or "none"
        msg = (
            f"the buffer must read both flags that end an episode, it reads {read}: make it with "
            f"{_advice(layout, 'env' if found.env else None, mask=found.mask)} (and name no keys in unit and sampler)"
        )
        raise OptionError(msg)


def _check_room(rb: ReplayBuffer, envs: int) -> None:
    """Refuse a capacity that overwrites windows before they are whole."""
    unit, storage = rb.sample_unit, rb.storage
    span = max(rb.sampler.span, 1 if unit is None else unit.span)
    steps = storage.max_size // envs if storage.ndim == 1 else -(-storage.max_size // envs)
    if steps < span:
        msg = (
            f"max_size={storage.max_size} keeps {steps} steps of each of {envs} environment(s), a window takes {span}: "
            f"use max_size >= {span * envs}, or a shorter window"
        )
        raise CapacityError(msg)


def _advice(layout: _Layout, env: str | None, *, mask: bool) -> str:
    """Return the `episodes=` argument that would do."""
    usual = layout["terminated"][-1] == "terminated" and layout["truncated"][-1] == "truncated"
    said = [] if env is None else [f"traj_key={_shown(layout, 'env')}"]
    if env is not None or not usual:
        said.append(f"end_key=[{_shown(layout, 'terminated')}, {_shown(layout, 'truncated')}]")
    if mask:
        said.append(f"mask_key={_shown(layout, 'mask')}")
    return f"episodes=Episodes({', '.join(said)})"


def _shown(layout: _Layout, part: str) -> str:
    path = layout[part]
    return repr(path[0]) if len(path) == 1 else repr(path)


_FLAT: dict[str, Path] = {
    "obs": ("obs",),
    "action": ("action",),
    "reward": ("reward",),
    "next_obs": ("next_obs",),
    "terminated": ("terminated",),
    "truncated": ("truncated",),
    "env": ("env",),
    "mask": ("mask",),
}
_TED: dict[str, Path] = {
    "obs": ("observation",),
    "action": ("action",),
    "reward": ("next", "reward"),
    "next_obs": ("next", "observation"),
    "terminated": ("next", "terminated"),
    "truncated": ("next", "truncated"),
    "done": ("next", "done"),
    "env": ("env",),
    "mask": ("mask",),
}
_LAYOUTS = {"flat": _FLAT, "ted": _TED}


@final
class _Layout:
    """The fields of a row: `flat` (`obs`, ..., `next_obs`) or `ted` (`observation`, ..., `("next", ...)`).

    Args:
        name: "flat" or "ted".
        keys: other names for some parts.

    Raises:
        OptionError: for a layout or a part that there is not, or one name for two parts.
    """

    def __init__(self, name: str, keys: Mapping[str, Key] | None) -> None:
        if name not in _LAYOUTS:
            msg = f"layout must be one of {sorted(_LAYOUTS)}, got {name!r}"
            raise OptionError(msg)
        usual, given = _LAYOUTS[name], dict(keys or {})
        unknown = sorted(set(given) - set(usual))
        if unknown:
            msg = f"keys names parts of a step, {list(usual)} in layout {name!r}, got {unknown}"
            raise OptionError(msg)
        self.ted = name == "ted"
        self.paths: dict[str, Path] = {**usual, **{part: as_path(key) for part, key in given.items()}}
        self._obs_named = bool({"obs", "next_obs"} & set(given))
        if len(set(self.paths.values())) < len(self.paths):
            msg = f"each part of a step needs a name of its own, got {self.paths}"
            raise OptionError(msg)

    def __getitem__(self, part: str) -> Path:
        """Return the path of a part."""
        return self.paths[part]

    def flags(self, ends: Mapping[str, Tensor]) -> dict[Path, Tensor]:
        """Return the fields that say how a step ended, from the flags `terminated` and `truncated`, `[n]`."""
        shown = {**ends, "done": ends["terminated"] | ends["truncated"]} if "done" in self.paths else ends
        return {self.paths[part]: self.column(value) for part, value in shown.items()}

    def column(self, values: Tensor) -> Tensor:
        """Give one number per row the shape that it has in this layout: `[n]`, or `[n, 1]` with `ted`."""
        return values[:, None] if self.ted else values

    def observation(self, parts: Mapping[Path, Tensor], *, after: bool) -> dict[Path, Tensor]:
        """Return the fields of an observation: each entry of a dict is a field of its own.

        Raises:
            OptionError: if observations are dicts, and their parts were given one name.
        """
        if () in parts:
            return {self.paths["next_obs" if after else "obs"]: parts[()]}
        if self._obs_named:
            msg = "each entry of a dict observation is a field under its own name: leave obs and next_obs out of keys"
            raise OptionError(msg)
        return {(self._after(path) if after else path): value for path, value in parts.items()}

    def _after(self, path: Path) -> Path:
        return ("next", *path) if self.ted else (*path[:-1], f"next_{path[-1]}")

    def known(self, *, env: bool, mask: bool) -> set[Path]:
        """Return the fields that rows have, but for observations."""
        unsaid = {"obs", "next_obs"} | (set() if env else {"env"}) | (set() if mask else {"mask"})
        return {path for part, path in self.paths.items() if part not in unsaid}

    def rows(self, fields: Mapping[Path, Tensor], count: int, *, collection: bool) -> Any:
        """Put the fields of rows, `[count, ...]`, together: a dict, or a TensorDict."""
        if not collection:
            return kinds.with_fields({}, fields)  # type: ignore[arg-type]
        empty = kinds.make(kinds.Node("tensordict", ()), [], (count,), torch.device("cpu"))
        return kinds.with_fields(empty, fields)  # type: ignore[arg-type]


def _join(groups: list[dict[Path, Tensor]]) -> dict[Path, Tensor]:
    """Join the fields of a row.

    Raises:
        SchemaError: if two of them have one name.
    """
    out: dict[Path, Tensor] = {}
    for group in groups:
        twice = sorted(kinds.show_path(path) for path in out.keys() & group.keys())
        if twice:
            msg = f"two parts of a step are called {', '.join(twice)}: give one of them another name with keys"
            raise SchemaError(msg)
        out |= group
    return out


_MODES = {"NEXTSTEP": "NEXT_STEP", "SAMESTEP": "SAME_STEP", "DISABLED": "DISABLED"}
_FINAL = ("final_obs", "final_observation")
"""Gymnasium's name since 1.1, and the one before, which some simulators still use."""


def _as_mode(mode: Any) -> str:
    """Return the name of an autoreset mode, given as Gymnasium's enum, its name or its value.

    Raises:
        OptionError: for anything else.
    """
    text = str(getattr(mode, "name", mode)).replace("_", "").upper()
    if text not in _MODES:
        msg = f"autoreset_mode must be one of {list(_MODES.values())}, got {mode!r}"
        raise OptionError(msg)
    return _MODES[text]


def _one_each(name: str, values: Any, envs: int) -> Tensor:
    """Return one number per environment, `[envs]`.

    Raises:
        SchemaError: for another shape.
    """
    tensor = as_tensor(np.asarray(values) if isinstance(values, (list, tuple)) else values, (name,))
    if tensor.shape not in {(envs,), (envs, 1)}:
        msg = f"{name} must hold one value per environment, shape [{envs}], got {list(tensor.shape)}"
        raise SchemaError(msg)
    return tensor.reshape(envs)


def _flag_each(name: str, values: Any, envs: int) -> Tensor:
    """Return one bool per environment, `[envs]`, on the CPU.

    Raises:
        SchemaError: for another shape, or values that are neither true nor false.
    """
    tensor = _one_each(name, values, envs).cpu()
    flags = tensor != 0
    if tensor.dtype is not flags.dtype and not bool((tensor == flags).all()):
        msg = f"{name} must hold bools (or zeros and ones), got {tensor.dtype} {tensor.tolist()[:8]}"
        raise SchemaError(msg)
    return flags


def _per_env(name: str, data: Any, envs: int) -> dict[Path, Tensor]:
    """Return the leaves of data `[envs, *shape]`, an array or a dict of arrays, by their paths; `()` for an array.

    Raises:
        SchemaError: for another number of environments.
        KindError: for data of another kind.
    """
    if isinstance(data, list):
        data = np.asarray(data)
    nested = isinstance(data, dict) or kinds.is_tensordict(data)
    leaves: dict[Any, Any] = leaves_by_path(data) if nested else {(): data}
    out: dict[Path, Tensor] = {}
    for path, leaf in leaves.items():
        tensor = as_tensor(leaf, (name, *path))
        if tensor.shape[:1] != (envs,):
            msg = f"{name}{_at(path)} must be of {envs} environment(s), [{envs}, ...], got shape {list(tensor.shape)}"
            raise SchemaError(msg)
        out[path] = tensor
    return out


def _observations(data: Any, envs: int, like: dict[Path, Tensor] | None, warned: set[Any]) -> dict[Path, Tensor]:
    """Return observations as `per_env` does, cast to the dtypes in `like`, those before. Copies.

    Raises:
        SchemaError: if they have other entries or shapes, or values that do not fit the dtypes.
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
            f"obs has the entries {sorted(map(show_path, data))}, those before had {sorted(map(show_path, like))}: "
            "they must stay the same"
        )
        raise SchemaError(msg)
    for path, tensor in data.items():
        if tensor.shape != like[path].shape:
            msg = f"obs{_at(path)} must have shape {list(like[path].shape)}, as before, got {list(tensor.shape)}"
            raise SchemaError(msg)


def _final_observations(
    after: dict[Path, Tensor], ended: Tensor, info: Mapping[str, Any], warned: set[Any]
) -> dict[Path, Tensor]:
    """Return the observations `after` a step, of environments that ended in it the last ones, from `info`.

    Raises:
        UsageError: if `info` has none for one of them.
        SchemaError: if one of them has another shape, or values that do not fit the dtype.
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
                    f"info[{name!r}]{_at(path)} of environment {env} must have shape {list(value.shape[1:])}, got "
                    f"{list(tensor.shape)}"
                )
                raise SchemaError(msg)
            value[env] = cast(tensor, value.dtype, (str(name), *path), warned)
    return out


def _no_final(envs: list[int]) -> str:
    return (
        f"environment(s) {envs} ended, and info['final_obs'] has no last observation of them, which autoreset_mode "
        "'SAME_STEP' needs: pass info as the environment's step returned it"
    )


def _entry(final: Any, path: Path, env: int) -> Any:
    """Find one environment's entry, in an array of dicts as well as in a dict of arrays."""
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
        msg = f"info['final_obs'] has no entry{_at(path)} of environment {env}: {type(final).__name__} of another form"
        raise KindError(msg) from None


def _at(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path)
