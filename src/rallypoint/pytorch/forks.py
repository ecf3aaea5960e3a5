"""Processes forked from one that has imported torch: each costs milliseconds, not seconds. Imports no torch.

A fork and its parent speak over a line of their own. A fork stays until its parent ends it, even when its
work is done: so a line that ends before is always a failure. And none outlives its parent, however that
ends: a thread of each waits for the end of a pipe whose other half the parent alone holds.

The parent has to be a single thread: what another one holds locked would stay locked in the fork for ever.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

logger = logging.getLogger("rallypoint.bench")

Message = dict[str, Any]


class ForkError(Exception):
    """A fork has failed, has ended, or says nothing."""


class Line:
    """One end of the connection between a fork and its parent: a line of JSON for each message."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._said = b""

    def fileno(self) -> int:
        return self._end.fileno()

    def say(self, message: Message) -> None:
        """Send a message."""
        self._end.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> Message | None:
        """Await a message; None at the end of the line."""
        while b"\n" not in self._said:
            try:
                piece = self._end.recv(1 << 16)
            except ConnectionResetError:  # the other side has ended, and left something unheard
                return None
            if not piece:
                return None
            self._said += piece
        said, _, self._said = self._said.partition(b"\n")
        message: Message = json.loads(said)
        return message

    def close(self) -> None:
        self._end.close()


class Gate:
    """Where forks wait. One system call opens it for all of them: it closes the pipe that they read."""

    def __init__(self, private: set[int]) -> None:
        self._entrance, self._bolt = os.pipe()
        self._private = private
        private.add(self._bolt)

    def pass_through(self) -> None:
        """In a fork: wait until the gate is open."""
        os.read(self._entrance, 1)

    def open(self) -> None:
        """In the parent; a second call does nothing."""
        if self._bolt in self._private:
            self._private.remove(self._bolt)
            os.close(self._bolt)

    def close(self) -> None:
        """In the parent, when nobody comes any more."""
        self.open()
        os.close(self._entrance)


class Fork:
    """A forked process, seen from its parent."""

    def __init__(self, name: str, pid: int, line: Line) -> None:
        self.name = name
        self.pid = pid
        self.line = line
        self._code: int | None = None

    def say(self, message: Message) -> None:
        """Send it a message."""
        try:
            self.line.say(message)
        except OSError:
            pass  # it has ended: the answer that is missing tells

    def hear(self) -> Message:
        """Await its next message; ForkError if it has failed or ended."""
        message = self.line.hear()
        if message is None:
            raise ForkError(f"{self.name} has ended, {self._describe_end()}")
        if "error" in message:
            raise ForkError(f"{self.name}: {message['error']}")
        return message

    def raise_failure(self) -> NoReturn:
        """Hear its last words; for a fork whose line has ended."""
        while True:
            self.hear()

    def end(self) -> None:
        """End the process, if that is still to do; nothing is left of it afterwards."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()
        self.line.close()

    def _reap(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def _describe_end(self) -> str:
        code = self._reap()
        return f"with exit code {code}" if code >= 0 else f"by signal {-code}"


class Forks:
    """All forks of this process; they end with it, and with the block that it is used in.

    `orders` is where this process gets its orders, which are none of a fork's business; `private` are other
    descriptors of that sort.
    """

    def __init__(self, orders: int, private: Sequence[int] = ()) -> None:
        self._orders = orders
        self._life, held = os.pipe()
        self._private = {orders, held, *private}
        self._all: list[Fork] = []

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(list(self._all))

    def make_gates(self, count: int) -> list[Gate]:
        """Gates for forks that are made later."""
        return [Gate(self._private) for _ in range(count)]

    def fork(self, name: str, work: Callable[[Line], None]) -> Fork:
        """Let a new process do some work."""
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would write what is still in there
        pid = os.fork()
        if pid == 0:
            self._live(ours, Line(theirs), work)
        theirs.close()
        fork = Fork(name, pid, Line(ours))
        self._all.append(fork)
        return fork

    def hear_all(self, forks: Sequence[Fork], deadline: float) -> list[Message]:
        """The next message of each; ForkError if one of them fails, or says nothing in time.

        They are heard in turn. Until the first one speaks, the words of the others wake nobody: it may be
        measuring. But the end of any of them is noticed at once.
        """
        return [self._hear(fork, forks, deadline) for fork in forks]

    def end(self, forks: Sequence[Fork]) -> None:
        """End these processes."""
        for fork in forks:
            fork.end()
            self._all.remove(fork)

    def _hear(self, fork: Fork, forks: Sequence[Fork], deadline: float) -> Message:
        by_line = {each.line.fileno(): each for each in forks}
        heard = self._poll({line: each is fork for line, each in by_line.items()}, deadline)
        if not heard:
            spoke = self._poll(dict.fromkeys(by_line, True), 0.0)
            late = [each.name for line, each in by_line.items() if line not in spoke]
            raise ForkError(f"the time is up, and nothing was heard of {_list(late or [fork.name])}")
        for line in heard:
            if by_line[line] is not fork:
                by_line[line].raise_failure()
        return fork.hear()

    def _poll(self, wanted: dict[int, bool], deadline: float) -> list[int]:
        """The lines that have ended, or have something to be heard that is wanted."""
        poll = select.poll()
        poll.register(self._orders, 0)  # it tells nothing but the end
        for descriptor, is_wanted in wanted.items():
            poll.register(descriptor, select.POLLIN if is_wanted else 0)
        ready = [descriptor for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)]
        if self._orders in ready:
            sys.exit()  # nobody is there to hear the answer
        return ready

    def _live(self, ours: socket.socket, line: Line, work: Callable[[Line], None]) -> NoReturn:
        """What a fork does, from beginning to end."""
        try:
            ours.close()
            for descriptor in self._private:
                os.close(descriptor)
            threading.Thread(target=self._end_with_parent, daemon=True).start()
            work(line)
            line.hear()
        except BaseException as error:
            line.say({"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(1)  # nothing of the parent's is to be cleaned up here

    def _end_with_parent(self) -> None:
        os.read(self._life, 1)
        os._exit(1)


def ask_no_name_server() -> None:
    """In a fork: let the hosts file alone answer all look-ups of this process.

    torch's server looks up the name of every client that it accepts, and torch's client that of the server
    before it connects: of ::ffff:127.0.0.1, since its socket is an IPv6 one, and no hosts file has that.
    When 64 clients ask a name server at once, it may drop a few questions, which are asked again after five
    seconds. That would be all that is measured then, of any server.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # glibc's, and nobody else's
    if configure is None or configure(b"hosts", b"files") != 0:
        logger.warning(
            "torch's look-ups of names go to a name server here, and their time is measured as well"
        )


def _list(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
