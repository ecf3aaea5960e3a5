"""`rallypoint kv`: look into any TCPStore, torch's own included, and change it.

It is a client that counts itself nowhere: a job that waits for its workers does not notice it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Annotated

import typer

from rallypoint.errors import RallypointError, UsageError
from rallypoint.rollcall.identity import Role
from rallypoint.stores.tcp import TCPStore

app = typer.Typer(help="Look into a TCPStore, torch's own included, and change it.", no_args_is_help=True)

_CONNECT_SECONDS = 10.0
_TAKES_NUMBERS = {"ignore_unknown_options": True}  # a value such as -5 is no option

StoreOption = Annotated[
    str,
    typer.Option("--store", metavar="HOST:PORT", envvar="RALLYPOINT_STORE", help="Where the store listens."),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait; 0: not at all.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Key = Annotated[str, typer.Argument(help="The key, as the script names it.")]
Keys = Annotated[list[str], typer.Argument(help="The keys, as the script names them.")]
Text = Annotated[str, typer.Argument(metavar="VALUE", help="The value; - reads it from standard input.")]


@app.command()
def get(key: Key, store: StoreOption, timeout: TimeoutOption = 0.0) -> None:
    """Print the value of KEY. Exit 1 if it is not there (after --timeout seconds).

    A key that is only a queue reads as empty: use pop.
    """
    with _open(store, timeout) as client:
        if not timeout and not client.check([key]):
            raise RallypointError(f"there is no key {key!r}")
        _print_value(client.get(key))


@app.command("set", context_settings=_TAKES_NUMBERS)
def set_(key: Key, value: Text, store: StoreOption) -> None:
    """Store VALUE under KEY."""
    with _open(store) as client:
        client.set(key, _read_value(value))


@app.command(context_settings=_TAKES_NUMBERS)
def append(key: Key, value: Text, store: StoreOption) -> None:
    """Append VALUE to the value of KEY."""
    with _open(store) as client:
        client.append(key, _read_value(value))


@app.command(context_settings=_TAKES_NUMBERS)
def add(
    key: Key,
    amount: Annotated[int, typer.Argument(metavar="AMOUNT", help="What to add; may be negative.")],
    store: StoreOption,
) -> None:
    """Add AMOUNT to the number at KEY, and print the sum; 0 reads a counter."""
    with _open(store) as client:
        print(client.add(key, amount))


@app.command()
def wait(keys: Keys, store: StoreOption, timeout: TimeoutOption = 300.0) -> None:
    """Wait until all KEYS are there. Exit 1 and name those that are missing after --timeout seconds."""
    with _open(store, timeout) as client:
        if timeout:
            client.wait(keys)
        elif missing := [key for key in keys if not client.check([key])]:
            raise RallypointError(f"{len(missing)} of {len(keys)} keys are missing: {', '.join(missing)}")


@app.command()
def check(keys: Keys, store: StoreOption, as_json: JsonOption = False) -> None:
    """Say of each key whether it is there. Exit 1 if one is not."""
    with _open(store) as client:
        found = {key: client.check([key]) for key in keys}
    if as_json:
        print(json.dumps(found))
    else:
        for key, there in found.items():
            print(f"{'there  ' if there else 'missing'}  {key}")
    if not all(found.values()):
        raise typer.Exit(1)


@app.command()
def delete(key: Key, store: StoreOption) -> None:
    """Delete KEY. Exit 1 if it is not there."""
    with _open(store) as client:
        if not client.delete_key(key):
            raise RallypointError(f"there is no key {key!r}")


@app.command("list")
def list_(
    store: StoreOption,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only keys that begin with this.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Print the keys, a line each, sorted. Queues are not listed."""
    with _open(store) as client:
        keys = sorted(key for key in client.list_keys() if key.startswith(prefix))
    lines = [json.dumps(keys)] if as_json else keys
    for line in lines:
        # A key may be any bytes; a terminal gets nothing that it would obey.
        shown = line if not sys.stdout.isatty() or line.isprintable() else repr(line)[1:-1]
        sys.stdout.buffer.write(shown.encode(errors="surrogateescape") + b"\n")
    sys.stdout.flush()


@app.command(context_settings=_TAKES_NUMBERS)
def push(key: Key, value: Text, store: StoreOption) -> None:
    """Append VALUE to the queue KEY."""
    with _open(store) as client:
        client.queue_push(key, _read_value(value))


@app.command()
def pop(key: Key, store: StoreOption, timeout: TimeoutOption = 0.0) -> None:
    """Take the first value of the queue KEY and print it. Exit 1 if it is empty (after --timeout seconds)."""
    with _open(store, timeout) as client:
        _print_value(client.queue_pop(key, block=timeout > 0))


def _open(store: str, timeout: float = 0.0) -> TCPStore:
    host, _, port = store.rpartition(":")
    if not 0 <= timeout < math.inf:
        raise UsageError(f"--timeout is {timeout:g}", hint="write seconds: 0 (do not wait) or more")
    if not host or "/" in host or not port.isdigit():
        raise UsageError(
            f"the store (--store, or RALLYPOINT_STORE) is {store!r}",
            hint="write HOST:PORT, for example localhost:29500",
        )
    client = TCPStore(host.strip("[]"), int(port), timeout=_CONNECT_SECONDS, role=Role.TOOL)
    if timeout > 0:
        client.set_timeout(timeout)
    return client


def _read_value(text: str) -> bytes:
    return sys.stdin.buffer.read() if text == "-" else os.fsencode(text)


def _print_value(value: bytes) -> None:
    """The value as it is; on a terminal or not, a line end behind it if it has none."""
    sys.stdout.buffer.write(value if value.endswith(b"\n") else value + b"\n")
    sys.stdout.buffer.flush()
