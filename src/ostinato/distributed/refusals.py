"""What a handle to a buffer in an actor refuses, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never, final, overload

from ostinato.errors import OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

__all__ = ["Kept", "need_tensordicts", "refuse_restarts"]


@final
class Kept:
    """An attribute of a handle that refuses to be read: a copy of the part would be of no use.

    Raises:
        UsageError: whenever it is read off a handle.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        """Learn which part it is."""
        self._name = name

    @overload
    def __get__(self, handle: None, owner: type) -> Self: ...

    @overload
    def __get__(self, handle: object, owner: type) -> Never: ...

    def __get__(self, handle: Any, owner: type) -> Any:
        """Refuse; the class itself has the attribute."""
        if handle is None:
            return self
        name = self._name
        msg = (
            f"the buffer's {name} is in its actor, and a copy of it here would change nothing there: call "
            f"rb.apply(lambda rb: ... rb.{name} ...)"
        )
        raise UsageError(msg)


def need_tensordicts(about: Mapping[str, Any], what: str) -> None:
    """Refuse what only a `TensorDictReplayBuffer` has, unless the actor holds one.

    Raises:
        UsageError: naming what it holds.
    """
    if not about["tensordicts"]:
        msg = (
            f"{what} is of a TensorDictReplayBuffer, and the actor holds a {about['kind']}: leave it out, or give "
            "replay_buffer_cls=TensorDictReplayBuffer"
        )
        raise UsageError(msg)


def refuse_restarts(options: Mapping[str, Any] | None) -> None:
    """Refuse that Ray restarts an actor whose rows do not come back.

    Raises:
        OptionError: naming the option.
    """
    if options and options.get("max_restarts"):
        msg = (
            f"remote_config must not hold max_restarts={options['max_restarts']}: a restarted buffer is empty; "
            "ShardedReplayBuffer(num_shards=1, checkpoint_dir=...) comes back with its last checkpoint"
        )
        raise OptionError(msg)
