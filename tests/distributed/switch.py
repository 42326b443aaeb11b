"""A network of TUN devices whose packets pass through this process, which delays and drops them.

It does what `tc netem` does, which small virtual machines and containers often lack. Run as a program, with a file
descriptor for orders, and names and addresses of the devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import socket
import struct
import sys
import time
from typing import NamedTuple, final

DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 1, 0x1000
_LARGEST = 1 << 16
_PACKETS_AT_ONCE = 64


class Link(NamedTuple):
    """What happens to the packets from and to a device."""

    loss: float = 0.0
    """Probability that a packet is lost; 1 cuts the device off."""
    delay_s: float = 0.0
    """How long each packet takes."""


def open_device(name: str) -> int:
    """Create a TUN device; it disappears when the file descriptor returned is closed."""
    device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


@final
class Switch:
    """Forwards IPv4 packets between devices.

    Args:
        names: The devices to create.
        addresses: The address behind each.
    """

    def __init__(self, names: list[str], addresses: list[str]) -> None:
        self._devices = [open_device(name) for name in names]
        self._owners = {socket.inet_aton(address): i for i, address in enumerate(addresses)}
        self._links = [Link() for _ in names]
        self._random = random.Random(1)
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()

    def serve(self, control: socket.socket) -> None:
        """Forward packets until the other end of `control` is closed. Each message holds the new links."""
        poller = select.epoll()
        sources = {device: i for i, device in enumerate(self._devices)}
        for descriptor in (*self._devices, control.fileno()):
            poller.register(descriptor, select.EPOLLIN)
        control.send(b"done")
        while True:
            wait_s = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else -1
            for descriptor, _ in poller.poll(wait_s):
                if descriptor in sources:
                    self._receive(sources[descriptor])
                    continue
                message = control.recv(_LARGEST)
                if not message:
                    return
                self._links = [Link(*link) for link in json.loads(message)]
                control.send(b"done")
            self._send()

    def _receive(self, source: int) -> None:
        for _ in range(_PACKETS_AT_ONCE):
            try:
                packet = os.read(self._devices[source], _LARGEST)
            except BlockingIOError:
                return
            target = self._owners.get(packet[16:20])
            if packet[0] >> 4 != 4 or target is None:
                continue
            links = self._links[source], self._links[target]
            if any(self._random.random() < link.loss for link in links):
                continue
            due = time.monotonic() + sum(link.delay_s for link in links)
            heapq.heappush(self._queue, (due, next(self._numbers), target, packet))

    def _send(self) -> None:
        while self._queue and self._queue[0][0] <= time.monotonic():
            *_, target, packet = heapq.heappop(self._queue)
            with contextlib.suppress(OSError):  # the device is down, or its queue full: as in a network
                os.write(self._devices[target], packet)


if __name__ == "__main__":
    Switch(*json.loads(sys.argv[2])).serve(socket.socket(fileno=int(sys.argv[1])))
