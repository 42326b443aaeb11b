"""The replay buffer of LeRobot's actor and learner (HIL-SERL), on top of Ostinato.

`docs/compat/lerobot.md` lists the differences from the original. LeRobot is imported by `to_lerobot_dataset` alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self, final

import torch

from ostinato import buffers
from ostinato._optional import require
from ostinato.buffers.options import positive
from ostinato.core.rows import map_leaves
from ostinato.errors import CapacityError, EmptyBufferError, KeyMissingError, OptionError
from ostinato.storages import LazyTensorStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.durable.progress import ProgressOption

__all__ = ["ReplayBuffer", "random_shift"]

_IMAGE = "observation.image"
_INFO = "complementary_info."
_ACTION, _REWARD, _DONE, _TRUNCATED = "action", "next.reward", "next.done", "next.truncated"
_CHANNELS = (1, 3)


def random_shift(images: Tensor, pad: int = 4) -> Tensor:
    """Shift each image by up to `pad` pixels in both directions; pixels of the border are repeated (DrQ).

    Args:
        images: `[B, C, H, W]`.
        pad: Largest shift.

    Returns:
        `[B, C, H, W]`, a copy.

    Examples:
        >>> import torch
        >>> random_shift(torch.zeros(2, 3, 8, 8), pad=2).shape
        torch.Size([2, 3, 8, 8])
    """
    batch, _, height, width = images.shape
    top, left = (torch.randint(0, 2 * pad + 1, (batch, 1), device=images.device) for _ in range(2))
    rows = (torch.arange(height, device=images.device) + top - pad).clamp_(0, height - 1)
    columns = (torch.arange(width, device=images.device) + left - pad).clamp_(0, width - 1)
    which = torch.arange(batch, device=images.device)[:, None, None]
    return images.movedim(1, -1)[which, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


@final
class ReplayBuffer:
    """The most recent transitions, with each observation stored once, in the dtype in which it is given.

    A next state is stored separately only where it is not the state of the row that follows: at the end of an episode,
    at the newest row, and where transitions were left out. Samples are drawn uniformly with replacement, with the
    global generator of the device. Thread-safe: the learner samples while other threads add.

    Args:
        capacity: Capacity in transitions; new ones replace the oldest.
        device: Device of samples.
        state_keys: Fields of a dataset that are states, for `from_lerobot_dataset`.
        image_augmentation_function: Takes and returns images `[B, C, H, W]`; None: `random_shift`.
        use_drq: Augment the images (`observation.image...`) of samples.
        storage_device: Device of the rows.
        optimize_memory: No effect: observations are always stored once, without loss of final states.
        image_dtype: `torch.uint8` stores images that are floats in [0, 1] as bytes, rounded to multiples of 1/255;
            samples have floats in [0, 1]. None stores images as they are given.

    Raises:
        KindError: `capacity` is not an integer.
        OptionError: `capacity` is below 1, or `image_dtype` is another dtype.

    Examples:
        >>> import torch
        >>> from ostinato.compat.lerobot import ReplayBuffer
        >>> buffer = ReplayBuffer(100, device="cpu", use_drq=False)
        >>> state, action = {"observation.state": torch.zeros(1, 3)}, torch.zeros(1, 2)
        >>> buffer.add(state, action, 1.0, state, done=False, truncated=False)
        >>> buffer.sample(1)["state"]["observation.state"].shape
        torch.Size([1, 3])
    """

    def __init__(
        self,
        capacity: int,
        device: str | torch.device = "cuda:0",
        state_keys: Sequence[str] | None = None,
        image_augmentation_function: Callable[[Tensor], Tensor] | None = None,
        use_drq: bool = True,  # noqa: FBT001, FBT002
        storage_device: str | torch.device = "cpu",
        optimize_memory: bool = False,  # noqa: FBT001, FBT002
        *,
        image_dtype: torch.dtype | None = None,
    ) -> None:
        if image_dtype not in {None, torch.uint8}:
            msg = f"image_dtype must be torch.uint8 or None, got {image_dtype}"
            raise OptionError(msg)
        self.capacity = positive("capacity", capacity)
        self.device = device
        self.storage_device = storage_device
        self.state_keys = [] if state_keys is None else state_keys
        self.image_augmentation_function = image_augmentation_function or random_shift
        self.use_drq = use_drq
        self.optimize_memory = optimize_memory
        self.image_dtype = image_dtype
        storage = LazyTensorStorage(self.capacity, device=torch.device(storage_device), single_copy=True)
        self._rows = buffers.ReplayBuffer(storage=storage)

    def __len__(self) -> int:
        """Number of transitions."""
        return len(self._rows)

    @property
    def size(self) -> int:
        """Number of transitions."""
        return len(self._rows)

    @property
    def position(self) -> int:
        """Slot of the next transition."""
        return self._rows.cursor

    @property
    def initialized(self) -> bool:
        """Whether there were transitions."""
        return self._rows.storage.schema is not None

    # -- writing ----------------------------------------------------------------------------------------------

    def add(
        self,
        state: Mapping[str, Tensor],
        action: Tensor,
        reward: float | Tensor,
        next_state: Mapping[str, Tensor],
        done: bool,  # noqa: FBT001
        truncated: bool,  # noqa: FBT001
        complementary_info: Mapping[str, Tensor | float] | None = None,
    ) -> None:
        """Add a transition; a leading dimension of 1 of its tensors is left out.

        The first transition determines the keys: others are ignored, and missing entries of `complementary_info` are
        NaN (0 for integers).

        Args:
            state: Tensors by key.
            action: The action.
            reward: The reward.
            next_state: The state after the action, with the keys of `state`: at the end of an episode the final one,
                not that of the reset.
            done: Whether the episode terminated: the target does not bootstrap.
            truncated: Whether the episode was cut by a time limit.
            complementary_info: Further values, tensors or numbers.

        Raises:
            KeyMissingError: A key of the states is missing; nothing is changed.
            OptionError: An entry of `complementary_info` is neither a tensor nor a number.
            SchemaError: A shape does not match; nothing is changed.
        """
        fields = self._fields()
        keys = fields["state"] if fields else dict.fromkeys(state)
        for name, given in (("state", state), ("next_state", next_state)):
            missing = [key for key in keys if key not in given]
            if missing:
                msg = f"{name} must have the keys {[*keys]} of the first transition, got {[*given]}: add {missing}"
                raise KeyMissingError(msg)
        row: dict[str, Any] = {
            "state": {key: self._as_stored(key, state[key]) for key in keys},
            "next": {"state": {key: self._as_stored(key, next_state[key]) for key in keys}},
            "action": self._as_stored("", action),
            "reward": torch.as_tensor(reward, dtype=torch.float32, device=self.storage_device).reshape(()),
            "done": bool(done),
            "truncated": bool(truncated),
        }
        info = {key: _as_number(key, value) for key, value in (complementary_info or {}).items()}
        absent = fields["info"] if fields else {}
        held = {key: self._as_stored("", info[key]) if key in info else absent[key] for key in absent or info}
        self._rows.add({**row, "info": held} if held and (absent or not fields) else row)

    def _as_stored(self, key: str, value: Tensor) -> Tensor:
        """Return a value on the device of the rows, without its leading dimension, in the dtype of its field."""
        value = value.detach().to(self.storage_device).squeeze(0)
        if self.image_dtype is not None and key.startswith(_IMAGE) and value.is_floating_point():
            return (value * 255).round_().clamp_(0, 255).to(self.image_dtype)
        return value.to(torch.float32) if value.dtype is torch.float64 else value

    def _fields(self) -> dict[str, dict[str, Tensor]]:
        """Return the keys of states and of further values, with the values of missing entries; none before a row."""
        schema = self._rows.storage.schema
        if schema is None:
            return {}
        found: dict[str, dict[str, Tensor]] = {"state": {}, "info": {}}
        for leaf in schema.leaves:
            if leaf.path[0] in found:
                blank = math.nan if leaf.dtype.is_floating_point else 0
                found[str(leaf.path[0])][str(leaf.path[1])] = torch.full(
                    () if leaf.path[0] == "state" else leaf.shape, blank, dtype=leaf.dtype, device=self.storage_device
                )
        return found

    # -- reading ----------------------------------------------------------------------------------------------

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Draw transitions.

        Args:
            batch_size: Number of transitions; at most as many as there are.

        Returns:
            `state` and `next_state` (dicts), `action`, `reward`, `done`, `truncated` and `complementary_info` (a dict,
            or None): tensors `[B, *shape]` in the default dtype of torch, on `device`. Copies.

        Raises:
            EmptyBufferError: There are no transitions.
        """
        if not len(self):
            msg = "the buffer has no transitions: add some before sample()"
            raise EmptyBufferError(msg)
        return self._for_learner(self._rows.sample(min(positive("batch_size", batch_size), len(self))))

    def get_iterator(
        self,
        batch_size: int,
        async_prefetch: bool = True,  # noqa: FBT001, FBT002
        queue_size: int = 2,
    ) -> Iterator[dict[str, Any]]:
        """Iterate over batches without end; see `sample`.

        Args:
            batch_size: Number of transitions.
            async_prefetch: Draw, augment and move batches in a thread.
            queue_size: Batches that are kept ready by the thread.

        Raises:
            EmptyBufferError: From the first batch, if there are no transitions.
        """
        if not async_prefetch:
            while True:
                yield self.sample(batch_size)
        reader = self._rows.view(batch_size=batch_size, prefetch=queue_size, transform=self._for_learner)
        try:
            while True:
                yield reader.sample()
        finally:
            reader.shutdown()

    def _for_learner(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Return a batch as the learner gets it."""
        scale = {key for key in rows["state"] if self.image_dtype is not None and key.startswith(_IMAGE)}
        rows = map_leaves(rows, lambda x: x.to(self.device).to(torch.get_default_dtype()))
        states = rows["state"], rows["next"]["state"]
        for state in states:
            state.update({key: state[key] / 255 for key in scale})
        if self.use_drq:
            self._augment(*states)
        names = ("action", "reward", "done", "truncated")
        found = {"state": states[0], "next_state": states[1], **{name: rows[name] for name in names}}
        return {**found, "complementary_info": rows.get("info")}

    def _augment(self, state: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        """Augment the images of states and next states, all of one size in one call."""
        sizes: dict[torch.Size, list[str]] = {}
        for key, images in state.items():
            if key.startswith(_IMAGE):
                sizes.setdefault(images.shape, []).append(key)
        for keys in sizes.values():
            joined = torch.cat([part[key] for key in keys for part in (state, after)])
            moved = iter(self.image_augmentation_function(joined).chunk(2 * len(keys)))
            for key in keys:
                state[key], after[key] = next(moved), next(moved)

    # -- saving -----------------------------------------------------------------------------------------------

    def dumps(self, path: str | Path, *, incremental: bool = False, progress: ProgressOption = None) -> None:
        """Save transitions and position to a directory, whole or not at all; see `ostinato.ReplayBuffer.dumps`."""
        self._rows.dumps(path, incremental=incremental, progress=progress)

    def loads(self, path: str | Path, *, progress: ProgressOption = None) -> None:
        """Restore what `dumps` saved; see `ostinato.ReplayBuffer.loads`."""
        self._rows.loads(path, progress=progress)

    # -- datasets ---------------------------------------------------------------------------------------------

    @classmethod
    def from_lerobot_dataset(
        cls,
        lerobot_dataset: Any,
        device: str | torch.device = "cuda:0",
        state_keys: Sequence[str] | None = None,
        capacity: int | None = None,
        image_augmentation_function: Callable[[Tensor], Tensor] | None = None,
        use_drq: bool = True,  # noqa: FBT001, FBT002
        storage_device: str | torch.device = "cpu",
        optimize_memory: bool = False,  # noqa: FBT001, FBT002
        *,
        image_dtype: torch.dtype | None = None,
    ) -> Self:
        """Return a buffer with the frames of a dataset, read one after the other.

        The next state of the last frame of an episode is its own state, as datasets do not have a later one. `done` is
        `next.done`, and without that field whether the episode ends; `truncated` is whether it ends without `done`.

        Args:
            lerobot_dataset: Frames by position, with `action`, `next.reward`, `episode_index` and the states.
            state_keys: Fields that are states.
            capacity: Capacity; None: the number of frames.
            device: See `ReplayBuffer`, also for the other arguments.
            image_augmentation_function: See there.
            use_drq: See there.
            storage_device: See there.
            optimize_memory: See there.
            image_dtype: See there.

        Raises:
            CapacityError: `capacity` is below the number of frames.
            OptionError: There are no `state_keys`.
        """
        frames = len(lerobot_dataset)
        if capacity is not None and capacity < frames:
            msg = f"capacity must be at least the {frames} frames of the dataset, got {capacity}"
            raise CapacityError(msg)
        if state_keys is None:
            msg = "from_lerobot_dataset() needs state_keys, the fields that are states, such as ['observation.state']"
            raise OptionError(msg)
        made = cls(
            capacity or frames, device, state_keys, image_augmentation_function, use_drq, storage_device,
            optimize_memory, image_dtype=image_dtype,
        )  # fmt: skip
        frame = lerobot_dataset[0] if frames else None
        for number in range(frames):
            after = lerobot_dataset[number + 1] if number + 1 < frames else None
            made._add_frame(frame, after)
            frame = after
        return made

    def _add_frame(self, frame: Any, after: Any) -> None:
        """Add a frame of a dataset; `after` is the frame that follows it, or None."""
        last = after is None or bool(after["episode_index"] != frame["episode_index"])
        done = bool(frame[_DONE]) if _DONE in frame else last
        following = frame if last or done else after
        state, next_state = ({key: part[key].unsqueeze(0) for key in self.state_keys} for part in (frame, following))
        info = {key.removeprefix(_INFO): value for key, value in frame.items() if key.startswith(_INFO)}
        truncated = bool(frame[_TRUNCATED]) if _TRUNCATED in frame else last and not done
        self.add(state, frame[_ACTION].unsqueeze(0), frame[_REWARD], next_state, done, truncated, info or None)

    def to_lerobot_dataset(
        self, repo_id: str, fps: int = 1, root: str | Path | None = None, task_name: str = "from_replay_buffer"
    ) -> Any:
        """Write the transitions to a new `LeRobotDataset`, the oldest first, and return it. Needs LeRobot.

        Final states have no place in it, and interrupted writes leave an incomplete dataset: `dumps` saves the buffer.

        Args:
            repo_id: Name of the dataset.
            fps: Frames per second.
            root: Its directory, which does not exist; None: LeRobot's own choice.
            task_name: Task of all frames.

        Raises:
            CapacityError: There are no transitions.
            MissingExtraError: LeRobot is not installed.
        """
        if not len(self):
            msg = "the buffer has no transitions: there is no dataset without frames"
            raise CapacityError(msg)
        made = require("lerobot.datasets").LeRobotDataset.create(
            repo_id=repo_id, fps=fps, root=root, robot_type=None, features=self._features(), use_videos=True
        )
        made.writer.start_image_writer(num_processes=0, num_threads=3)
        first = self.position if len(self) == self.capacity else 0
        for number in range(len(self)):
            row = self._rows[(first + number) % self.capacity]
            made.add_frame({**_frame(row), "task": task_name})
            if row["done"] or row["truncated"]:
                made.save_episode()
        if made.has_pending_frames():
            made.save_episode()
        made.writer.stop_image_writer()
        made.finalize()
        return made

    def _features(self) -> dict[str, dict[str, Any]]:
        """Return the features of a dataset."""
        numbers = ("index", "episode_index", "frame_index", "task_index")
        features: dict[str, dict[str, Any]] = {name: {"dtype": "int64", "shape": [1]} for name in numbers}
        features["timestamp"] = {"dtype": "float32", "shape": [1]}
        for name, value in _frame(self._rows[0]).items():
            image = value.ndim == 3 and value.shape[0] in _CHANNELS
            dtype = "image" if image else "bool" if value.dtype is torch.bool else "float32"
            features[name] = {"dtype": dtype, "shape": tuple(value.shape)}
        return features


def _as_number(key: str, value: Any) -> Tensor:
    """Return an entry of `complementary_info` as a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (int, float)):
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    msg = f"complementary_info[{key!r}] must be a tensor or a number, got {type(value).__name__}"
    raise OptionError(msg)


def _frame(row: dict[str, Any]) -> dict[str, Tensor]:
    """Return a row as a frame of a dataset: numbers as float32 with at least one dimension, images as they are."""
    flags = {_DONE: row["done"], _TRUNCATED: row["truncated"]}
    fields = {**row["state"], _ACTION: row["action"], _REWARD: row["reward"], **flags}
    fields |= {f"{_INFO}{key}": value for key, value in row.get("info", {}).items()}
    found = {key: value.cpu().reshape(value.shape or (1,)) for key, value in fields.items()}
    kept = (torch.bool, torch.uint8)
    return {key: value if value.dtype in kept else value.to(torch.float32) for key, value in found.items()}
