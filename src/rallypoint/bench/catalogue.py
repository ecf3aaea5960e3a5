"""What can be measured, by which command: all loads, in the order of the tables."""

from __future__ import annotations

from typing import Final

from rallypoint.bench import arriving, bulk, operations, ranks, tutorial, waiting
from rallypoint.bench.arriving import BUSY_CLIENTS, BUSY_PIPELINED, NEW_CLIENTS, STORM_CLIENTS
from rallypoint.bench.bulk import MANY_KEYS
from rallypoint.bench.names import REDIS, RELAY
from rallypoint.bench.operations import CLIENTS, PIPELINED
from rallypoint.bench.session import Measurement

_SOME: Final = f"{CLIENTS} clients, one"
_NEW: Final = f"{NEW_CLIENTS:,} new clients beside {BUSY_CLIENTS}"
_ONE: Final = "one client, one"
_KEYS: Final = f"{MANY_KEYS:,} keys"
_BEHIND: Final = {RELAY: "behind one relay, the server sees nothing of its clients"}

WITH_RANKS: Final = (
    Measurement("init", "init", "ranks connect, and are counted", "rank", "time", ranks.ComingUp),
    Measurement("barrier", "barrier", "ranks come to a barrier all at once", "rank", "time", ranks.Barriers),
    Measurement(
        "barrier",
        "barrier-trickle",
        "ranks come to a barrier one after the other",
        "rank",
        "time",
        ranks.TrickledBarriers,
    ),
    Measurement("wakeup", "wakeup", "ranks wait for one key, which is set", "rank", "time", waiting.Wakeups),
    Measurement(
        "restart",
        "restart",
        "ranks leave, the store is made anew, they come back and pass a barrier",
        "rank",
        "time",
        ranks.Restarts,
        unfit={RELAY: "here all relays would start in a few processes, and not each on its machine"},
    ),
)
"""At several sizes: their words go behind the number of ranks."""

AS_IS: Final = Measurement(
    "init",
    "init-as-is",
    "ranks connect; -as-is: to torch's own socket, with a reverse look-up of each",
    "rank",
    "time",
    ranks.ComingUp,
    seconds=0.3,
)

TUTORIAL: Final = (
    Measurement(
        "init",
        "tutorial-init",
        "real clients of torch, a process each: TCPStore(...) as rank 0 sees it",
        "rank",
        "time",
        tutorial.TutorialInit,
        seconds=3.0,
        make_target=tutorial.make_rank_zero,
    ),
    Measurement(
        "barrier",
        "tutorial-barrier",
        "real clients of torch, a process each: the barrier of init_process_group as rank 0 sees it",
        "rank",
        "time",
        tutorial.TutorialBarrier,
        seconds=3.0,
        make_target=tutorial.make_rank_zero,
    ),
)

WITH_CLIENTS: Final = (
    Measurement("ops", "get", f"{_SOME} GET in flight each", "GET", "rate", operations.Gets, is_steady=True),
    Measurement(
        "ops",
        "get-pipelined",
        f"{CLIENTS} clients, {PIPELINED} GETs in flight each",
        "GET",
        "rate",
        operations.PipelinedGets,
        is_steady=True,
    ),
    Measurement("ops", "set", f"{_SOME} SET in flight each", "SET", "rate", operations.Sets, is_steady=True),
    Measurement("ops", "add", f"{_SOME} ADD in flight each", "ADD", "rate", operations.Adds, is_steady=True),
    Measurement(
        "ops",
        "one-get",
        f"{_ONE} GET at a time",
        "GET",
        "time",
        operations.OneGet,
        seconds=0.4,
        is_steady=True,
    ),
    Measurement(
        "ops",
        "one-set",
        f"{_ONE} SET at a time",
        "SET",
        "time",
        operations.OneSet,
        seconds=0.4,
        is_steady=True,
    ),
    Measurement(
        "ops",
        "one-add",
        f"{_ONE} ADD at a time",
        "ADD",
        "time",
        operations.OneAdd,
        seconds=0.4,
        is_steady=True,
    ),
    Measurement(
        "accept",
        "accept",
        f"{_NEW} with one GET in flight",
        "new client",
        "time",
        arriving.Accepts,
        unfit=_BEHIND,
        connections=BUSY_CLIENTS + NEW_CLIENTS,
        rounds=15,  # short ones, that differ so much that a median needs more of them
        quick_rounds=3,
    ),
    Measurement(
        "accept",
        "accept-pipelined",
        f"{_NEW} with {BUSY_PIPELINED} GETs in flight",
        "new client",
        "time",
        arriving.AcceptsBesidePipelining,
        unfit=_BEHIND,
        connections=BUSY_CLIENTS + NEW_CLIENTS,
        rounds=3,
        quick_rounds=1,
        seconds=5.0,
    ),
    Measurement(
        "accept",
        "connect-storm",
        f"{STORM_CLIENTS:,} clients connect at once",
        "connection",
        "time",
        arriving.Storm,
        unfit=_BEHIND,
        connections=STORM_CLIENTS,
        quick_rounds=1,
        seconds=2.0,
    ),
    Measurement(
        "bulk",
        "multi-get",
        f"one request for {_KEYS}",
        "request",
        "time",
        bulk.MultiGet,
        rounds=3,
        quick_rounds=1,
        seconds=2.0,
    ),
    Measurement(
        "bulk",
        "multi-set",
        f"one request with {_KEYS}",
        "request",
        "time",
        bulk.MultiSet,
        rounds=3,
        quick_rounds=1,
        seconds=3.0,
    ),
    Measurement(
        "wakeup",
        "cancel",
        f"a wait is given up beside a wait for {_KEYS}",
        "cancel",
        "time",
        waiting.Cancels,
        unfit={REDIS: "it has no such thing"},
        is_steady=True,
    ),
)
