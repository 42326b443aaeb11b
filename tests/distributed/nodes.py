"""Ray nodes on this machine, each in a network namespace with an address of its own, and faults of nodes and network.

    with running_nodes(3) as nodes:  # node 0 is the head
        nodes.run(story, path)       # calls story(nodes, path) in a process on node 0, which is connected to Ray

A story is a function of a module. It may cut nodes off, delay and lose packets, and kill and start nodes. Everything
that is made here is removed at the end: processes, namespaces, devices, files.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .switch import DEVICE, Link

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).parents[2]
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
}
"""Ray declares a node dead that does not answer for 10 to 15 s (65 s by default), and a node ends that
does not reach the head for 20 s (60 s by default)."""
STORE_BYTES = 80_000_000
_START_S = 120.0


def unavailable() -> str | None:
    """Return why nodes with addresses of their own cannot be made here; None if they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if shutil.which("ip") is None or not Path(DEVICE).exists():
        return f"network namespaces need the command ip (iproute2) and {DEVICE}"
    name = f"ostinato-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


class Nodes(NamedTuple):
    """Nodes of one cluster. The number of a node is its place in `names`; node 0 is the head."""

    names: list[str]
    """Of namespaces, and of the devices in them."""
    directory: Path
    """Temporary directory, which all nodes and stories see."""
    control: int
    """File descriptor for orders to the switch."""

    def address(self, node: int) -> str:
        """Return the address of a node."""
        return f"10.77.0.{node + 1}"

    # -- the life of nodes --------------------------------------------------------------------------------------------

    def start(self, node: int, settings: dict[str, str] | None = None, slots: int = 1) -> None:
        """Start Ray on a node.

        Args:
            node: Its number.
            settings: Environment variables for Ray.
            slots: Amount of the resource "slot", of which each shard needs 1; the head has none.
        """
        resources = {} if node == 0 else {"slot": slots}
        role = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self.directory}"]
        command = [
            *("ip", "netns", "exec", self.names[node], sys.executable, "-m", "ray.scripts.scripts", "start"),
            *(role if node == 0 else [f"--address={self.address(0)}:6379"]),
            *(f"--node-ip-address={self.address(node)}", "--num-cpus=2", f"--object-store-memory={STORE_BYTES}"),
            *(f"--resources={json.dumps(resources)}", "--disable-usage-stats", "--log-color=false"),
        ]
        log = self.directory / f"start-{node}.log"
        with log.open("w") as out:  # a file: the daemons keep it open
            done = subprocess.run(
                command,
                env=_environment(settings),
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                timeout=_START_S,
                check=False,
            )
        if done.returncode:
            msg = f"node {node} could not be started:\n{log.read_text()[-3000:]}"
            raise RuntimeError(msg)

    def kill(self, node: int) -> None:
        """Kill all processes of a node with SIGKILL, except this one."""
        end = time.monotonic() + 20
        while (found := self.pids(node)) and time.monotonic() < end:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def pids(self, node: int) -> list[int]:
        """Return the processes of a node, without this one."""
        found = _ip("netns", "pids", self.names[node]).split()
        return [pid for pid in map(int, found) if pid != os.getpid()]

    # -- the network --------------------------------------------------------------------------------------------------

    def link(self, node: int, *, loss: float = 0.0, delay_s: float = 0.0) -> None:
        """Lose and delay packets from and to one node; all other links are good."""
        links = [Link() for _ in self.names]
        links[node] = Link(loss, delay_s)
        self._set(links)

    def cut(self, node: int) -> None:
        """Lose all packets from and to a node."""
        self.link(node, loss=1.0)

    def link_all(self, *, loss: float = 0.0, delay_s: float = 0.0) -> None:
        """Lose and delay packets of all nodes."""
        self._set([Link(loss, delay_s) for _ in self.names])

    def heal(self) -> None:
        """Make all links good."""
        self._set([Link() for _ in self.names])

    def _set(self, links: list[Link]) -> None:
        with socket.socket(fileno=os.dup(self.control)) as control:
            control.send(json.dumps(links).encode())
            control.recv(16)

    # -- stories ------------------------------------------------------------------------------------------------------

    def run(self, story: Callable[..., None], *args: Any, limit_s: float = 240.0) -> None:
        """Call `story(self, *args)` in a process on node 0 that is connected to Ray; see `run_story`."""
        inside = ("ip", "netns", "exec", self.names[0])
        run_story(_connected, self, story, *args, limit_s=limit_s, inside=inside, descriptors=(self.control,))


def _connected(nodes: Nodes, story: Callable[..., None], *args: Any) -> None:
    import ray

    ray.init(address=f"{nodes.address(0)}:6379", log_to_driver=False, logging_level=40)
    story(nodes, *args)


def run_story(
    story: Callable[..., None],
    *args: Any,
    limit_s: float = 240.0,
    inside: Sequence[str] = (),
    descriptors: Sequence[int] = (),
) -> None:
    """Call `story(*args)`, a function of a module, in a process of its own.

    Args:
        story: The function.
        *args: Its arguments.
        limit_s: Longest time.
        inside: A command that runs the command that follows it.
        descriptors: File descriptors that the process inherits.

    Raises:
        AssertionError: The story raised, or took longer than `limit_s`; the message holds its output.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.NamedTemporaryFile() as given:
        given.write(pickle.dumps((story, args)))
        given.flush()
        command = [*inside, sys.executable, "-m", __name__, given.name]
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=out, stderr=out, pass_fds=list(descriptors)
        )
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # `faulthandler` prints where it waits
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            code = f"none after {limit_s:g} s"
        out.seek(0)
        text = out.read()
    if code != 0:
        msg = f"the story ended with status {code}:\n{text[-8000:]}"
        raise AssertionError(msg)


@contextlib.contextmanager
def running_nodes(count: int, slots: int = 1) -> Iterator[Nodes]:
    """Make a cluster of `count` nodes, each with `slots` for shards except for the head, and remove it at the end."""
    names = [f"oz{os.getpid()}n{i}" for i in range(count)]
    directory = Path(tempfile.mkdtemp(prefix="oz"))  # short: it holds sockets, whose names have at most 107 bytes
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nodes = Nodes(names, directory, ours.fileno())
    given = json.dumps([names, [nodes.address(i) for i in range(count)]])
    command = [sys.executable, str(Path(__file__).with_name("switch.py")), str(theirs.fileno()), given]
    switch = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        ours.recv(16)
        for node in range(count):
            _make_namespace(nodes, node)
        for node in range(count):
            nodes.start(node, slots=slots)
        yield nodes
    finally:
        for node in range(count):
            with contextlib.suppress(RuntimeError):  # it was not made
                nodes.kill(node)
                _ip("netns", "del", names[node])
        ours.close()
        switch.wait(20)
        shutil.rmtree(directory, ignore_errors=True)


def _make_namespace(nodes: Nodes, node: int) -> None:
    name = nodes.names[node]
    _ip("netns", "add", name)
    _ip("link", "set", name, "netns", name)
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "link", "set", name, "mtu", "9000", "up")
    _ip("-n", name, "addr", "add", f"{nodes.address(node)}/24", "dev", name)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        msg = f"ip {' '.join(arguments)}: {done.stderr.strip()}"
        raise RuntimeError(msg)
    return done.stdout


def _environment(settings: dict[str, str] | None = None) -> dict[str, str]:
    # A cluster in namespaces is reached by no other process: it needs no token.
    return {**os.environ, **HEALTH, "RAY_AUTH_MODE": "disabled", "PYTHONFAULTHANDLER": "1", **(settings or {})}


if __name__ == "__main__":
    function, arguments = pickle.loads(Path(sys.argv[1]).read_bytes())
    function(*arguments)
