"""The learner of LeRobot 0.6.1 in a process of its own, with the import of its replay buffer changed.

`python _learner.py ORIGINALS SOURCES FOLDER MODULE UPDATES`: the packages of `originals.py`, `src`, a new folder,
the module that the learner takes `ReplayBuffer` from, and the number of updates of SAC. Prints what was found as JSON.

LeRobot 0.6.1 asks for Python 3.12; all that it needs of it is the syntax of generic classes and of type aliases, which
is taken out of its files as they are imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import queue
import re
import sys
import threading
from pathlib import Path
from typing import Any, Generic, TypeVar

ORIGINALS, SOURCES, FOLDER, MODULE, UPDATES = sys.argv[1:]
CAMERA, STATE, EPISODE, SIDE = "observation.images.top", "observation.state", 10, 64
SYNTAX = (
    (rb"(?m)^type (\w+) =", rb"\1 ="),
    (rb"(?m)^def (\w+)\[[^\]]*\]", rb"def \1"),
    (rb"(?m)^class (\w+)\[([^\]]*)\]:", rb"class \1(Generic[\2]):"),
    (rb"(?m)^class (\w+)\[([^\]]*)\]\((.*)\):", rb"class \1(\3, Generic[\2]):"),
)
NAMES: dict[str, Any] = {"Generic": Generic, **{name: TypeVar(name) for name in ("T", "TInput", "TOutput")}}
LINE = b"from .buffer import ReplayBuffer\n"


class Translated(importlib.machinery.SourceFileLoader):
    """Reads a file of LeRobot as Python 3.11 takes it; that of the learner with its line changed."""

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        if path.endswith(".py"):
            for pattern, text in SYNTAX:
                data = re.sub(pattern, text, data)
            if self.name == "lerobot.rl.learner":
                assert data.count(LINE) == 1
                data = data.replace(LINE, f"from {MODULE} import ReplayBuffer\n".encode())
        return data

    def path_stats(self, path: str) -> Any:
        """Refuse: bytecode that was made of the file as it is would be taken."""
        raise OSError(path)

    def exec_module(self, module: Any) -> None:
        vars(module).update(NAMES)
        super().exec_module(module)


class Translate(importlib.abc.MetaPathFinder):
    """Finds the modules of LeRobot."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name.startswith("lerobot") else None
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Translated(name, spec.loader.path)
        return spec


def transition(step: int) -> dict[str, Any]:
    """Return a transition of the actor; every fourth episode is an intervention."""
    import torch

    def show(at: int) -> dict[str, Any]:
        place = torch.tensor([[at % 97, step // EPISODE]], dtype=torch.float32) / 100
        return {CAMERA: torch.full((1, 3, SIDE, SIDE), (at % 256) / 255), STATE: place}

    return {
        "state": show(step),
        "action": torch.full((1, 2), (step % 7) / 7),
        "reward": float(step % 3),
        "next_state": show(step + 1),
        "done": step % (3 * EPISODE) == EPISODE - 1,
        "truncated": step % EPISODE == EPISODE - 1 and step % (3 * EPISODE) != EPISODE - 1,
        "complementary_info": {"is_intervention": step // EPISODE % 4 == 0},
    }


class Log:
    """Takes what the learner logs, sends it transitions, and ends it after the updates."""

    def __init__(self, transitions: Any, end: threading.Event) -> None:
        self.transitions, self.end, self.sent = transitions, end, 200
        self.losses: list[float] = []
        self.sizes: list[int] = []

    def log_dict(self, d: dict[str, Any], **_: Any) -> None:
        from lerobot.transport.utils import transitions_to_bytes

        if "loss_critic" not in d:
            return
        self.losses.append(float(d["loss_critic"]))
        self.sizes = [d["replay_buffer_size"], d["offline_replay_buffer_size"]]
        self.transitions.put(transitions_to_bytes([transition(step) for step in range(self.sent, self.sent + 2)]))
        self.sent += 2
        if len(self.losses) == int(UPDATES):
            self.end.set()


def configure(learner: Any) -> Any:
    """Return the configuration of a learner with a camera, and both kinds of buffer."""
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.envs.configs import HILSerlRobotEnvConfig
    from lerobot.policies.gaussian_actor.configuration_gaussian_actor import GaussianActorConfig

    seen = {CAMERA: PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE)), STATE: PolicyFeature(FeatureType.STATE, (2,))}
    done = {"action": PolicyFeature(FeatureType.ACTION, (2,))}
    policy = GaussianActorConfig(
        input_features=seen, output_features=done, online_buffer_capacity=300, offline_buffer_capacity=100,
        online_step_before_learning=20, state_encoder_hidden_dim=32, latent_dim=32, push_to_hub=False, dataset_stats={
            CAMERA: {"mean": [0.5] * 3, "std": [0.5] * 3}, STATE: {"min": [0.0] * 2, "max": [1.0] * 2},
            "action": {"min": [0.0] * 2, "max": [1.0] * 2},
        },
    )  # fmt: skip
    cfg = learner.TrainRLServerPipelineConfig(
        dataset=DatasetConfig(repo_id="tests/offline", root=f"{FOLDER}/offline"), env=HILSerlRobotEnvConfig(),
        policy=policy, output_dir=Path(FOLDER) / "out", batch_size=8, log_freq=1, save_freq=int(UPDATES),
        job_name="test", save_checkpoint=True,
    )  # fmt: skip
    cfg.env.task = "tests/online"
    cfg.env.features = {**seen, **done}
    cfg.env.features_map = {name: name for name in cfg.env.features}
    cfg.validate()
    return cfg


def main() -> None:
    """Write the offline dataset, run the learner, and say what it did."""
    official = importlib.import_module("_oracle").official

    sys.path[:] = [ORIGINALS, *sys.path[1:], SOURCES]
    sys.meta_path.insert(0, Translate())
    sys.dont_write_bytecode = True
    learner = official("lerobot.rl.learner")
    from lerobot.transport.utils import transitions_to_bytes

    demonstrations = learner.ReplayBuffer(100, "cpu", state_keys=[CAMERA, STATE])
    for step in range(60):
        demonstrations.add(**transition(step))
    demonstrations.to_lerobot_dataset("tests/offline", fps=10, root=f"{FOLDER}/offline")

    transitions: Any = queue.Queue()
    transitions.put(transitions_to_bytes([transition(step) for step in range(200)]))
    end = threading.Event()
    log = Log(transitions, end)
    learner.set_seed(0)
    learner.add_actor_information_and_train(configure(learner), log, end, transitions, queue.Queue(), queue.Queue())
    saved = sorted(path.name for path in (Path(FOLDER) / "out").iterdir())
    sys.stdout.write(json.dumps({"losses": log.losses, "sizes": log.sizes, "saved": saved,
                                 "module": learner.ReplayBuffer.__module__}))  # fmt: skip


if __name__ == "__main__":
    logging.disable(logging.INFO)
    main()
