"""Random and mutated streams against a live server, beside a client that must not notice.

Stream number n of seed s is always the same bytes in the same pieces. What is asserted:

- the server process lives, and never logs a traceback;
- a well-behaved client, on one connection for the whole run, gets exactly the right answers;
- a valid stream is answered with exactly the bytes that a core in this process answers;
- every stream is over in bounded time: once it ends, the server ends the connection;
- memory stays within GROWTH_MIB of where it began, and no socket is left behind.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random

import psutil

import processes
from ends import serve
from fuzz_requests import KIB, LIMITS, MIB, mutate_bytes, relayed_requests, some_requests
from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.core.store import Core
from rallypoint.store.rollcall.question import Question
from rallypoint.store.wire.encoding import VALIDATE, blob, counted_request, pack_i64, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.sessions import batch, session_request

BACKENDS = ("libuv", "legacy")
TARGETS = (*BACKENDS, "relay")
"""What is fuzzed: a server on each backend, and a relay in front of one."""

POOL = [b"/fuzz/%d" % number for number in range(24)]
"""The keys of the streams that are mutated; they share them, so that they wake and disturb each other."""
SIZES = (1, 2, 3)
"""Of the barriers at these keys, which other streams complete."""
SHARED = (Op.GETNUMKEYS, Op.LIST_KEYS, Op.SNAPSHOT)
"""Operations whose answer depends on what other clients do."""

GROWTH_MIB = 64
"""How much larger the server may get at any time: less than what it may store, hold and owe together."""

AT_ONCE = 32
"""Streams under way at a time."""

DEAF_AT_ONCE = 8
"""Clients that have stopped reading, and are still connected."""

SWEEP_STREAMS, SWEEP_BYTES = 1000, 8 * MIB
"""How much is sent before the keys that the streams left are deleted: well before the store is full."""

SECONDS = 30.0
"""How long one stream may take; far more than any does."""


class FuzzError(Exception):
    """The server did not do what it is to do."""


# Streams


@dataclass
class Stream:
    """What one client sends, how, and how it ends."""

    number: int
    kind: str
    pieces: list[bytes]
    replies: bytes | None = None
    """What the server is to answer, where that is known."""
    waits: bool = False


def make_stream(seed: int, number: int) -> Stream:
    """Stream `number` of the run `seed`."""
    rng = Random(f"{seed}/{number}")
    return rng.choices(MAKERS, WEIGHTS)[0](rng, number)


def _noise(rng: Random, number: int) -> Stream:
    """Random bytes, behind a VALIDATE or not."""
    begin = VALIDATE if rng.random() < 0.8 else b""
    # Half of them small numbers: opcodes, and lengths that are not absurd.
    length = rng.randrange(1, 200)
    noise = rng.randbytes(length) if rng.random() < 0.5 else bytes(rng.choices(range(20), k=length))
    return Stream(number, "noise", cut(rng, begin + noise))


def _mutated(rng: Random, number: int) -> Stream:
    """Requests that were valid before one to four mutations."""
    stream = bytearray(VALIDATE + b"".join(some_requests(rng, POOL, SIZES)))
    for _ in range(rng.randrange(1, 5)):
        mutate_bytes(rng, stream)
    return Stream(number, "mutated", cut(rng, bytes(stream)))


def _valid(rng: Random, number: int) -> Stream:
    """Requests on keys of its own, which it deletes; a core in this process says what the answer is."""
    prefix = b"/valid/%s/" % rng.randbytes(8).hex().encode()
    keys = [prefix + b"%d" % number for number in range(6)]
    sent = [VALIDATE, *(one for one in some_requests(rng, keys) if one[0] not in SHARED)]
    # Each push is popped; a queue has no other way to go.
    sent += [request(Op.QUEUE_POP, key) for key in keys for one in sent if one[0] == Op.QUEUE_PUSH]
    sent += [request(Op.DELETE_KEY, key) for key in keys]
    whole = b"".join(sent)
    core = Core(Limits(**LIMITS))
    replies = serve(core, core.open("oracle"), whole)
    waits = any(one[0] in (Op.WAIT, Op.BARRIER) for one in sent)
    return Stream(number, "valid", cut(rng, whole), replies, waits)


def _broken_off(rng: Random, number: int) -> Stream:
    """Valid requests whose client goes away in the middle of one, without a word."""
    whole = VALIDATE + b"".join(some_requests(rng, POOL, SIZES))
    return Stream(number, "broken off", cut(rng, whole[: rng.randrange(1, len(whole))]))


def _deaf(rng: Random, number: int) -> Stream:
    """Valid requests whose client never reads a reply; some ask for more than the server may hold."""
    asked = some_requests(rng, POOL, SIZES)
    if rng.random() < 0.2:
        key = rng.choice(POOL)
        asked += [request(Op.SET, key, bytes(64 * KIB)), request(Op.GET, key) * rng.randrange(1, 200)]
    return Stream(number, "deaf", cut(rng, VALIDATE + b"".join(asked)))


def _session(rng: Random, number: int) -> Stream:
    """A relay's session: requests in batches, some of them mutated, as well as what is around."""
    tokens = rng.choice([rng.randbytes(16), bytes([rng.randrange(4)]) * 16])  # some are taken up again
    sent = bytearray(VALIDATE)
    sent += session_request(tokens, rng.choice([0, 100, 60_000]), 0, known=rng.random() < 0.1)
    for count in range(1, rng.randrange(2, 6)):
        requests = [
            bytearray(one) for one in [*some_requests(rng, POOL, SIZES), *relayed_requests(rng, POOL)]
        ]
        if rng.random() < 0.5:
            mutate_bytes(rng, rng.choice(requests))
        sent += batch(count, rng.choice([0, count - 1]), [bytes(one) for one in requests])
        if rng.random() < 0.3:
            sent += request(rng.choices((Op.PRESENT, Op.BEAT, Op.BYE), (5, 3, 2))[0])
    if rng.random() < 0.2:
        mutate_bytes(rng, sent)
    return Stream(number, "session", cut(rng, bytes(sent)))


def cut(rng: Random, whole: bytes) -> list[bytes]:
    """One piece mostly, as most clients send; else several, down to single bytes."""
    if rng.random() < 0.4 or len(whole) < 2:
        return [whole]
    if rng.random() < 0.1 and len(whole) < 100:
        return [whole[index : index + 1] for index in range(len(whole))]
    cuts = sorted(rng.choices(range(1, len(whole)), k=rng.randrange(1, 6)))
    return [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


MAKERS: list[Callable[[Random, int], Stream]] = [_noise, _mutated, _valid, _broken_off, _deaf, _session]
WEIGHTS = [20, 50, 15, 10, 5, 15]

# The server


class Server:
    """A running server, and what can be seen of it from outside."""

    def __init__(self, running: processes.Server) -> None:
        self.process, self.port = running.process, running.port
        self._read_log = running.read_log
        self._stats = psutil.Process(self.process.pid)

    @property
    def rss(self) -> int:
        return int(self._stats.memory_info().rss)

    @property
    def open_files(self) -> int:
        return int(self._stats.num_fds()) if hasattr(self._stats, "num_fds") else 0

    def check(self) -> None:
        """Raise FuzzError if it has died or logged a traceback."""
        text = self._read_log()
        if self.process.poll() is not None:
            raise FuzzError(f"the server died with {self.process.returncode}: {text[-3000:]}")
        if "Traceback" in text:
            raise FuzzError(f"the server logged an exception: {text[text.index('Traceback') :][:3000]}")

    def count_violations(self) -> int:
        """As the server counts them: its log leaves out lines that come too fast."""
        return fetch_snapshot("127.0.0.1", self.port, Question(), Deadline(30.0)).error_count


@contextmanager
def serving(target: str) -> Iterator[Server]:
    """A server process under LIMITS, a relay to one, or one with workers; ended when the block is left."""
    limits = [word for name, value in LIMITS.items() for word in ("--limit", f"{name}={value}")]
    workers = ["--workers", "2"] if target == "workers" else []
    backend = target if target in BACKENDS else "auto"
    with processes.serving(backend, options=[*workers, *limits]) as running:
        server = Server(running)
        if target == "relay":
            with processes.relaying(running.address, options=limits) as relay:
                yield Server(relay)
            server.check()
        else:
            yield server


# The well-behaved client


class Witness:
    """A client that does what clients do, and knows every answer in advance.

    All of its keys are there from the start, and what replaces a value is as long as the value: so
    it needs no room, and may not be refused even by a full store.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: Random) -> None:
        self._reader, self._writer = reader, writer
        self._rng = rng
        self._prefix = b"/witness/%s/" % rng.randbytes(16).hex().encode()
        self._values = {self._key(number): rng.randbytes(40) for number in range(8)}
        self._total = 10**17
        self.checks = 0

    @classmethod
    async def connect(cls, port: int, rng: Random) -> Witness:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=64 * MIB)
        witness = cls(reader, writer, rng)
        writer.write(VALIDATE)
        for key, value in witness._values.items():
            writer.write(request(Op.SET, key, value))
        await witness._expect(witness._add(witness._total), pack_i64(witness._total))
        return witness

    async def check(self) -> None:
        """One conversation in one piece: all answers must be right."""
        rng = self._rng
        key, other = rng.sample(list(self._values), 2)
        old, new, amount, nonce = self._values[key], rng.randbytes(40), rng.randrange(1000), rng.randbytes(4)
        missing = self._key(1000 + rng.randrange(1000))
        self._values[key] = new
        self._total += amount
        await self._expect(
            request(Op.GET, key)
            + request(Op.SET, key, new)
            + request(Op.GET, key)
            + self._add(amount)
            + counted_request(Op.CHECK, [key, other])
            + counted_request(Op.CHECK, [key, missing])
            + counted_request(Op.WAIT, [key, other])
            + counted_request(Op.MULTI_GET, [other, missing, key])
            + request(Op.COMPARE_SET, key, old, old)
            + request(Op.DELETE_KEY, missing)
            + request(Op.PING, tail=nonce),
            blob(old)
            + blob(new)
            + pack_i64(self._total)
            + b"\x00\x01\x00"
            + blob(self._values[other])
            + blob(b"")
            + blob(new)
            + blob(new)
            + pack_i64(0)
            + nonce,
        )
        self.checks += 1

    async def sweep(self) -> None:
        """Delete what the mutated streams left behind; the keys of this client must be among those listed."""
        self._writer.write(request(Op.LIST_KEYS))
        keys = [await self._read_blob() for _ in range(await self._read_number())]
        if not {*self._values, self._key(-1)} <= set(keys):
            raise FuzzError("LIST_KEYS does not list the keys of the well-behaved client")
        stray = [key for key in keys if not key.startswith((self._prefix, b"/valid/"))]
        self._writer.write(b"".join([request(Op.DELETE_KEY, key) for key in stray]))
        await self._read(8 * len(stray))
        for key in POOL:
            await self._empty_queue(key)

    async def _empty_queue(self, key: bytes) -> None:
        while True:
            self._writer.write(request(Op.QUEUE_POP, key))
            if not await self._read_number():
                return
            await self._read_blob()

    async def ping(self) -> None:
        await self._expect(request(Op.PING, tail=b"ping"), b"ping")

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:  # the server is gone
            pass

    def _key(self, number: int) -> bytes:
        return self._prefix + b"%d" % number

    def _add(self, amount: int) -> bytes:
        return request(Op.ADD, self._key(-1), tail=pack_i64(amount))

    async def _expect(self, sent: bytes, reply: bytes) -> None:
        self._writer.write(sent)
        received = await self._read(len(reply))
        if received != reply:
            raise FuzzError(f"the well-behaved client sent {sent!r} and got {received!r}, not {reply!r}")

    async def _read_number(self) -> int:
        return int.from_bytes(await self._read(8), "little", signed=True)

    async def _read_blob(self) -> bytes:
        return await self._read(await self._read_number())

    async def _read(self, count: int) -> bytes:
        try:
            return await asyncio.wait_for(self._reader.readexactly(count), SECONDS)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise FuzzError(f"the server closed the well-behaved client: {error!r}") from error
        except asyncio.TimeoutError:
            raise FuzzError(f"the well-behaved client was not answered within {SECONDS:g} s") from None


# The run


@dataclass
class Summary:
    """What a run on one backend came to."""

    backend: str
    seed: int
    streams: int = 0
    bytes_sent: int = 0
    closed_by_server: int = 0
    witness_checks: int = 0


class Run:
    """All streams of one seed against one server."""

    def __init__(self, server: Server, backend: str, seed: int) -> None:
        self.summary = Summary(backend, seed)
        self._server = server
        self._seed = seed
        self._deaf: deque[socket.socket] = deque()
        self._next = 0
        self._swept = (0, 0)
        self._most_rss = 0
        self.under_way: set[int] = set()

    async def all(self, first: int, count: int) -> None:
        """Send streams `first` to `first + count`, AT_ONCE at a time, and check all that is promised."""
        witness = await Witness.connect(self._server.port, Random(f"{self._seed}/witness"))
        try:
            files = self._server.open_files
            self._most_rss = self._server.rss + GROWTH_MIB * MIB
            await self._send_all(witness, first, first + count)
            await self._settle(witness, files)
        finally:
            await witness.close()
        self.summary.closed_by_server = self._server.count_violations()
        self.summary.witness_checks = witness.checks

    async def _send_all(self, witness: Witness, first: int, end: int) -> None:
        self._next = first
        workers = [asyncio.create_task(self._work(end)) for _ in range(AT_ONCE)]
        try:
            await self._watch(witness, workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            while self._deaf:
                self._deaf.popleft().close()

    async def _watch(self, witness: Witness, workers: list[asyncio.Task[None]]) -> None:
        """Be the well-behaved client until all workers are done; what one of them raises is raised here."""
        while not all(worker.done() for worker in workers):
            await witness.check()
            streams, sent = self._swept
            now = self.summary.streams, self.summary.bytes_sent
            if now[0] - streams >= SWEEP_STREAMS or now[1] - sent >= SWEEP_BYTES:
                await witness.sweep()
                self._check_server()
                self._swept = now
            for worker in workers:
                if worker.done():
                    worker.result()
        for worker in workers:
            worker.result()
        await witness.check()
        await witness.sweep()
        self._check_server()

    def _check_server(self) -> None:
        self._server.check()
        if self._server.rss > self._most_rss:
            raise FuzzError(f"the server grew to {self._server.rss:,} bytes, by more than {GROWTH_MIB} MiB")

    async def _settle(self, witness: Witness, files: int) -> None:
        """Wait until the server has closed what its clients have: then it has as many files as before."""
        deadline = time.monotonic() + SECONDS
        while self._server.open_files > files:
            if time.monotonic() > deadline:
                raise FuzzError(f"{self._server.open_files - files} sockets are left behind")
            await witness.ping()

    async def _work(self, end: int) -> None:
        while self._next < end:
            number = self._next
            self._next += 1
            self.under_way.add(number)
            stream = make_stream(self._seed, number)
            try:
                await asyncio.wait_for(self._send(stream), SECONDS)
            except asyncio.TimeoutError:
                raise FuzzError(
                    f"stream {number} ({stream.kind}) was not over within {SECONDS:g} s"
                ) from None
            except ConnectionRefusedError:
                self._server.check()
                raise FuzzError("the server refuses connections") from None
            self.under_way.discard(number)
            self.summary.streams += 1
            self.summary.bytes_sent += sum(map(len, stream.pieces))

    async def _send(self, stream: Stream) -> None:
        with ExitStack() as stack:
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._server.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            closed = await self._send_pieces(sock, stream)
            if stream.kind == "deaf":
                stack.pop_all()
                self._keep_deaf(sock)
            elif stream.kind != "broken off":
                replies = await self._read_rest(sock, ended=closed)
                if stream.replies is not None and not self._is_right(replies, stream):
                    raise FuzzError(
                        f"stream {stream.number} was answered {replies!r} instead of {stream.replies!r}"
                    )

    async def _send_pieces(self, sock: socket.socket, stream: Stream) -> bool:
        """Send all pieces, if possible each in a segment of its own; True if the server closes before."""
        loop = asyncio.get_running_loop()
        try:
            for piece in stream.pieces:
                await loop.sock_sendall(sock, piece)
                await asyncio.sleep(0)
        except ConnectionError:
            return True
        return False

    async def _read_rest(self, sock: socket.socket, *, ended: bool) -> bytes:
        """Say that nothing more comes, and read until the server closes, which it must."""
        loop = asyncio.get_running_loop()
        data = bytearray()
        try:
            if not ended:
                sock.shutdown(socket.SHUT_WR)
            while piece := await loop.sock_recv(sock, 64 * KIB):
                data += piece
        except OSError:  # it closed with some of what was sent unread
            pass
        return bytes(data)

    def _is_right(self, replies: bytes, stream: Stream) -> bool:
        """A wait that is cancelled, or whose client ends, at once: a relay need not ask how it ended."""
        return replies == stream.replies or (self.summary.backend in ("relay", "workers") and stream.waits)

    def _keep_deaf(self, sock: socket.socket) -> None:
        """Let a client that does not read stay for a while; the one that has been longest goes."""
        self._deaf.append(sock)
        if len(self._deaf) > DEAF_AT_ONCE:
            self._deaf.popleft().close()


def fuzz(backend: str, streams: int, seed: int, *, first: int = 0) -> Summary:
    """Run streams against a fresh server; FuzzError names the seed and the streams that were under way."""
    with serving(backend) as server:
        run = Run(server, backend, seed)
        try:
            asyncio.run(run.all(first, streams))
        except FuzzError as failure:
            numbers = ", ".join(map(str, sorted(run.under_way))) or "none"
            raise FuzzError(f"{backend}, seed {seed}, streams under way: {numbers}: {failure}") from failure
        return run.summary
