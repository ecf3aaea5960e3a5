"""`rallypoint kv`: look into any TCPStore, torch's own included, and change it.

It is a client that counts itself nowhere: a job that waits for its workers does not notice it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from typing import Final

from rallypoint.cli.command import JSON, Argument, Command, Group, command
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.endpoint import parse_store
from rallypoint.store.connect.connecting import first_to_answer
from rallypoint.store.rollcall.identity import Role
from rallypoint.text import LONGEST_KEY, printable_lines, shown

_CONNECT_SECONDS = 10.0

_STORE: Final = Argument(
    "--store",
    metavar="HOST:PORT",
    variable="RALLYPOINT_STORE",
    required=True,
    help="Where the store listens.",
)
_KEY: Final = Argument("key", metavar="KEY", help="The key, as the script names it.")
_KEYS: Final = Argument("keys", nargs="+", metavar="KEY", help="The keys, as the script names them.")
_VALUE: Final = Argument("value", metavar="VALUE", help="The value; - reads it from standard input.")


def _timeout(default: float) -> Argument:
    return Argument(
        "--timeout", type=float, metavar="SECONDS", default=default, help="How long to wait; 0: not at all."
    )


@command(_KEY, _STORE, _timeout(0))
def _get(key: str, store: str, timeout: float) -> None:
    """Print the value of KEY. Exit 1 if it is not there (after --timeout seconds).

    A key that is only a queue reads as empty: use pop.
    """
    with _open(store, timeout) as client:
        if not timeout and not client.check([key]):
            raise RallypointError(f"there is no key {key!r}")
        _print_value(client.get(key))


def _writer(write: Callable[[TCPStore, str, bytes], None], summary: str) -> Command:
    """A command that writes a value."""

    def run(key: str, value: str, store: str) -> None:
        with _open(store) as client:
            write(client, key, _read_value(value))

    run.__doc__ = summary
    return Command(run, (_KEY, _VALUE, _STORE), takes_dashes=True)


@command(
    _KEY,
    Argument("amount", type=int, metavar="AMOUNT", help="What to add; may be negative."),
    _STORE,
    takes_dashes=True,
)
def _add(key: str, amount: int, store: str) -> None:
    """Add AMOUNT to the number at KEY, and print the sum; 0 reads a counter."""
    with _open(store) as client:
        print(client.add(key, amount))


@command(_KEYS, _STORE, _timeout(300))
def _wait(keys: list[str], store: str, timeout: float) -> None:
    """Wait until all KEYS are there. Exit 1 and name those that are missing after --timeout seconds."""
    with _open(store, timeout) as client:
        if timeout:
            client.wait(keys)
        elif missing := [key for key in keys if not client.check([key])]:
            raise RallypointError(f"{len(missing)} of {len(keys)} keys are missing: {', '.join(missing)}")


@command(_KEYS, _STORE, JSON)
def _check(keys: list[str], store: str, as_json: bool) -> int:
    """Say of each key whether it is there. Exit 1 if one is not."""
    with _open(store) as client:
        found = {key: client.check([key]) for key in keys}
    if as_json:
        print(json.dumps(found))
    else:
        for key, there in found.items():
            print(f"{'there  ' if there else 'missing'}  {key}")
    return 0 if all(found.values()) else 1


@command(_KEY, _STORE)
def _delete(key: str, store: str) -> None:
    """Delete KEY. Exit 1 if it is not there."""
    with _open(store) as client:
        if not client.delete_key(key):
            raise RallypointError(f"there is no key {key!r}")


@command(
    Argument("prefix", nargs="?", default="", metavar="PREFIX", help="Only keys that begin with this."),
    _STORE,
    JSON,
)
def _list(prefix: str, store: str, as_json: bool) -> None:
    """Print the keys, a line each, sorted. Queues are not listed.

    Characters that a terminal would obey are written out, and of a very long key the middle is left out;
    --json has every key as it is.
    """
    with _open(store) as client:
        keys = sorted(key for key in client.list_keys() if key.startswith(prefix))
    for line in [json.dumps(keys)] if as_json else (shown(key, LONGEST_KEY) for key in keys):
        print(line)


@command(_KEY, _STORE, _timeout(0))
def _pop(key: str, store: str, timeout: float) -> None:
    """Take the first value of the queue KEY and print it. Exit 1 if it is empty (after --timeout seconds)."""
    with _open(store, timeout) as client:
        _print_value(client.queue_pop(key, block=timeout > 0))


kv: Final = Group(
    "Look into a TCPStore, torch's own included, and change it.",
    {
        "get": _get,
        "set": _writer(TCPStore.set, "Store VALUE under KEY."),
        "append": _writer(TCPStore.append, "Append VALUE to the value of KEY."),
        "add": _add,
        "wait": _wait,
        "check": _check,
        "delete": _delete,
        "list": _list,
        "push": _writer(TCPStore.queue_push, "Append VALUE to the queue KEY."),
        "pop": _pop,
    },
)


def _open(store: str, timeout: float = 0.0) -> TCPStore:
    if not 0 <= timeout < math.inf:
        raise UsageError(f"--timeout is {timeout:g}", hint="write seconds: 0 (do not wait) or more")
    places = parse_store(store, "the store (--store, or RALLYPOINT_STORE)")
    client = first_to_answer(
        places, lambda host, port: TCPStore(host, port, timeout=_CONNECT_SECONDS, role=Role.TOOL)
    )
    if timeout > 0:
        client.set_timeout(timeout)
    return client


def _read_value(text: str) -> bytes:
    return sys.stdin.buffer.read() if text == "-" else os.fsencode(text)


def _print_value(value: bytes) -> None:
    """The value as it is, with a line end behind it if it has none; a terminal gets nothing that it obeys."""
    if sys.stdout.isatty():
        print(printable_lines(value.decode(errors="surrogateescape").removesuffix("\n")))
        return
    sys.stdout.buffer.write(value if value.endswith(b"\n") else value + b"\n")
    sys.stdout.buffer.flush()
