"""TorchRL's own clients of a replay buffer run unchanged: losses, multi-step returns, the trainer and its hook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ._script import library
from ._training import LENGTH, corridor, dqn, greedy_return, sac, update

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


def train_dqn(name: str, *, prioritized: bool = False, n_steps: int = 1) -> tuple[float, list[float]]:
    """Train DQN in the corridor and return the greedy return, and all parameters."""
    from torchrl.envs import MultiStepTransform

    torch.manual_seed(0)
    lib = library(name)
    policy, explore, loss, target = dqn()
    options = {"transform": MultiStepTransform(n_steps=n_steps, gamma=0.9)} if n_steps > 1 else {}
    rb = buffer(lib, prioritized=prioritized, **options)
    optimizer = torch.optim.Adam(loss.parameters(), 5e-3)
    for rows in collect(corridor(), explore):
        rb.extend(rows.reshape(-1))
        for _ in range(10):
            batch = rb.sample()
            update(loss, batch, optimizer, target)
            if prioritized:
                rb.update_tensordict_priority(batch)
    assert not prioritized or len(set(rb.sampler.priorities.tolist())) > 100
    parameters = torch.cat([value.detach().flatten() for value in loss.parameters()])
    return greedy_return(corridor(), policy), parameters.tolist()


@pytest.mark.parametrize("n_steps", [1, 3])
def test_dqn_learns_the_same_from_either_buffer(n_steps: int) -> None:
    theirs, ours = train_dqn("torchrl", n_steps=n_steps), train_dqn("ostinato", n_steps=n_steps)
    assert ours == theirs  # the same rows, draws and updates, to the last bit
    assert ours[0] == pytest.approx(BEST)


def test_dqn_learns_from_prioritized_rows() -> None:
    assert train_dqn("ostinato", prioritized=True)[0] == pytest.approx(BEST)


def test_priorities_are_the_errors_that_the_loss_reports() -> None:
    torch.manual_seed(0)
    loss = sac()
    rb = buffer(library("ostinato"), prioritized=True)
    flags = {name: torch.zeros(60, 1, dtype=torch.bool) for name in ("done", "terminated")}
    then = TensorDict({"observation": torch.randn(60, 1), "reward": torch.randn(60, 1), **flags}, [60])
    rb.extend(TensorDict({"observation": torch.randn(60, 1), "action": torch.rand(60, 1), "next": then}, [60]))
    expected = rb.sampler.priorities.clone()
    batch = rb.sample()
    loss(batch)
    rb.update_tensordict_priority(batch)
    for slot, error in zip(batch["index"].tolist(), batch["td_error"].flatten().tolist(), strict=True):
        expected[slot] = error
    assert torch.allclose(rb.sampler.priorities, expected)
    assert len(expected.unique()) > 10
    assert rb.stats().stale_updates == 0


def make_trainer(name: str, rb: Any, loss: Any, explore: Any, path: Path, *, frames: int = 400) -> tuple[Any, Any]:
    """Return TorchRL's trainer, with its replay buffer hook over a buffer."""
    from torchrl.trainers import OptimizerHook, ReplayBufferTrainer, Trainer

    trainer = Trainer(
        collector=collect(corridor(), explore, frames),
        total_frames=frames,
        frame_skip=1,
        optim_steps_per_batch=10,
        loss_module=loss,
        progress_bar=False,
        save_trainer_file=path / f"{name}.pt",
    )
    hook = ReplayBufferTrainer(rb, batch_size=32, flatten_tensordicts=True)
    hook.register(trainer)
    OptimizerHook(torch.optim.Adam(loss.parameters(), 5e-3)).register(trainer)
    return trainer, hook


@pytest.mark.parametrize("prioritized", [False, True])
def test_trainer_learns_through_its_hook(tmp_path: Path, *, prioritized: bool) -> None:
    returns = {}
    for name in ("ostinato",) if prioritized else ("torchrl", "ostinato"):
        torch.manual_seed(0)
        policy, explore, loss, target = dqn()
        rb = buffer(library(name), prioritized=prioritized)
        trainer, _ = make_trainer(name, rb, loss, explore, tmp_path)
        trainer.register_op("post_optim", target.step)
        trainer.train()
        assert len(rb) == 400
        returns[name] = greedy_return(corridor(), policy)
    assert returns["ostinato"] == pytest.approx(BEST)
    assert len(set(returns.values())) == 1


def test_hook_saves_and_restores_the_buffer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    lib = library("ostinato")
    _, explore, loss, _ = dqn()
    rb = buffer(lib, prioritized=True)
    trainer, hook = make_trainer("ostinato", rb, loss, explore, tmp_path, frames=40)
    trainer.train()
    other = buffer(lib, prioritized=True)
    _, again = make_trainer("other", other, loss, explore, tmp_path)
    again.load_state_dict(hook.state_dict())
    assert len(other) == 40
    assert torch.equal(other.sampler.priorities, rb.sampler.priorities)
    torch.manual_seed(1)
    expected = rb.sample()
    torch.manual_seed(1)
    assert (other.sample() == expected).all()
