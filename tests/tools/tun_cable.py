"""A cable between two network namespaces that can be bad: it delays, loses or swallows packets.

The kernel can do so itself (`tc qdisc add ... netem`), but many kernels are built without netem. Two TUN
devices and a process between them work wherever there is /dev/net/tun. It is controlled by lines of JSON on
standard input, and ends with it; its devices end with it, too.

    python tests/tools/tun_cable.py NAMESPACE ADDRESS NAMESPACE ADDRESS
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_WITHOUT_HEADER = 0x0001 | 0x1000  # IFF_TUN and IFF_NO_PI
_LARGEST_PACKET = 9000


@dataclass(frozen=True)
class Quality:
    """How a cable is at the moment; by default, good."""

    delay: float = 0.0
    """Seconds that each packet takes in each direction."""
    jitter: float = 0.0
    """Up to that many seconds more, so that packets overtake each other."""
    loss: float = 0.0
    """The part of all packets that is lost; 1: nothing comes through, and nobody is told."""


GOOD = Quality()


class TunCable:
    """The process of a cable, as the test program sees it."""

    def __init__(self, ends: Sequence[tuple[str, str]]) -> None:
        """Lay it between two namespaces, each with the address of its end. OSError if that cannot be done."""
        words = [word for end in ends for word in end]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the program that has laid it
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "up\n":
            self.close()
            raise OSError("no cable can be laid between two network namespaces here")

    def become(self, quality: Quality) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(quality)) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _open_end(name: str, namespace: str, address: str) -> int:
    """A TUN device, in its namespace; what is sent there can be read here."""
    descriptor = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _WITHOUT_HEADER))
    _ip("link", "set", name, "netns", namespace)
    _ip("-n", namespace, "link", "set", "lo", "up")
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", name)
    _ip("-n", namespace, "link", "set", name, "mtu", str(_LARGEST_PACKET), "up")
    return descriptor


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class _Carrier:
    """Carries packets from each end to the other one."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._other = {ends[0]: ends[1], ends[1]: ends[0]}
        self._quality = GOOD
        self._rng = random.Random(0)
        self._count = 0
        self._under_way: list[tuple[float, int, int, bytes]] = []

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for end in (*self._other, sys.stdin.fileno()):
                selector.register(end, selectors.EVENT_READ)
            while True:
                due = self._under_way[0][0] - time.monotonic() if self._under_way else None
                for key, _ in selector.select(due if due is None else max(due, 0.0)):
                    if key.fd not in self._other:
                        line = sys.stdin.readline()
                        if not line:
                            return
                        self._quality = Quality(**json.loads(line))
                    else:
                        self._take(key.fd)
                self._deliver()

    def _take(self, end: int) -> None:
        try:
            packet = os.read(end, _LARGEST_PACKET)
        except OSError:  # its interface is down
            return
        quality = self._quality
        if self._rng.random() < quality.loss:
            return
        due = time.monotonic() + quality.delay + quality.jitter * self._rng.random()
        self._count += 1
        heapq.heappush(self._under_way, (due, self._count, self._other[end], packet))

    def _deliver(self) -> None:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(self._under_way)
            try:
                os.write(end, packet)
            except OSError:  # its interface is down, or its queue is full: a packet is lost
                pass


def main() -> None:
    first, first_address, second, second_address = sys.argv[1:]
    ends = [_open_end(first, first, first_address), _open_end(second, second, second_address)]
    print("up", flush=True)
    _Carrier(ends).run()


if __name__ == "__main__":
    main()
