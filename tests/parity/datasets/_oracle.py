"""LeRobot in a process of its own: reads orders from stdin, one JSON object a line, and answers on the first stdout.

Runs under the interpreter of `conftest.py`, with numpy, torch and lerobot alone. Orders: `create` (the official
writer), `read` (the official reader, into an .npz file), `convert` (the official converter of version 2.1 to 3.0).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

_KEPT: list[Any] = []
"""Operators of torchvision, defined as long as this process lives."""


def official(name: str = "lerobot.datasets.lerobot_dataset") -> Any:
    """Return a module of lerobot, which imports torchvision: its operators, unused here, need not load."""
    spec = importlib.util.find_spec("torchvision")
    for folder in (spec.submodule_search_locations or []) if spec and not _KEPT else []:
        for compiled in Path(folder).glob("_C*.so"):
            try:
                torch.ops.load_library(compiled)  # type: ignore[no-untyped-call]
                _KEPT.append(compiled)
            except OSError:
                library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
                for operator in ("nms", "qnms"):
                    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                _KEPT.append(library)
    return importlib.import_module(name)


def create(order: dict[str, Any]) -> dict[str, Any]:
    """Write a dataset from the arrays of an .npz file, frames as `[rows, H, W, 3]`."""
    dataset = official().LeRobotDataset.create(
        repo_id="tests/official",
        root=order["root"],
        fps=order["fps"],
        features={name: {**entry, "shape": tuple(entry["shape"])} for name, entry in order["features"].items()},
        use_videos=True,
        vcodec=order["codec"],
    )
    with np.load(order["arrays"]) as arrays:
        columns = dict(arrays)
    row = 0
    for episode, length in enumerate(order["lengths"]):
        for _ in range(length):
            values = {name: column[row] for name, column in columns.items()}
            dataset.add_frame({**values, "task": order["tasks"][episode]})
            row += 1
        dataset.save_episode()
    dataset.finalize()
    return {}


def read(order: dict[str, Any]) -> dict[str, Any]:
    """Write the items of a dataset into an .npz file: every entry stacked along the items, texts as text."""
    dataset = official().LeRobotDataset(
        "tests/official",
        root=order["root"],
        episodes=order.get("episodes"),
        delta_timestamps=order.get("delta_timestamps"),
    )
    items = [dataset[index] for index in order.get("indices") or range(len(dataset))]
    names = list(items[0])
    columns: dict[str, Any] = {}
    for name in names:
        values = [item[name] for item in items]
        columns[name] = np.array(values) if isinstance(values[0], str) else torch.stack(values).numpy()
    np.savez(order["out"], **columns)
    return {"items": len(items)}


def convert(order: dict[str, Any]) -> dict[str, Any]:
    """Write the dataset of version 2.1 in `root` as version 3.0 into `out`."""
    module = official("lerobot.datasets.v30.convert_dataset_v21_to_v30")
    out = Path(order["out"])
    shutil.copytree(order["root"], out)
    module.convert_dataset(out.name, root=out.parent, push_to_hub=False)
    return {}


def hello(_order: dict[str, Any]) -> dict[str, Any]:
    """Import lerobot and its video reader."""
    return {"version": importlib.import_module("lerobot").__version__, "reader": official("torchcodec").__version__}


def main() -> None:
    """Answer orders until the input ends; what goes wrong comes back under `error`."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print stays out of the answers
    verbs = {"hello": hello, "create": create, "read": read, "convert": convert}
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = verbs[order["op"]](order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        pipe.write(json.dumps(answer) + "\n")
        pipe.flush()


if __name__ == "__main__":
    main()
