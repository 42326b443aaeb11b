"""TorchRL's own clients of a replay buffer run unchanged: losses, multi-step returns, the trainer and its hook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ._script import Library
from ._training import LENGTH, corridor, dqn, greedy_return, update

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BEST = 1 - 0.1 * (LENGTH - 1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks of a few units are slower on several threads; draws come from the global generator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def buffer(lib: Any, *, prioritized: bool = False, **options: Any) -> Any:
    """Return a buffer of 1,000 TensorDicts that samples 32."""
    options = {"storage": lib.LazyTensorStorage(1000), "batch_size": 32, **options}
    if prioritized:
        return lib.TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, **options)
    return lib.TensorDictReplayBuffer(**options)


def collect(env: Any, policy: Any, frames: int = 400) -> Any:
    """Return an iterator over batches of 20 steps."""
    from torchrl.collectors import Collector

    return Collector(env, policy, frames_per_batch=20, total_frames=frames)


def train_dqn(name: str, n_steps: int) -> tuple[float, list[float]]:
    """Train DQN in the corridor and return the greedy return, and all parameters."""
    from torchrl.envs import MultiStepTransform

    torch.manual_seed(0)
    policy, explore, loss, target = dqn()
    options = {"transform": MultiStepTransform(n_steps=n_steps, gamma=0.9)} if n_steps > 1 else {}
    rb = buffer(Library(name), **options)
    optimizer = torch.optim.Adam(loss.parameters(), 5e-3)
    for rows in collect(corridor(), explore):
        rb.extend(rows.reshape(-1))
        for _ in range(10):
            batch = rb.sample()
            update(loss, batch, optimizer, target)
    parameters = torch.cat([value.detach().flatten() for value in loss.parameters()])
    return greedy_return(corridor(), policy), parameters.tolist()


@pytest.mark.parametrize("n_steps", [1, 3])
def test_dqn_learns_the_same_from_either_buffer(n_steps: int) -> None:
    theirs, ours = train_dqn("torchrl", n_steps), train_dqn("ostinato", n_steps)
    assert ours == theirs  # the same rows, draws and updates, to the last bit
    assert ours[0] == pytest.approx(BEST)


@pytest.mark.parametrize("prioritized", [False, True])
def test_trainer_learns_through_its_hook_which_saves_the_buffer(tmp_path: Path, *, prioritized: bool) -> None:
    from torchrl.trainers import OptimizerHook, ReplayBufferTrainer, Trainer

    returns = {}
    for name in ("ostinato",) if prioritized else ("torchrl", "ostinato"):
        torch.manual_seed(0)
        policy, explore, loss, target = dqn()
        trainer = Trainer(
            collector=collect(corridor(), explore),
            total_frames=400,
            frame_skip=1,
            optim_steps_per_batch=10,
            loss_module=loss,
            progress_bar=False,
            save_trainer_file=tmp_path / f"{name}.pt",
        )
        rb, other = (buffer(Library(name), prioritized=prioritized) for _ in range(2))
        hook, again = (ReplayBufferTrainer(one, batch_size=32, flatten_tensordicts=True) for one in (rb, other))
        hook.register(trainer)
        OptimizerHook(torch.optim.Adam(loss.parameters(), 5e-3)).register(trainer)
        trainer.register_op("post_optim", target.step)
        trainer.train()
        returns[name] = greedy_return(corridor(), policy)
        again.load_state_dict(hook.state_dict())
        assert len(rb) == len(other) == 400
        if prioritized:  # the hook has written the errors that the loss reports
            assert len(set(rb.sampler.priorities.tolist())) > 100
        samples = []
        for one in (rb, other):
            torch.manual_seed(1)
            samples.append(one.sample())
        assert (samples[0] == samples[1]).all()
    assert returns["ostinato"] == pytest.approx(BEST)
    assert len(set(returns.values())) == 1
