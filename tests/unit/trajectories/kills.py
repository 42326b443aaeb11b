"""Kills a process at its k-th file operation: in the middle of a write, or just before other operations."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

VERBS = ("write", "pwrite", "fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "ftruncate")


def run_and_kill(work: Callable[[Callable[[bytes], None]], None], at: int) -> tuple[bool, bytes]:
    """Run `work(report)` in a fork that kills itself at file operation `at`.

    Returns:
        Whether it was killed, and what it had reported until then.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(work, at, writer)
    os.close(writer)
    said = b""
    while data := os.read(reader, 65536):
        said += data
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True, said
    assert os.WEXITSTATUS(status) == 0, said.decode()
    return False, said


def _child(work: Callable[[Callable[[bytes], None]], None], at: int, pipe: int) -> None:
    write = os.write
    try:
        torch.set_num_threads(1)
        count, lock = iter(range(10**9)), threading.Lock()

        def patched(verb: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                with lock:
                    if next(count) == at:
                        if verb in {"write", "pwrite"}:
                            view = memoryview(arguments[1])
                            original(arguments[0], view[: len(view) // 2], *arguments[2:])
                        os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            return call

        for verb in VERBS:
            setattr(os, verb, patched(verb, getattr(os, verb)))
        work(lambda said: (write(pipe, said), None)[1])
        os._exit(0)
    except BaseException:
        write(pipe, traceback.format_exc().encode())
        os._exit(1)
