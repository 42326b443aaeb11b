"""Progress: what functions are told, and what their exceptions leave; the bar on a terminal."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import ostinato
from ostinato import (
    GroupBuffer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    StorageEnsemble,
    StorageEnsembleCheckpointer,
    TensorStorageCheckpointer,
    TrajectoryReplayBuffer,
    export,
    open_dataset,
    tools,
)
from ostinato.compat import objectrl, torchrl
from ostinato.durable import progress as module
from ostinato.durable.files import LOCK_NAME
from ostinato.durable.progress import BYTES, Progress, begin
from ostinato.errors import OptionError
from ostinato.storages.checkpoint import readable
from ostinato.tools.datasets import inspect_dataset
from ostinato.viz.datasets import DatasetSource
from ostinato.viz.report import report
from tests.unit.trajectories.rollouts import rollout

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 50


class StopError(ValueError):
    """Raised by a function; what reads files could take a `ValueError` for damage."""


class Told:
    """A function that records its calls, and raises at one of them."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[tuple[int, int]] = []
        self.fails_at = fails_at

    def __call__(self, done: int, total: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.calls.append((done, total))
        if len(self.calls) - 1 == self.fails_at:
            raise StopError

    def check(self) -> None:
        """Check the promises of `ProgressOption`."""
        done, totals = [now for now, _ in self.calls], [total for _, total in self.calls]
        assert done[0] == 0
        assert done == sorted(done)
        assert totals == sorted(totals)
        assert done[-1] == totals[-1]
        assert all(now <= total for now, total in self.calls if total)
        assert len(self.calls) == len(set(self.calls))


# -- every public call -------------------------------------------------------------------------------------------------


def files(_: Any, path: Path) -> Any:
    """Bytes of all files."""
    found = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != LOCK_NAME]
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


class Case(NamedTuple):
    """A public call with `progress=`."""

    name: str
    begin: Callable[[Path], Any]
    """Makes what the call works on."""
    call: Callable[[Any, Path, Any], Any]
    """Calls it with what was made, a folder and the option."""
    state: Callable[[Any, Path], Any] = files
    """What an exception must leave."""


def rows(count: int = ROWS, first: int = 0) -> TensorDict:
    """Rows of episodes of five steps."""
    values = torch.arange(first, first + count, dtype=torch.float32)
    done = values[:, None] % 5 == 4
    after = {"obs": values[:, None] + 1, "done": done, "terminated": done, "reward": values[:, None]}
    return TensorDict({"obs": values[:, None], "next": TensorDict(after, [count])}, [count])


def filled(first: int = 0, kind: Callable[[], Any] = lambda: LazyTensorStorage(100)) -> ReplayBuffer:
    rb = ReplayBuffer(storage=kind(), batch_size=4)
    rb.extend(rows(first=first))
    return rb


def ensemble() -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(filled(), filled(first=500), batch_size=4)


def storage_of(kind: Callable[[], Any] = lambda: LazyTensorStorage(100)) -> Any:
    return filled(kind=kind).storage


def storages() -> StorageEnsemble:
    return StorageEnsemble(storage_of(), storage_of())


def trajectories(_: Path) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(cache_size=10)
    buffer.add_trajectories([rollout(n, 2) for n in range(6)])
    return buffer


def groups(path: Path) -> Path:
    with GroupBuffer(path / "groups", size=1) as made:
        for name in made.admit(range(5)):
            made.append(name, {"tokens": [1, 2]}, id="0")
    return path / "groups"


def trajectory_folder(path: Path) -> Path:
    with trajectories(path) as buffer:
        buffer.save_checkpoint(path / "trajectories")
    return path / "trajectories"


def trajectories_and_folder(path: Path) -> TrajectoryReplayBuffer:
    trajectory_folder(path)
    return trajectories(path)


def saving_to(path: Path, told: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, progress=told)


def ranks(path: Path) -> Path:
    for rank in (0, 1):
        with saving_to(path / "ranks" / f"rank_{rank}", False) as buffer:
            buffer.add_trajectories([rollout(n, 2) for n in range(3)])
    return path / "ranks"


def patched(path: Path) -> Path:
    rb = filled()
    for _ in range(2):
        rb.dumps(path / "saved", incremental=True)
        rb.extend(rows(3))
    return path / "saved"


def dataset(_: Path) -> Any:
    values = {"observation": np.zeros((60, 3), np.float32), "action": np.ones((60, 2), np.float32)}
    return open_dataset(values, episode_ends=[20, 40, 60])


def lerobot(path: Path) -> Path:
    export(dataset(path), path / "data", fps=10, task="t", progress=False)
    return path / "data"


def robot(_: Path) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    rb.load_dataset(dataset(Path()), progress=False)
    return rb


def object_buffer() -> objectrl.ReplayBuffer:
    rb = objectrl.ReplayBuffer("cpu", "cpu", 100)
    rb.add_batch(TensorDict({"state": torch.rand(20, 3)}, [20]))
    return rb


def content(held: Any, path: Path) -> Any:
    """Rows and counts of a buffer or a storage, or of the members of an ensemble."""
    if hasattr(held, "members"):
        return [content(member, path) for member in held.members]
    if isinstance(held, TrajectoryReplayBuffer):
        return [held.trajectory_ids, held.get_stats()["trajectory_counter"], held.seed]
    if isinstance(held, objectrl.ReplayBuffer):
        return len(held)
    return [getattr(held, "write_count", 0), held[:]["obs"].tolist()]


def saved_by(make: Callable[[], Any], kind: Any = None) -> Callable[[Path], Any]:
    """Save what is made in `path / "saved"`, and write to it afterwards if it is a buffer."""

    def begin(path: Path) -> Any:
        made = make()
        save = made.dumps if hasattr(made, "dumps") else made.save
        save(path / "saved", progress=False) if kind is None else kind().dumps(made, path / "saved", progress=False)
        if isinstance(made, ReplayBuffer) and type(made) is not ReplayBufferEnsemble:
            made.extend(rows(10, first=1000))
        return made

    return begin


def cases(owner: str, make: Callable[[], Any], verbs: str, kind: Any = None) -> list[Case]:
    """Methods that take a path; with `kind` those of a checkpointer, which take a storage before it."""

    def case(verb: str) -> Case:
        def call(it: Any, path: Path, told: Any) -> None:
            if kind is None:
                getattr(it, verb)(path / "saved", progress=told)
            else:
                getattr(kind(), verb)(it, path / "saved", progress=told)

        return Case(f"{owner}.{verb}", saved_by(make, kind), call, content if "load" in verb else files)

    return [case(verb) for verb in verbs.split()]


ALL = "dumps dump save loads load"
THEIRS = Path(__file__).parents[1] / "data" / "torchrl_0_14" / "ring"

CASES = [
    *cases("ReplayBuffer", filled, ALL),
    *cases("ReplayBufferEnsemble", ensemble, ALL),
    *cases("Storage", storage_of, ALL),
    *cases("LazyMemmapStorage", lambda: storage_of(lambda: LazyMemmapStorage(100)), "dumps loads"),
    *cases("StorageEnsemble", storages, "dumps loads"),
    *cases("StorageCheckpointerBase", storage_of, "dumps loads", TensorStorageCheckpointer),
    *cases("H5StorageCheckpointer", storage_of, "dumps loads", H5StorageCheckpointer),
    *cases("StorageEnsembleCheckpointer", storages, "dumps loads", StorageEnsembleCheckpointer),
    *cases("objectrl.ReplayBuffer", object_buffer, "save load"),
    Case("TrajectoryReplayBuffer.__init__", trajectory_folder, lambda source, _, f: saving_to(source, f)),
    Case(
        "TrajectoryReplayBuffer.save_checkpoint", trajectories, lambda it, p, f: it.save_checkpoint(p / "t", progress=f)
    ),
    Case(
        "TrajectoryReplayBuffer.load_checkpoint",
        trajectories_and_folder,
        lambda it, p, f: it.load_checkpoint(p / "trajectories", progress=f),
        content,
    ),
    Case(
        "ReplayBuffer.load_dataset",
        robot,
        lambda it, p, f: it.load_dataset(dataset(p), batch_rows=7, overwrite=True, progress=f),
    ),
    Case("ReplayBuffer.export", robot, lambda rb, p, f: rb.export(p / "out", "hdf5", progress=f)),
    Case("export", dataset, lambda data, p, f: export(data, p / "out", fps=10, task="t", progress=f)),
    Case("open_dataset", lerobot, lambda source, _, f: open_dataset(source, progress=f)),
    Case("inspect_dataset", lerobot, lambda source, _, f: inspect_dataset(source, progress=f)),
    Case("examine", lerobot, lambda source, _, f: tools.examine(source, progress=f)),
    Case(
        "report",
        lerobot,
        lambda source, _, f: report(DatasetSource(open_dataset(source), source), 0, progress=f),
    ),
    Case("compact", patched, lambda source, _, f: tools.compact(source, progress=f)),
    Case("inspect_checkpoint", patched, lambda source, _, f: tools.inspect_checkpoint(source, progress=f)),
    Case("verify", patched, lambda source, _, f: tools.verify(source, progress=f)),
    Case("verify", trajectory_folder, lambda source, _, f: tools.verify(source, progress=f)),
    Case("inspect_groups", groups, lambda source, _, f: tools.inspect_groups(source, progress=f)),
    Case("inspect_store", trajectory_folder, lambda source, _, f: tools.inspect_store(source, progress=f)),
    Case("convert", trajectory_folder, lambda source, p, f: tools.convert(source, p / "t", "safetensors", progress=f)),
    Case("split", trajectory_folder, lambda source, p, f: tools.split(source, p / "t", 3, progress=f)),
    Case("merge", ranks, lambda source, p, f: tools.merge(source, p / "t", progress=f)),
    Case("load_checkpoint", lambda _: THEIRS, lambda s, _, f: torchrl.load_checkpoint(s, progress=f)),
    Case(
        "convert_checkpoint",
        lambda _: THEIRS,
        lambda s, p, f: torchrl.convert_checkpoint(s, p / "t", progress=f),
    ),
]

ELSEWHERE = {
    "write_dataset": "what `export` calls",
    "RayReplayBuffer": "tests/distributed/test_ray_buffer.py",
    "ShardedReplayBuffer": "tests/distributed/test_sharded.py",
    "SimpleReplayBuffer": "dumps and loads of the ReplayBuffer that it has",
    "RemoteTensorDictReplayBuffer": "the methods of TensorDictReplayBuffer, called on the owner",
}


IMPORT_MORE = {"ostinato.__main__", "ostinato.compat.transferqueue"}
"""Modules that do something when they are imported, or need a package that is not installed here."""


def public_calls() -> set[str]:
    """Names of all functions and methods with a keyword `progress` that modules export."""
    found = set()
    names = {info.name for info in pkgutil.walk_packages(ostinato.__path__, "ostinato.")} - IMPORT_MORE
    for exports in [ostinato, *map(importlib.import_module, names)]:
        for thing in (getattr(exports, name) for name in getattr(exports, "__all__", ())):
            members = vars(thing).values() if inspect.isclass(thing) else [thing]
            for member in (getattr(one, "__func__", one) for one in members):
                option = inspect.signature(member).parameters.get("progress") if inspect.isfunction(member) else None
                if option is not None and option.kind is option.KEYWORD_ONLY:
                    prefix = "objectrl." if member.__module__.startswith("ostinato.compat.objectrl") else ""
                    found.add(f"{prefix}{member.__qualname__}")
    return found


def test_each_public_call_with_progress_is_tested():
    found = {name for name in public_calls() if name.partition(".")[0] not in ELSEWHERE}
    assert found <= {case.name for case in CASES}


@pytest.mark.usefixtures("every_step")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_calls(case, tmp_path):
    told = Told()
    case.call(case.begin(tmp_path / "0"), tmp_path / "0", told)
    told.check()
    assert len(told.calls) > 1
    for at in sorted({0, 1, len(told.calls) // 2, len(told.calls) - 1}):
        path = tmp_path / str(at + 1)
        made = case.begin(path)
        before = case.state(made, path)
        with pytest.raises(StopError):
            case.call(made, path, Told(at))
        assert case.state(made, path) == before


# -- the class ---------------------------------------------------------------------------------------------------------


def test_the_rate_is_limited():
    told = Told()
    with Progress(told, "count", 10**5) as bar:
        for _ in range(10**5):
            bar.advance()
    told.check()
    assert len(told.calls) < 60  # a second would have 20


@pytest.mark.parametrize("taken", [contextlib.suppress(ValueError), readable("a buffer")])
def test_the_exception_is_raised_even_where_it_was_taken_for_another(taken):
    told = Told(0)
    with pytest.raises(StopError), Progress(told, "load", unit=BYTES), taken:
        begin(10)
    assert len(told.calls) == 1


def test_wrong_options(tmp_path):
    for option in ("bar", 3, (1, 2)):
        with pytest.raises(OptionError):
            filled().dumps(tmp_path / "a", progress=option)  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()


# -- the bar -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time
from ostinato.durable import progress

def run(wait, option, seconds, total):
    progress._WAIT_S = wait
    end = time.monotonic() + seconds
    with progress.Progress(option, "export", total, unit="rows") as bar:
        while time.monotonic() < end:
            time.sleep(0.05)
            bar.advance()
    sys.stderr.write("|")

run(60.0, None, 0.3, 100)
run(0.0, None, 0.3, 100)
run(0.0, None, 0.3, 0)
run(0.0, False, 0.3, 100)
run(0.0, lambda done, total: None, 0.3, 100)
sys.modules["rich"] = sys.modules["rich.progress"] = sys.modules["rich.console"] = None
run(0.0, True, 0.3, 100)
print("result")
"""


def test_a_terminal():
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=slave, env=environment
    ) as process:
        os.close(slave)
        printed = b""
        with contextlib.suppress(OSError):  # the other end is closed at last
            while part := os.read(master, 4096):
                printed += part
        assert process.stdout is not None
        assert process.stdout.read() == b"result\n"
    os.close(master)
    assert process.returncode == 0
    short, bar, unknown, false, function, line, _ = printed.decode().split("|")
    assert (short, false, function) == ("", "", "")
    assert "export" in bar
    assert "/100" in bar
    assert bar.endswith("\x1b[2K")  # the line is erased
    assert "/?" in unknown
    assert "\rexport: 1 of 100 rows" in line
    assert line.endswith("\r\x1b[K")


def test_nothing_in_a_pipe(monkeypatch, capfd):
    monkeypatch.setattr(module, "_WAIT_S", 0.0)
    with Progress(True, "export", 2, unit="rows") as bar:
        bar.advance()
    assert capfd.readouterr() == ("", "")
