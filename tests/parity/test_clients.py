"""TorchRL's own clients of a replay buffer run unchanged: losses, multi-step returns, the trainer and its hook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Categorical
from torchrl.envs import MultiStepTransform
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate
from torchrl.trainers import OptimizerHook, ReplayBufferTrainer, Trainer

from ._script import Library
from .test_collectors import Numbered

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks of a few units are slower on several threads; draws come from the global generator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def buffer(lib: Any, prioritized: bool, n_steps: int) -> Any:
    """Return a buffer of 1,000 TensorDicts that samples 32."""
    options: dict[str, Any] = {"storage": lib.LazyTensorStorage(1000), "batch_size": 32}
    if n_steps > 1:
        options["transform"] = MultiStepTransform(n_steps=n_steps, gamma=0.9)
    if prioritized:
        return lib.TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, **options)
    return lib.TensorDictReplayBuffer(**options)


@pytest.mark.parametrize(("prioritized", "n_steps", "kept"), [(False, 1, 400), (True, 1, 400), (False, 3, 397)])
def test_dqn_learns_the_same_through_the_hook_which_saves_the_buffer(tmp_path, *, prioritized, n_steps, kept):
    """Without priorities the same rows, draws and updates, to the last bit; the last of n steps wait for more."""
    spec, learned = Categorical(3), []
    for name in ("ostinato",) if prioritized else ("torchrl", "ostinato"):
        torch.manual_seed(0)
        policy = QValueActor(nn.Linear(3, 3), in_keys=["pixel"], spec=spec, action_space="categorical")
        explore = TensorDictSequential(policy, EGreedyModule(spec, eps_init=0.5, eps_end=0.5))
        loss = DQNLoss(policy, action_space="categorical", delay_value=True)
        loss.make_value_estimator(gamma=0.9)
        trainer = Trainer(
            collector=Collector(Numbered(), explore, frames_per_batch=20, total_frames=400),
            total_frames=400,
            frame_skip=1,
            optim_steps_per_batch=10,
            loss_module=loss,
            progress_bar=False,
            save_trainer_file=tmp_path / f"{name}.pt",
        )
        rb, other = (buffer(Library(name), prioritized, n_steps) for _ in range(2))
        hook, again = (ReplayBufferTrainer(one, batch_size=32, flatten_tensordicts=True) for one in (rb, other))
        hook.register(trainer)
        OptimizerHook(torch.optim.Adam(loss.parameters(), 5e-3)).register(trainer)
        trainer.register_op("post_optim", HardUpdate(loss, value_network_update_interval=20).step)
        trainer.train()
        learned.append([value.tolist() for value in loss.parameters()])
        again.load_state_dict(hook.state_dict())
        assert len(rb) == len(other) == kept
        if prioritized:  # the hook has written the errors that the loss reports
            assert len(set(rb.sampler.priorities.tolist())) > 100
        samples = []
        for one in (rb, other):
            torch.manual_seed(1)
            samples.append(one.sample())
        assert (samples[0] == samples[1]).all()
    assert learned[0] == learned[-1]
