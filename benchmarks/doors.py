"""The buffers of `ostinato.compat` beside those that they replace: time of a call, and bytes of the rows.

    make build/originals/.installed                       # the originals, without their requirements
    python -m benchmarks.doors

LeRobot: batches of 64 with two cameras. skrl: 64 sequences of 16 steps. Holosoma: 3-step returns of 64 environments.
One thread; the median of 5 rounds of 20 calls. With `--pauses`: how long the calls of LeRobot's learner take while a
thread saves, beside their time without one.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ostinato.compat import fasttd3, lerobot, skrl

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).resolve().parents[1] / "build" / "originals"
NAMES = {"OBS_IMAGE": "observation.image", "ACTION": "action", "REWARD": "next.reward", "DONE": "next.done"}


def original(module: str, **around: dict[str, Any]) -> Any:
    """Return a module of the folder, with stand-ins for modules that it imports and does not need here."""
    sys.path.append(str(FOLDER))
    package = module.partition(".")[0]
    parents = [module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)] + [f"{package}.utils"]
    found = {name: {"__path__": [str(FOLDER / name.replace(".", "/"))]} for name in parents if around}
    for name, contents in {**found, **{f"{package}.{key}": value for key, value in around.items()}}.items():
        vars(sys.modules.setdefault(name, types.ModuleType(name))).update(contents)
    return __import__(module, fromlist=["_"])


def microseconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call."""
    rounds = []
    for _ in range(5):
        call()
        start = time.perf_counter()
        for _ in range(20):
            call()
        rounds.append((time.perf_counter() - start) / 20 * 1e6)
    return statistics.median(rounds)


def cameras(kind: Any) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """Two cameras of 128x128 as bytes; returns `add`, `sample` and the bytes of the rows."""
    buffer = kind(200, "cpu", use_drq=False)
    images = torch.randint(0, 256, (201, 1, 3, 128, 128), dtype=torch.uint8)
    states = [
        {"observation.images.a": x, "observation.images.b": x, "observation.state": torch.ones(1, 8)} for x in images
    ]
    action = torch.zeros(1, 4)

    def add(step: int = 0) -> None:
        buffer.add(states[step], action, 0.0, states[step + 1], done=False, truncated=False)

    for step in range(200):
        add(step)
    rows = getattr(buffer, "_rows", None)
    stored = rows.storage.nbytes if rows is not None else _bytes(buffer.states) + _bytes(buffer.next_states)
    return add, lambda: buffer.sample(64), stored


def sequences(kind: Any) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """A memory of 64 environments and 1,000 steps."""
    memory = kind(memory_size=1000, num_envs=64, device="cpu")
    sizes = {"observations": 17, "next_observations": 17, "actions": 6, "rewards": 1}
    for name, size in sizes.items():
        memory.create_tensor(name=name, size=size, dtype=torch.float32)
    flags = ("terminated", "truncated")
    for name in flags:
        memory.create_tensor(name=name, size=1, dtype=torch.bool)
    row = {name: torch.randn(64, size) for name, size in sizes.items()}
    row |= {name: torch.zeros(64, 1, dtype=torch.bool) for name in flags}
    for _ in range(1100):
        memory.add_samples(**row)
    sample = lambda: memory.sample([*sizes], batch_size=64, sequence_length=16)  # noqa: E731
    sample()  # type: ignore[no-untyped-call]  # from now on rows have the number of their episode
    return (
        lambda: memory.add_samples(**row),
        sample,
        _bytes(memory.tensors) + (64_000 * 8 if kind is skrl.RandomMemory else 0),
    )


def returns(kind: Any) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """A ring of 64 environments and 1,000 steps, with observations of 48 numbers for actor and critic."""
    from tensordict import TensorDict

    buffer = kind(64, 1000, 48, 12, 48, n_steps=3, device="cpu")
    flags = torch.zeros(64, dtype=torch.long)
    obs = torch.randn(1101, 64, 48)

    def row(step: int) -> Any:
        now, after = ({"observations": obs[i], "critic_observations": obs[i]} for i in (step, step + 1))
        ends = {"rewards": torch.ones(64), "dones": flags, "truncations": flags}
        return TensorDict({**now, "actions": torch.zeros(64, 12), "next": {**after, **ends}}, batch_size=[64])

    for step in range(1100):
        buffer.extend(row(step))
    one, rows = row(0), getattr(buffer, "_rows", None)
    stored = (
        _bytes({k: x for k, x in vars(buffer).items() if isinstance(x, torch.Tensor)})
        if rows is None
        else rows.storage.nbytes
    )
    return lambda: buffer.extend(one), lambda: buffer.sample(8), stored


def pauses(rows: int = 2000) -> None:
    """Print how long `add` and `sample` of 8 take, alone and while another thread saves 200 MB again and again.

    On Linux the time for which the thread waited for a core is left out of the second number: here the two threads of
    a save, the learner and other programs share two cores.
    """
    buffer = lerobot.ReplayBuffer(rows, "cpu", use_drq=False)
    image = torch.randint(0, 256, (1, 3, 128, 128), dtype=torch.uint8)
    state = {f"observation.images.{name}": image for name in "ab"} | {"observation.state": torch.ones(1, 8)}
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: buffer.add(state, torch.zeros(1, 4), 0.0, state, done=False, truncated=False),
        "sample": lambda: buffer.sample(8),
    }
    for _ in range(rows):
        calls["add"]()

    def save(path: str) -> None:
        for _ in range(5):
            buffer.dumps(path)

    queues = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def waited() -> int:
        return int(queues.read_text().split()[1]) if queues.exists() else 0

    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
        for saving in (False, True, False, True):
            thread = threading.Thread(target=save, args=(f"{folder}/rows",))
            if saving:
                thread.start()
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
            while thread.is_alive() or (not saving and len(times["add"]) < 1000):
                for name, call in calls.items():
                    before, start = waited(), time.perf_counter()
                    call()
                    taken = time.perf_counter() - start
                    times[name].append((taken * 1e3, taken * 1e3 - (waited() - before) / 1e6))
            for name, found in times.items():
                median, longest, on_core = sorted(found)[len(found) // 2][0], *map(max, zip(*found, strict=True))
                text = f"median {median:.2f} ms, longest {longest:.2f} ms, {on_core:.2f} ms without waiting for a core"
                print(f"{name:6} {'while saving' if saving else 'alone':12} {text}, {len(found)} calls", flush=True)


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(x.nbytes for x in tensors.values())


def main() -> None:
    """Print one line for each buffer."""
    torch.set_num_threads(1)
    if "--pauses" in sys.argv:
        pauses()
        return
    around: dict[str, dict[str, Any]] = {"datasets": {"LeRobotDataset": object}, "utils.constants": NAMES}
    theirs = original("lerobot.rl.buffer", **around).ReplayBuffer
    fast = original("holosoma.agents.fast_sac.fast_sac_utils", **{"config_types.algo": {"FastSACConfig": object}})
    memory = original("skrl.memories.torch").RandomMemory
    for name, work, kinds in (
        ("LeRobot, 64 rows, two cameras", cameras, (theirs, lerobot.ReplayBuffer)),
        ("skrl, 64 sequences of 16", sequences, (memory, skrl.RandomMemory)),
        ("Holosoma, 3 steps, 64 x 8 rows", returns, (fast.SimpleReplayBuffer, fasttd3.HolosomaReplayBuffer)),
    ):
        for kind in kinds:
            add, sample, stored = work(kind)
            times = f"add {microseconds(add):7.0f} us, sample {microseconds(sample):8.0f} us"
            print(f"{name:30} {kind.__module__:42} {times}, {stored / 2**20:7.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
