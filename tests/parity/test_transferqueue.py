"""The storage backend for TransferQueue 0.1.11: its values, its own end-to-end tests, and kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.errors import CheckpointError, DamagedFileError, KeyMissingError, OptionError

from .originals import FOLDER, original

original("transfer_queue")
from ostinato.compat.transferqueue import StorageClient  # noqa: E402  (with TransferQueue only)

ENVIRONMENT = {"PYTHONPATH": f"{Path(__file__).parents[2] / 'src'}{os.pathsep}{FOLDER}", "OMP_NUM_THREADS": "1"}
PLUGIN = """
import functools, os
import ray
from ostinato.compat import transferqueue
BACKEND = {"storage_backend": "Ostinato", "Ostinato": {"path": os.environ["VALUES"]}}
CONFIG = {"controller": {"polling_mode": True}, "backend": BACKEND}
def pytest_configure():
    hook = {"worker_process_setup_hook": "ostinato.compat.transferqueue.register"}
    ray.init = functools.partial(ray.init, num_cpus=4, runtime_env=hook)
def pytest_collection_modifyitems(items):
    for module in {item.module for item in items}:
        vars(module).setdefault("BACKEND_CONFIGS", {})["Ostinato"] = CONFIG
        if hasattr(module, "_TQ_CONFIG"):
            module._TQ_CONFIG = module.OmegaConf.create(CONFIG)
"""
OF_SIMPLE_STORAGE = "not (unit_count_mismatch or storage_saved_is_true or test_tensor_fields)"
"""Leaves out three tests of what its own backend writes: its units, the names of its files, and `include_storage`."""


def run(program: str, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], env=os.environ | ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, start_new_session=True, **options,
    )  # fmt: skip


def test_values_come_back_as_they_were(tmp_path):
    values: list[Any] = [
        torch.arange(5),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor(3.0),
        {"a": [1, "x"]},
        b"b",
        "t",
        7,
    ]
    keys = [f"{i}@f" for i in range(len(values))]
    client, other = (StorageClient({"path": tmp_path}) for _ in range(2))
    client.put(keys, values)
    for before, after in zip(values, other.get(keys), strict=True):
        assert type(before) is type(after)
        assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
    other.put(keys[:1], [torch.zeros(2)])
    other.clear([*keys[1:3], "nothing"])
    assert client.get(keys[:1])[0].tolist() == [0, 0]
    with pytest.raises(KeyMissingError, match="2 of 7"):
        client.get(keys)


def test_what_cannot_be_stored_or_read_raises(tmp_path):
    client = StorageClient({"path": tmp_path})
    with pytest.raises(CheckpointError):
        client.put(["a", "b"], [1, object()])
    with pytest.raises(KeyMissingError):
        client.get(["a"])
    client.put(["a"], [torch.arange(9)])
    data = bytearray(client._database.execute("SELECT value FROM data").fetchone()[0])
    data[-8] ^= 1
    client._write("UPDATE data SET value = ? WHERE key = ?", [(data, "a")])
    with pytest.raises(DamagedFileError, match="checksum"):
        client.get(["a"])
    with pytest.raises(OptionError, match="path"):
        StorageClient({})


PUTS = """
import sys, torch
from ostinato.compat.transferqueue import StorageClient
client, start = StorageClient({"path": sys.argv[1]}), int(sys.argv[2])
for number in range(start, start + 10**6):
    client.put([f"{i}@{number}" for i in range(8)], [torch.full((500,), number)] * 8)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_loses_no_put_that_returned_and_leaves_none_in_part(tmp_path):
    rng, client, start = random.Random(0), StorageClient({"path": tmp_path}), 0
    for _ in range(8):
        process = run(PUTS, tmp_path, start)
        assert process.stdout is not None
        last = int(process.stdout.readline())
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        last = max([last, *map(int, process.stdout.read().split())])
        assert process.wait() == -signal.SIGKILL
        for number in range(start, last + 1):
            assert all((value == number).all() for value in client.get([f"{i}@{number}" for i in range(8)]))
        rows = client._database.execute("SELECT count(*) FROM data").fetchone()[0]
        assert rows in {8 * (last + 1), 8 * (last + 2)}, "the put under way is there as a whole or not at all"
        start = last + 1


WORK = """
import sys, ray, torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
import ostinato.compat.transferqueue
folder, resume = sys.argv[1:]
ray.init(num_cpus=2, include_dashboard=False)
tq.init(OmegaConf.create({"controller": {"polling_mode": True},
                          "backend": {"storage_backend": "Ostinato", "Ostinato": {"path": folder + "/values"}}}))
def put(step):
    fields = TensorDict({"ids": torch.arange(step, step + 40).reshape(8, 5)}, batch_size=8)
    tq.kv_batch_put(keys=[f"{step} {i}" for i in range(8)], partition_id="train", fields=fields, tags=[{}] * 8)
if resume == "yes":
    tq.load_checkpoint(folder + "/saved")
    keys = list(tq.kv_list("train")["train"])
    ids = tq.kv_batch_get(keys=keys, partition_id="train")["ids"]
    right = [torch.arange(5) + int(key.split()[0]) + 5 * int(key.split()[1]) for key in keys]
    print(len(keys), all(torch.equal(a, b) for a, b in zip(ids, right)), flush=True)
    put(1000)
    print(len(tq.kv_list("train")["train"]), flush=True)
    tq.close()
else:
    for step in range(10**6):
        put(step)
        if step == 3:
            tq.save_checkpoint(folder + "/saved")
        print(step, flush=True)
"""


@pytest.mark.slow
def test_a_killed_cluster_resumes_from_its_checkpoint(tmp_path):
    """SIGKILL of driver, controller and all of Ray while rows are put; another cluster goes on with the same folder."""
    process = run(WORK, tmp_path, "no")
    assert process.stdout is not None
    assert next(line for line in process.stdout if line == "7\n")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again = run(WORK, tmp_path, "yes")
    out, _ = again.communicate(timeout=120)
    assert out.splitlines()[-2:] == ["32 True", "40"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kv_interface", "e2e_lifecycle_consistency", "checkpoint"])
def test_end_to_end_tests_of_transferqueue(name, tmp_path):
    (tmp_path / "backend_of_ostinato.py").write_text(PLUGIN)
    (file,) = (FOLDER / "tests" / "e2e").glob(f"test_{name}*.py")
    environment = {"TQ_TEST_BACKEND": "Ostinato", "VALUES": str(tmp_path / "values")}
    environment["PYTHONPATH"] = f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{tmp_path}"
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "backend_of_ostinato"]
    done = subprocess.run(
        [*command, "-k", OF_SIMPLE_STORAGE, file],
        env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
