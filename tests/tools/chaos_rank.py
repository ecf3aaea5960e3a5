"""A rank of the jobs of `tests/tools/chaos.py`: counts on the store in steps, and checks every answer.

It imports no torch: eight that do take half a minute to start on two cores. Its folder is the working
directory. There it says in a file of its own which step it has done, and in another one which error has ended
it. It ends well when rank 0 finds a file named `stop`.
"""

from __future__ import annotations

import os
import random
import time
import traceback
from pathlib import Path

from rallypoint import TCPStore

PAUSE_SECONDS = 0.05
_VALUE_BYTES = 1 << 20
_TIMEOUT_VARIABLE = "CHAOS_TIMEOUT"


class WrongAnswerError(Exception):
    """The store has lost something, or has done something twice."""


def value_of(step: int, rank: int) -> bytes:
    """What a rank writes in a step: seldom long, so that servers need new memory now and then."""
    rng = random.Random(step * 1000 + rank)
    return rng.randbytes(rng.randrange(_VALUE_BYTES) if (step + rank) % 16 == 0 else 16)


class Rank:
    """One rank, and the store that all of them share."""

    def __init__(self, store: TCPStore, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world

    def take_step(self, step: int) -> bool:
        """Write and count, meet the others, check what all have written. False: it was the last step."""
        store, rank, world, here = self._store, self._rank, self._world, f"step/{step}"
        store.set(f"{here}/{rank}", value_of(step, rank))
        store.add("total", rank + 1)
        store.append(f"{here}/names", chr(ord("A") + rank))
        store.queue_push(f"queue/{(rank + 1) % world}", f"{step} of {rank}")
        if rank == 0:
            store.set(f"{here}/last", str(Path("stop").exists()))
        with store.clone() as twin:  # another connection, at every step
            twin.barrier(f"{here}/written", world)
        before = (rank - 1) % world
        self._expect("the counter", store.add("total", 0), (step + 1) * world * (world + 1) // 2)
        names = bytes(sorted(store.get(f"{here}/names"))).decode()
        self._expect("the appended names", names, "ABCDEFGHIJKLMNOP"[:world])
        self._expect("the queue", store.queue_pop(f"queue/{rank}"), f"{step} of {before}".encode())
        self._expect("the value", store.get(f"{here}/{before}"), value_of(step, before))
        is_last = store.get(f"{here}/last") == b"True"
        store.barrier(f"{here}/read", world)
        store.delete_key(f"{here}/{rank}")
        return not is_last

    def _expect(self, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            raise WrongAnswerError(f"{what} is {found!r:.80}, but should be {wanted!r:.80}")


def _say(name: str, text: str) -> None:
    """Write a file that is never seen half written."""
    unfinished = Path(f"{name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(name)


def main() -> None:
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name, step = f"rank-{number}", 0
    try:
        seconds = float(os.environ[_TIMEOUT_VARIABLE])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with TCPStore(host, port, world, False, seconds) as store:
            rank = Rank(store, number, world)
            while rank.take_step(step):
                step += 1
                _say(name, f"{os.getpid()} {step} {host}:{port}")
                time.sleep(PAUSE_SECONDS)
        _say(f"{name}.done", str(step))
    except Exception:
        _say(f"{name}.error", traceback.format_exc())
        raise


if __name__ == "__main__":
    main()
