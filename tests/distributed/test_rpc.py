"""The buffer behind `torch.distributed.rpc`, with two real processes: rows, batches and errors are sent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch.distributed import rpc

from ostinato import LazyTensorStorage, RemoteTensorDictReplayBuffer
from ostinato.errors import OptionError

SCRIPT = Path(__file__).with_name("rpc_worker.py")

pytestmark = pytest.mark.skipif(not rpc.is_available(), reason="torch was built without RPC")


def test_two_processes_share_one_buffer(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RENDEZVOUS": f"file://{tmp_path / 'meet'}"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = workers[1].communicate(timeout=120)[0]
        assert workers[1].returncode == 0, said
        assert "driver is content" in said
        said = workers[0].communicate(timeout=60)[0]
        assert workers[0].returncode == 0, said
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_in_one_process_it_is_an_ordinary_buffer():
    rb = RemoteTensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=3)
    rb.extend(TensorDict({"obs": torch.arange(6)}, [6]))
    assert len(rb) == 4
    assert set(rb.sample()["obs"].tolist()) <= {2, 3, 4, 5}
    with pytest.raises(OptionError, match="named arguments alone, got 1 positional"):
        RemoteTensorDictReplayBuffer(LazyTensorStorage(4))
