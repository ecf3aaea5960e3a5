"""A store server, eight ranks on torch's own client, one barrier: the store by itself, without a job.

The server is Rallypoint's, in a process of its own. Each rank is a process, too, and connects with
`torch.distributed.TCPStore`, as an unmodified training script does. The ranks tell each other their
names, add to one counter, meet at a barrier, and leave a report in the store; this process reads the
reports and prints them. Exit code 0 if all eight got through, else 1.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from rich import box
from rich.console import Console
from rich.table import Table

import rallypoint
from rallypoint.store.server.process.hosting import HostedServer, host_server

RANKS = 8
PATIENCE = 60.0  # seconds that a rank waits for the others, and this process for the ranks

console = Console(highlight=False)


def run_rank(rank: int, host: str, port: int) -> None:
    """One rank: what a training script would do with its store, with the time of each step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the main process ends the ranks
    times = {"started": time.monotonic()}  # one clock for all processes of a machine

    import torch.distributed as dist

    times["imported"] = time.monotonic()
    # `use_libuv` is about servers, and this is a client: with False it also works on a torch without libuv.
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=PATIENCE), use_libuv=False)
    times["joined"] = time.monotonic()

    store.set(f"name/{rank}", f"rank {rank} in process {os.getpid()}")
    everybody = [f"name/{other}" for other in range(RANKS)]
    store.wait(everybody)
    names = store.multi_get(everybody)
    store.add("sum of ranks", rank)
    times["exchanged"] = time.monotonic()

    store.barrier("all here", RANKS)
    times["passed"] = time.monotonic()

    # Every rank added before it came to the barrier, so behind it the sum is complete.
    total = store.add("sum of ranks", 0)
    report = {"pid": os.getpid(), "names": len(set(names)), "sum": total, "times": times}
    store.set(f"report/{rank}", json.dumps(report))


def start_ranks(host: str, port: int) -> list[BaseProcess]:
    """Eight processes. Where the system can fork, torch is imported once, in the process they fork from."""
    forking = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver") if forking else multiprocessing.get_context("spawn")
    if forking:
        context.set_forkserver_preload(["torch.distributed"])
    ranks: list[BaseProcess] = []
    for rank in range(RANKS):
        process = context.Process(target=run_rank, args=(rank, host, port), name=f"rank {rank}", daemon=True)
        process.start()
        ranks.append(process)
    return ranks


def await_ranks(ranks: list[BaseProcess]) -> list[str]:
    """What went wrong, rank by rank, as soon as something has; empty if all of them ended well."""
    deadline = time.monotonic() + PATIENCE
    while running := [process for process in ranks if process.exitcode is None]:
        ended = wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic()))
        if not ended:
            return [f"{process.name} is still running after {PATIENCE:g} s" for process in running]
        if failures := [process for process in ranks if process.exitcode]:
            return [f"{process.name} ended with exit code {process.exitcode}" for process in failures]
    return []


def print_summary(server: HostedServer, server_seconds: float, began: float) -> bool:
    """Print what the ranks have reported; True if it is what was to come."""
    with rallypoint.TCPStore(*server.address, timeout=10) as store:
        reports = [json.loads(text) for text in store.multi_get([f"report/{rank}" for rank in range(RANKS)])]
        keys = store.num_keys()

    console.print("\nseconds after the start of the ranks:")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("rank", "pid", "process up", "has torch", "joined", "exchanged", "past barrier"):
        table.add_column(heading, justify="right")
    for rank, report in enumerate(reports):
        seconds = [f"{moment - began:.3f}" for moment in report["times"].values()]
        table.add_row(str(rank), str(report["pid"]), *seconds)
    console.print(table)

    arrived = max(report["times"]["exchanged"] for report in reports)
    released = max(report["times"]["passed"] for report in reports)
    joining = max(report["times"]["joined"] - report["times"]["imported"] for report in reports)
    console.print(f"\nserver up in                       {server_seconds * 1000:8.1f} ms")
    console.print(
        f"ranks done in                      {(released - began) * 1000:8.1f} ms, torch's import included"
    )
    console.print(f"slowest connect                    {joining * 1000:8.1f} ms")
    console.print(f"last at the barrier to all past it {(released - arrived) * 1000:8.1f} ms")
    console.print(f"keys in the store                  {keys:6d}")
    return all(report["names"] == RANKS and report["sum"] == sum(range(RANKS)) for report in reports)


def main() -> int:
    """Run the demo; the exit code."""
    began = time.monotonic()
    server = host_server("localhost", 0)  # port 0: a free one
    server_seconds = time.monotonic() - began
    host, port = server.address
    ranks: list[BaseProcess] = []
    try:
        console.print(f"store server on {host}:{port}, backend {server.backend}, process {server.pid}")
        console.print(f"starting {RANKS} ranks, each with torch's own client ...")
        began = time.monotonic()
        ranks = start_ranks(host, port)
        failures = await_ranks(ranks)
        if not failures and print_summary(server, server_seconds, began):
            console.print(f"ok: {RANKS} of {RANKS} ranks met, exchanged and passed the barrier")
            return 0
        for failure in failures or ["the ranks did not see each other's values"]:
            console.print(f"failed: {failure}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: ending the ranks and the server")
        return 130
    finally:
        for process in ranks:
            if process.is_alive():
                process.terminate()
        server.release()


if __name__ == "__main__":
    sys.exit(main())
