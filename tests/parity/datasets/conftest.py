"""The `official` fixture: LeRobot in an environment of its own, for its pins are not ours."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[3]
_ORACLE = Path(__file__).with_name("_oracle.py")


def lerobot_python() -> Path | None:
    """The interpreter with lerobot: OSTINATO_LEROBOT_PYTHON, or that of `make build/lerobot/.installed`."""
    given = os.environ.get("OSTINATO_LEROBOT_PYTHON")
    found = Path(given) if given else ROOT / "build/lerobot/bin/python"
    return found if found.exists() else None


@dataclasses.dataclass
class Official:
    """LeRobot's writer, reader and converter, in another process.

    Attributes:
        process: The process, which answers orders in turn.
        folder: Where arrays go from one process to the other.
    """

    process: subprocess.Popen[str]
    folder: Path

    def ask(self, **order: Any) -> dict[str, Any]:
        """Send an order and return its answer.

        Raises:
            RuntimeError: LeRobot raised, or its process ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order, default=str) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process of LeRobot ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def create(
        self,
        root: Path,
        columns: Mapping[str, np.ndarray[Any, Any]],
        lengths: Sequence[int],
        *,
        fps: int = 10,
        codec: str = "libsvtav1",
        tasks: Sequence[str],
    ) -> None:
        """Write a dataset: columns `[rows, ...]`, those of uint8 `[rows, H, W, 3]` as videos; a task an episode."""
        features = {}
        for name, values in columns.items():
            video = values.dtype == np.uint8
            shape = values.shape[1:] or (1,)
            names = ["height", "width", "channels"] if video else None
            features[name] = {"dtype": "video" if video else str(values.dtype), "shape": shape, "names": names}
        arrays = self.folder / "written.npz"
        written: dict[str, Any] = {name: np.atleast_2d(values.T).T for name, values in columns.items()}
        np.savez(arrays, **written)
        self.ask(
            op="create", root=root, arrays=arrays, features=features, fps=fps, codec=codec, lengths=lengths, tasks=tasks
        )

    def read(
        self,
        root: Path,
        *,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        indices: Sequence[int] | None = None,
        episodes: Sequence[int] | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return the items of a dataset, each entry stacked: pictures as float32 between 0 and 1."""
        out = self.folder / "read.npz"
        self.ask(op="read", root=root, out=out, delta_timestamps=delta_timestamps, indices=indices, episodes=episodes)
        with np.load(out) as found:
            return dict(found)

    def convert(self, root: Path, out: Path) -> None:
        """Write the dataset of version 2.1 in `root` as version 3.0 into `out`."""
        self.ask(op="convert", root=root, out=out)


@pytest.fixture(scope="session")
def official(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Official]:
    """LeRobot in a process that lasts as long as the session: its import takes seconds."""
    python = lerobot_python()
    if python is None:
        pytest.skip("no environment with lerobot: run `make build/lerobot/.installed` or set OSTINATO_LEROBOT_PYTHON")
    folder = tmp_path_factory.mktemp("official")
    home = {
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "SVT_LOG": "1",
    }
    process = subprocess.Popen(
        [python, _ORACLE], env=os.environ | home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        lerobot = Official(process, folder)
        try:
            lerobot.ask(op="hello")
        except RuntimeError as error:
            process.kill()
            pytest.skip(f"lerobot does not load in its environment: {error}")
        yield lerobot
        assert process.stdin is not None
        process.stdin.close()
