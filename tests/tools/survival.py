"""A store on a real engine, whose processes are killed and stopped while clients use it.

Three processes of `rallypoint serve --engine`, two relays with clients behind them, and three nodes of etcd;
or a Redis with two replicas and three Sentinels. In each round the clients begin anew, with keys of their
own; at a random moment the leading process, one that stands by, or the engine's leader is killed and started
again, or stopped for a while. Then all that the clients were told is judged: `survival_clients` and
`histories` say how.

    python tests/tools/survival.py [--engine etcd|redis] [--kills 50] [--seed 7]

Exit code 1 if anything was wrong; the logs are kept. The pause of a fault is the longest time that any client
was without a reply because of it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from engines import EtcdCluster, Node, RedisCluster, await_that, etcd_cluster, free_ports, redis_cluster
from histories import History
from processes import relaying
from rallypoint.store.replica.engines.opening import open_log
from rallypoint.store.replica.log import Log
from simulated_ranks import FailedError, Keys
from survival_clients import PATIENCE, TOTAL, Client, Crowd

WHO = ("leading process", "standby", "engine's leader")
HOW = ("killed", "stopped")
_SERVERS, _RELAYS = 3, 2


@dataclass
class FrontEnd(Node):
    """A process of `rallypoint serve --engine`."""

    starts: int = 0

    def start(self) -> None:
        self.starts += 1
        super().start()


def _stands_by(node: Node) -> bool:
    assert isinstance(node, FrontEnd)
    return node.log.read_text().count("standing by at") >= node.starts


def front_end(url: str, acks: int, port: int, log: Path) -> FrontEnd:
    """A process of the store on an engine, to be started."""
    command = [
        *(sys.executable, "-m", "rallypoint", "serve", "--host", "127.0.0.1", "--port", str(port)),
        *("--engine", url, "--acks", str(acks)),
    ]
    return FrontEnd(command, port, log, _stands_by)


@dataclass
class System:
    """All that runs."""

    engine: EtcdCluster | RedisCluster
    servers: Sequence[FrontEnd]
    relays: Sequence[int]
    log: Log

    def find(self, who: str, rng: random.Random) -> Node:
        """The process that a fault is to meet."""
        if who == "engine's leader":
            return self.engine.leader()
        address = self.log.read_leadership().address
        leading = [each for each in self.servers if each.address == address]
        assert leading, f"nobody leads at {address!r}"
        if who == "leading process":
            return leading[0]
        return rng.choice([each for each in self.servers if each is not leading[0]])

    def await_ready(self) -> None:
        """Until all of it is as it was before the fault."""
        self.engine.await_ready()
        for each in self.servers:
            each.await_ready()


@contextmanager
def running(engine: str, folder: Path) -> Iterator[System]:
    """A store on an engine, and relays."""
    with ExitStack() as stack:
        cluster: EtcdCluster | RedisCluster
        if engine == "etcd":
            cluster, acks = stack.enter_context(etcd_cluster(folder, 3)), 0
        else:
            cluster, acks = stack.enter_context(redis_cluster(folder, replicas=2)), 1
        url = cluster.url("survival")
        servers: list[FrontEnd] = []
        for number, port in enumerate(free_ports(_SERVERS)):
            server = front_end(url, acks, port, folder / f"serve{number}.log")
            servers.append(server)
            stack.callback(server.kill)
            server.start()
        places = ",".join(each.address for each in servers)
        relays: list[int] = []
        for number in range(_RELAYS):
            log = stack.enter_context((folder / f"relay{number}.log").open("w+"))
            relays.append(stack.enter_context(relaying(places, log)).port)
        own = open_log(url)
        stack.callback(own.close)
        system = System(cluster, servers, relays, own)
        system.await_ready()
        await_that(lambda: own.read_leadership().address != "", lambda: "nobody leads")
        yield system


@dataclass
class Figures:
    """What came of all faults."""

    pauses: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)

    def table(self) -> list[str]:
        lines = ["| fault | how many | pause, median | p99 | longest |", "|---|---:|---:|---:|---:|"]
        for kind, pauses in sorted(self.pauses.items()):
            ordered = sorted(pauses)
            each = [ordered[min(int(len(ordered) * share), len(ordered) - 1)] for share in (0.5, 0.99)]
            cells = [kind, str(len(ordered)), *(f"{value:.2f} s" for value in (*each, ordered[-1]))]
            lines.append(f"| {' | '.join(cells)} |")
        return lines


class Trial:
    """Faults, one after the other, with clients at each."""

    def __init__(self, system: System, seed: int) -> None:
        self._system = system
        self._rng = random.Random(seed)
        self._rounds = 0
        self._totals: list[int] = []
        self.figures = Figures()

    def run(self, kills: int) -> None:
        """So many faults, as many of each kind. FailedError if anything is wrong."""
        kinds = [(who, how) for who in WHO for how in HOW]
        for number in range(kills):
            if number % len(kinds) == 0:
                self._rng.shuffle(kinds)
            self._round(*kinds[number % len(kinds)])
        self._check_total()

    def _round(self, who: str, how: str) -> None:
        rng, system = self._rng, self._system
        self._rounds += 1
        crowd = Crowd(system.relays, rng, f"r{self._rounds}")
        crowd.start()
        time.sleep(rng.uniform(0.2, 0.8))
        victim = system.find(who, rng)
        since = time.monotonic()
        if how == "killed":
            victim.kill()
            time.sleep(rng.uniform(0, 1))
            victim.start()
        else:
            victim.pause()
            time.sleep(rng.uniform(0.5, 4))
            victim.resume()
        over = time.monotonic()
        await_that(lambda: crowd.goes_on(over), lambda: f"{who} {how}: clients hang", PATIENCE)
        time.sleep(0.3)
        crowd.finish()
        system.await_ready()
        pause = crowd.pause(since)
        self._totals += crowd.totals
        self.figures.pauses[f"{who} {how}"].append(pause)
        self.figures.counts += crowd.history.counts
        print(f"survival: {self._rounds}: {who} {how}: a pause of {pause:.2f} s", file=sys.stderr, flush=True)

    def _check_total(self) -> None:
        """Over all rounds, what was added is there, each once."""
        client = Client("last", self._system.relays[0], History(Keys([], [], [], [])), count())
        total = client.count(TOTAL, 0)
        client.close()
        if sorted(self._totals) != list(range(1, total + 1)):
            raise FailedError(f"{len(self._totals)} times 1 was added to {TOTAL!r}, and it is {total}")


def main() -> int:
    parser = argparse.ArgumentParser(description="a store whose processes are killed and stopped")
    parser.add_argument("--engine", choices=("etcd", "redis"), default="etcd")
    parser.add_argument("--kills", type=int, default=50, help="how many faults")
    parser.add_argument("--seed", type=int, help="of the faults and the clients; else one is drawn, and told")
    arguments = parser.parse_args()
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    folder = Path(tempfile.mkdtemp(prefix="survival-"))
    print(f"survival: seed {seed}, logs in {folder}", file=sys.stderr, flush=True)
    with running(arguments.engine, folder) as system:
        trial = Trial(system, seed)
        try:
            trial.run(arguments.kills)
        except (FailedError, AssertionError) as error:
            print(f"survival: WRONG: {error}", file=sys.stderr)
            return 1
        finally:
            print("\n".join(trial.figures.table()))
            counts = ", ".join(f"{count} {name}" for name, count in sorted(trial.figures.counts.items()))
            print(f"survival: {counts}; load {os.getloadavg()}", file=sys.stderr)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
