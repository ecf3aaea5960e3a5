"""The clients with which a server ends. Pure.

A client becomes an owner by deleting a key that only the process that started the server knows. So a client
that cannot be watched otherwise (torch's, in C++) ties the server to its own life.
"""

from __future__ import annotations

from rallypoint.store.core.outbox import Other, Work


class Owners:
    """The owners of one server, by the numbers of their connections."""

    __slots__ = ("_here", "_others", "is_abandoned", "key")

    def __init__(self, key: bytes | None, others: list[Other]) -> None:
        """`others` is the list of the outbox to which the end of the last owner is reported."""
        self.key = key
        self.is_abandoned = False
        self._here: set[int] = set()
        self._others = others

    def add(self, client: int) -> bool:
        """Make a client an owner; False if the server has been abandoned and is about to end."""
        if self.is_abandoned:
            return False
        self._here.add(client)
        return True

    def remove(self, client: int) -> None:
        if client in self._here:
            self._here.remove(client)
            if not self._here:
                self.is_abandoned = True
                self._others.append(Work.ABANDONED)
