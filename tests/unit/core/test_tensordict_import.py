"""The first TensorDicts of a process may come in several threads at once: one imports the package, the others wait."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, threading
import torch
from ostinato.core import kinds

node = kinds.Node("tensordict", ("x",))
assert "tensordict" not in sys.modules
errors, made, go = [], [], threading.Event()

def make():
    go.wait()
    try:
        made.append(kinds.make(node, [torch.zeros(3)], (3,), torch.device("cpu")))
    except BaseException as error:
        errors.append(error)

def ask():
    go.wait()
    try:
        while len(made) + len(errors) < 6:
            assert not kinds.is_tensor_collection({"x": 1})
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=make) for _ in range(6)] + [threading.Thread(target=ask)]
for thread in threads:
    thread.start()
sys.setswitchinterval(1e-4)
go.set()
for thread in threads:
    thread.join()
assert not errors, errors
assert all(type(one).__name__ == "TensorDict" for one in made)
"""


def test_threads_wait_for_each_others_import():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
