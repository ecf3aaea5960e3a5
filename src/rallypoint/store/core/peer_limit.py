"""How often trouble with a peer is told: a few times a second, and then how often it was left out. Pure.

A peer that connects and sends garbage causes thousands of errors a second. One line for each of them would
fill the disk, and hide the lines of other peers.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

_MOST_PEERS: Final = 1_000
_PEERS_NAMED: Final = 3
_OTHERS: Final = "other addresses"


def address_of(peer: str) -> str:
    """The address of a peer without its port, which is another one for each of its connections."""
    address, colon, port = peer.rpartition(":")
    return address if colon and port.isdigit() else peer


class PeerLimit:
    """Lets the first few of each kind and peer through in every second, and counts the rest by peer."""

    def __init__(self, most: int = 10, most_of_all_peers: int = 100) -> None:
        self._most = most
        self._most_of_all_peers = most_of_all_peers
        self._began = float("-inf")
        self._admitted: Counter[tuple[str, str]] = Counter()
        self._admitted_of_all = 0
        self._left_out: Counter[str] = Counter()

    def admits(self, kind: str, peer: str, now: float) -> bool:
        """Whether to tell of this one; if not, it is counted."""
        if now - self._began >= 1.0:
            self._began = now
            self._admitted.clear()
            self._admitted_of_all = 0
        address = address_of(peer)
        if self._admitted_of_all < self._most_of_all_peers and self._admitted[kind, address] < self._most:
            self._admitted[kind, address] += 1
            self._admitted_of_all += 1
            return True
        known = address in self._left_out or len(self._left_out) < _MOST_PEERS
        self._left_out[address if known else _OTHERS] += 1
        return False

    @property
    def has_left_out(self) -> bool:
        """Whether something was left out that has not been taken."""
        return bool(self._left_out)

    def take_left_out(self, now: float) -> list[tuple[str, int]]:
        """Addresses and how many of theirs were left out, once the second is over; then they are forgotten.

        Addresses beyond the first few are one entry together.
        """
        if not self._left_out or now - self._began < 1.0:
            return []
        others = self._left_out.pop(_OTHERS, 0)
        most = self._left_out.most_common()
        self._left_out.clear()
        others += sum(count for _, count in most[_PEERS_NAMED:])
        return [*most[:_PEERS_NAMED], *([(_OTHERS, others)] if others else [])]
