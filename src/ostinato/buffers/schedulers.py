"""Schedulers: change a number of a sampler, such as `alpha` or `beta`, step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import torch

from ostinato.buffers.ensemble import ReplayBufferEnsemble
from ostinato.buffers.options import positive
from ostinato.buffers.replay import ReplayBuffer
from ostinato.core.options import check_number
from ostinato.errors import CheckpointError, KindError, OptionError
from ostinato.samplers import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

Value: TypeAlias = "float | Tensor"
_TAKEN: tuple[type, ...] = (ReplayBuffer, ReplayBufferEnsemble, Sampler)


class ParameterScheduler(ABC):
    """Base class of schedulers, which give a parameter of a sampler a new value at each `step`.

    A scheduler of your own implements `_step`, which returns the value for the step number `_step_cnt` (the first one
    is 1). The sampler checks each value, and uses it from its next draw on. Not thread-safe: one thread steps.

    Args:
        obj: the sampler, or the buffer whose sampler is meant. If the buffer gets another sampler later, the scheduler
            keeps changing the one that it was made with.
        param_name: attribute of the sampler, a number or a tensor.
        min_value: smallest value that is set; None for no bound.
        max_value: largest value that is set; None for no bound.

    Raises:
        KindError: if `obj` is neither a buffer nor a sampler, or a bound is no number.
        OptionError: if the sampler has no such attribute, it is not a number, or the bounds exclude each other.
    """

    def __init__(
        self,
        obj: ReplayBuffer | ReplayBufferEnsemble | Sampler,
        param_name: str,
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        if not isinstance(obj, _TAKEN):
            msg = (
                "ParameterScheduler only supports Sampler class. Pass either `ReplayBuffer` or `Sampler` object. Got "
                f"{type(obj)} instead"
            )
            raise KindError(msg)
        self.sampler = obj if isinstance(obj, Sampler) else obj.sampler
        self.param_name = param_name
        initial = getattr(self.sampler, param_name, None)
        if not isinstance(initial, (int, float, torch.Tensor)) or isinstance(initial, bool):
            what = f"does not have an attribute {param_name}" if initial is None else f"has {param_name}={initial!r}"
            msg = f"Provided class {type(self.sampler).__name__} {what}: name a number of the sampler, such as 'beta'"
            raise OptionError(msg)
        for name, bound in (("min_value", min_value), ("max_value", max_value)):
            if bound is not None:
                check_number(name, bound, kind=KindError)
        if min_value is not None and max_value is not None and min_value > max_value:
            msg = f"min_value must be at most max_value, got {min_value} and {max_value}"
            raise OptionError(msg)
        self.initial_val: Value = initial.clone() if isinstance(initial, torch.Tensor) else initial
        """The value at the beginning."""
        self._min_val, self._max_val = min_value, max_value
        self._step_cnt = 0

    @abstractmethod
    def _step(self) -> Value:
        """Return the value of the current step, before bounds are applied."""

    @property
    def value(self) -> Value:
        """The value that the sampler has now."""
        value: Value = getattr(self.sampler, self.param_name)
        return value

    def step(self) -> None:
        """Set the next value.

        Raises:
            OptionError: if the sampler does not accept it.
        """
        self._step_cnt += 1
        value = self._step()
        if isinstance(value, torch.Tensor):
            if self._min_val is not None or self._max_val is not None:
                value = value.clip(self._min_val, self._max_val)
        else:
            value = value if self._min_val is None else max(value, self._min_val)
            value = value if self._max_val is None else min(value, self._max_val)
        setattr(self.sampler, self.param_name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the step number and the options: all attributes but the sampler and functions.

        The value itself is part of the state of the sampler.
        """
        return {name: value for name, value in vars(self).items() if name != "sampler" and not callable(value)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the next `step` then continues from there.

        Raises:
            CheckpointError: if it is the state of another scheduler; nothing is changed.
        """
        wanted = self.state_dict()
        if state_dict.keys() != wanted.keys() or state_dict["param_name"] != self.param_name:
            msg = (
                f"this is not the state of a {type(self).__name__} of {self.param_name!r}: expected the entries "
                f"{sorted(wanted)}, got {sorted(map(str, state_dict))} of {state_dict.get('param_name')!r}"
            )
            raise CheckpointError(msg)
        vars(self).update(state_dict)


@final
class LambdaScheduler(ParameterScheduler):
    """Sets the initial value times `lambda_fn(step)`, like `torch.optim.lr_scheduler.LambdaLR`.

    Args:
        obj: see `ParameterScheduler`.
        param_name: see `ParameterScheduler`.
        lambda_fn: factor for a step number, counted from 1. It is not part of the state.
        min_value: smallest value that is set; None for no bound.
        max_value: largest value that is set; None for no bound.

    Examples:
        >>> from ostinato import LambdaScheduler, PrioritizedSampler
        >>> sampler = PrioritizedSampler(100, alpha=0.8, beta=0.5)
        >>> scheduler = LambdaScheduler(sampler, "alpha", lambda step: 0.5**step)
        >>> scheduler.step()
        >>> sampler.alpha
        0.4
    """

    def __init__(
        self,
        obj: ReplayBuffer | ReplayBufferEnsemble | Sampler,
        param_name: str,
        lambda_fn: Callable[[int], float],
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        if not callable(cast("Any", lambda_fn)):
            msg = f"lambda_fn must be a function from a step number to a factor, got {type(lambda_fn).__name__}"
            raise KindError(msg)
        self.lambda_fn = lambda_fn

    def _step(self) -> Value:
        return self.initial_val * self.lambda_fn(self._step_cnt)


@final
class LinearScheduler(ParameterScheduler):
    """Moves a parameter in equal steps from its initial value to `final_value`, where it stays.

    Prioritized replay, for example, anneals `beta` to 1 (Schaul et al., 2016, "Prioritized Experience Replay", 3.4).

    Args:
        obj: see `ParameterScheduler`.
        param_name: see `ParameterScheduler`.
        final_value: value after `num_steps` steps.
        num_steps: number of steps, at least 1.

    Raises:
        OptionError: if `num_steps` is below 1.
        KindError: if it is no integer, or `final_value` no number.

    Examples:
        >>> from ostinato import LinearScheduler, PrioritizedSampler
        >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.5)
        >>> scheduler = LinearScheduler(sampler, "beta", final_value=1.0, num_steps=2)
        >>> values = []
        >>> for _ in range(3):
        ...     scheduler.step()
        ...     values.append(sampler.beta)
        >>> values
        [0.75, 1.0, 1.0]
    """

    def __init__(
        self,
        obj: ReplayBuffer | ReplayBufferEnsemble | Sampler,
        param_name: str,
        final_value: float,
        num_steps: int,
    ) -> None:
        super().__init__(obj, param_name)
        self.num_steps = positive("num_steps", num_steps)
        start, final = self.initial_val, check_number("final_value", final_value, kind=KindError)
        # of the dtype and on the device of the parameter
        self.final_val: Value = torch.full_like(start, final) if isinstance(start, torch.Tensor) else final_value

    def _step(self) -> Value:
        if self._step_cnt >= self.num_steps:
            return self.final_val
        return self.initial_val + (self.final_val - self.initial_val) / self.num_steps * self._step_cnt


@final
class StepScheduler(ParameterScheduler):
    """Multiplies a parameter by `gamma`, or adds `gamma` to it, once in `n_steps` steps.

    It starts from the value that the parameter has at that step, so other code may change it in between.

    Args:
        obj: see `ParameterScheduler`.
        param_name: see `ParameterScheduler`.
        gamma: factor, or summand.
        n_steps: number of steps from one change to the next, at least 1.
        mode: `"multiplicative"` or `"additive"`.
        min_value: smallest value that is set; None for no bound.
        max_value: largest value that is set; None for no bound.

    Raises:
        OptionError: for another mode, or `n_steps` below 1.
        KindError: if `n_steps` is no integer, or `gamma` no number.

    Examples:
        >>> from ostinato import PrioritizedSampler, StepScheduler
        >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.5)
        >>> scheduler = StepScheduler(sampler, "beta", gamma=0.25, n_steps=2, mode="additive", max_value=1.0)
        >>> values = []
        >>> for _ in range(6):
        ...     scheduler.step()
        ...     values.append(sampler.beta)
        >>> values
        [0.5, 0.75, 0.75, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        obj: ReplayBuffer | ReplayBufferEnsemble | Sampler,
        param_name: str,
        gamma: float = 0.9,
        n_steps: int = 1,
        mode: str = "multiplicative",
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        if mode not in {"additive", "multiplicative"}:
            msg = f"Invalid mode: {mode}. Choose 'multiplicative' or 'additive'"
            raise OptionError(msg)
        check_number("gamma", gamma, kind=KindError)
        self.gamma, self.n_steps, self.mode = gamma, positive("n_steps", n_steps), mode

    def _step(self) -> Value:
        if self._step_cnt % self.n_steps:
            return self.value
        return self.value + self.gamma if self.mode == "additive" else self.value * self.gamma


@final
class SchedulerList:
    """Several schedulers, which step together.

    Args:
        schedulers: one scheduler or several.

    Raises:
        KindError: for other objects.
    """

    def __init__(self, schedulers: ParameterScheduler | Iterable[ParameterScheduler]) -> None:
        given: Any = [schedulers] if isinstance(schedulers, ParameterScheduler) else schedulers
        if not hasattr(given, "__iter__"):
            msg = f"SchedulerList takes schedulers, got {type(given).__name__}"
            raise KindError(msg)
        self.schedulers: list[ParameterScheduler] = []
        for scheduler in given:
            self.append(scheduler)

    def append(self, scheduler: ParameterScheduler) -> None:
        """Add a scheduler at the end.

        Raises:
            KindError: if it has no method `step`.
        """
        if not callable(getattr(scheduler, "step", None)):
            msg = f"SchedulerList takes schedulers, got {type(scheduler).__name__}"
            raise KindError(msg)
        self.schedulers.append(scheduler)

    def step(self) -> None:
        """Step each scheduler, in order."""
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the schedulers, in order."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: if it is the state of other schedulers.
        """
        states = state_dict.get("schedulers", [])
        if len(states) != len(self.schedulers):
            msg = f"the state holds {len(states)} schedulers, this list has {len(self.schedulers)}"
            raise CheckpointError(msg)
        for scheduler, state in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(state)
