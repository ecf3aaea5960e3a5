"""The first cause, told from its consequences: small logs of jobs of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent

import pytest

from explaining import log_of_text, report_of, traceback
from rallypoint.diagnose.explain import Explanation, Log, explain
from rallypoint.diagnose.explain.evidence import Incident
from rallypoint.diagnose.explain.explanation import Verdict
from rallypoint.diagnose.explain.reading import log_of_failure
from rallypoint.diagnose.explain.stamps import complete_stamp
from rallypoint.diagnose.explain.words import as_text, describe_ranks
from rallypoint.launch.reports import Failure, RankIdentity

pytestmark = pytest.mark.windows

_BANANA = "ValueError: the learning rate is a banana"
_CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:9952."
_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."


def _verdict(report: Explanation) -> Verdict:
    assert report.verdict is not None
    return report.verdict


def _title(report: Explanation) -> str:
    return _verdict(report).incident.title if report.verdict is not None else ""


def _order(report: Explanation) -> tuple[str, str]:
    """The first cause, and how it is known to be the first."""
    return _title(report), _verdict(report).order


def _titles(incidents: Sequence[Incident]) -> list[str]:
    return [incident.title for incident in incidents]


# Roles -----------------------------------------------------------------------------------------------------


def test_an_ordinary_log_is_no_failure() -> None:
    report = report_of("step 1 loss 0.5\nvalidation error: 0.25, 0 errors\nerror 0.3\n")
    assert not report.found
    assert report.lines == 3


def test_a_known_cause_is_told_with_its_facts() -> None:
    open_at_first = report_of("EADDRINUSE\nEADDRINUSE on port 29500\n")
    assert _verdict(open_at_first).incident.what == "Another process holds port 29500."
    report = report_of("[E1115 14:36:19.1 socket.cpp:1] [c10d] EADDRINUSE on port 29500\n")
    told = _verdict(report).incident
    assert (told.what, told.do[0]) == ("Another process holds port 29500.", "Use another port than 29500.")
    assert (_verdict(report).sure, _verdict(report).order) == ("certain", "alone")


def test_an_entry_may_want_to_see_something_else_in_the_log() -> None:
    error = "ncclInternalError: Internal check failed\n"
    alone = report_of(error)
    assert (_title(alone), [each.text for each in alone.suspects]) == ("", [error.strip()])
    assert _title(report_of(traceback(error))) == error.strip()  # then it is an exception as any other
    assert _title(report_of(f"{error}a stale id\n")) == "NCCL found the id of an earlier try"
    assert _title(report_of(error, "a stale id\n")) == "NCCL found the id of an earlier try"


def test_consequences_alone_are_told_as_such() -> None:
    report = report_of(traceback(_CLOSED, "[rank0]: "))
    assert _verdict(report).incident.role == "symptom"
    assert _verdict(report).sure == "likely"
    assert "consequence" in _verdict(report).reasons[-1]


def test_a_wrapper_is_told_if_there_is_nothing_else() -> None:
    report = report_of("torch.x.ChildFailedError: \nsomething fatal\n")
    assert _title(report) == "torchrun ended because a rank failed"
    assert _verdict(report).sure == "possible"
    assert [suspect.text for suspect in report.suspects] == ["something fatal"]


def test_what_is_mostly_harmless_is_told_apart() -> None:
    report = report_of("(errno: 97 - Address family not supported by protocol)\nEADDRINUSE\n")
    assert _title(report) == "The port is taken"
    assert _titles(report.notices) == ["IPv6 is off"]
    alone = report_of("(errno: 97 - Address family not supported by protocol)\n")
    assert (alone.verdict, alone.found) == (None, False)
    assert _titles(alone.notices) == ["IPv6 is off"]


# Verdicts --------------------------------------------------------------------------------------------------

_TAKEN, _FULL, _LOST = (
    "The port is taken",
    "The memory of a GPU is full",
    "A connection to another rank was lost",
)
_JOINT = "\nThe above exception was the direct cause of the following exception:\n\n"
_HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
_LACK = "ModuleNotFoundError: No module named 'flash_attn'"
_CLOSED_BY = "Exception: [RayletClient] Raylet connection closed."
_GOES_ON = "using plain attention\nmodel with 7 B parameters\nread 3 shards\nstep 1 loss 0.5\nstep 2 loss 0.4"
_FRAMES = traceback("").rstrip()
_NO_TRAINING = "RuntimeError: no training today"
_NCCL = traceback("torch.DistBackendError: NCCL error in: x.cpp:1\n[rank1]: ncclSystemError: x", "[rank1]: ")


@pytest.mark.parametrize(
    ("logs", "title", "order", "consequences", "others"),
    [
        # The more specific entry is told alone.
        (
            ["EADDRINUSE on port 40000\nEADDRINUSE\n"],
            *("The port is one that the system hands out", "alone", [], []),
        ),
        # A lost connection is no cause, though it came first. Nor is an exception that follows from one.
        ([traceback(_CLOSED, "[rank0]: ") + traceback(_BANANA, "[rank3]: ")], _BANANA, "alone", [_LOST], []),
        (
            [traceback("ConnectionResetError: [Errno 104] reset", "[rank0]: ") + "EADDRINUSE\n"],
            *(_TAKEN, "alone", ["ConnectionResetError: [Errno 104] reset"], []),
        ),
        # Lines of other writers do not break a traceback.
        (
            [f"{_FRAMES}\nstep 1 loss 0.5\nready\nINFO: fine\nEpoch: 3\ntrain.py: fine\n    x\n{_BANANA}"],
            *(_BANANA, "alone", [], []),
        ),
        # A wait for a queue that found nothing says less than what it became.
        (
            [f"{traceback('_queue.Empty')}{_JOINT}{traceback(_CLOSED)}"],
            *(_LOST, "alone", [], []),
        ),
        # The names of exceptions.
        *(
            ([traceback(line)], line, "alone", [], [])
            for line in (
                *("KeyError: 'x'", "socket.timeout: timed out"),
                *("etcd.EtcdKeyNotFound: Key not found : /torch/elastic", "Exception: x"),
                *(
                    "socket.gaierror: [Errno -2] Name or service not known",
                    "torch.distributed.DistStoreError: x",
                ),
            )
        ),
        # Without a message, the code that raised them has to do.
        *(
            ([traceback(name)], f"{name}: step()", "alone", [], [])
            for name in ("StopIteration", "queue.Empty", "AssertionError")
        ),
        # What was to stand in for a module that is missing failed itself, and that is the cause.
        ([f"{traceback(_LACK)}{_HANDLING}{traceback(_BANANA)}"], _BANANA, "alone", [], []),
        # A program that goes on without a module did not need it.
        ([f"{traceback(_LACK)}\n{_GOES_ON}\n{traceback(_BANANA)}"], _BANANA, "alone", [], []),
        # But what somebody has pasted behind it is no program that goes on.
        (
            [
                f"{traceback(_LACK)}\n$ pip list\n"
                + "".join(f"{name}lib 1.2\n" for name in "abcdefghijklmnopq")
            ],
            *(_LACK, "alone", [], []),
        ),
        # A node that is gone comes before those who lost it.
        (
            [f"The node with ID 4127 has been marked dead.\n{traceback(_CLOSED_BY)}"],
            *("The node with ID 4127 has been marked dead.", "alone", [_CLOSED_BY], []),
        ),
        # The last exception of a chain explains it if it is a known cause, but not if it is a wrapper.
        ([f"{traceback(_BANANA)}{_JOINT}{traceback(_MEMORY)}"], _FULL, "alone", [], []),
        (
            [f"{traceback(_BANANA)}{_JOINT}{traceback('x.ChildFailedError: ')}"],
            *(_BANANA, "alone", ["torchrun ended because a rank failed"], []),
        ),
        # Without a joint there is no chain.
        ([traceback(_BANANA) + traceback(_NO_TRAINING)], _BANANA, "lines", [], [_NO_TRAINING]),
        # Lines of others after an exception do not explain it; a later line of its message does.
        *(
            ([f"{traceback(_BANANA)}{line}\n"], _BANANA, "alone", [_LOST], [])
            for line in (
                "[/gloo/pair.cc:9] Connection closed by peer",
                "\nBroken pipe",
                "ERROR:root:Broken pipe",
            )
        ),
        ([f"{_NCCL}[rank1]: Last error: EADDRINUSE on port 1\n"], _TAKEN, "alone", [], []),
        # An empty line ends a message, unless the lines name their writer.
        ([f"{traceback(_BANANA)}\nInvoked with: EADDRINUSE\n"], _BANANA, "lines", [], [_TAKEN]),
        (
            [traceback(_BANANA, "[rank0]: ") + "[rank0]: \n[rank0]: Invoked with: EADDRINUSE\n"],
            *(_TAKEN, "alone", [], []),
        ),
        # A traceback may be indented; the source of a frame is no message.
        (["rallypoint: rank 1 failed\n" + indent(traceback(_BANANA), "  ")], _BANANA, "alone", [], []),
        (
            [f'{_FRAMES}\n    raise ValueError("no EADDRINUSE, no CUDA out of memory")\n{_BANANA}\n'],
            *(_BANANA, "alone", [], []),
        ),
        # Times go before lines. Without times, lines of one log have an order. A later cause may be another.
        (
            [f"2026-11-15 14:36:20,0 - ERROR - EADDRINUSE\n2026-11-15 14:36:10,0 - ERROR - {_MEMORY}\n"],
            *(_FULL, "time", [], [_TAKEN]),
        ),
        ([f"EADDRINUSE\n{_MEMORY}\n[rank0]: Broken pipe\n"], _TAKEN, "lines", [_LOST], [_FULL]),
        (
            ["[E0101 00:00:01.1 x.cpp:1] EADDRINUSE\n[E1231 23:59:58.1 x.cpp:1] CUDA out of memory\n"],
            *(_FULL, "time", [], [_TAKEN]),
        ),
        # Two logs have no order without times, or if only one of them has a zone.
        (
            ["2026-11-15T14:36:10Z EADDRINUSE\n", "2026-11-15 09:36:50 - ERROR - CUDA out of memory\n"],
            *(_TAKEN, "none", [], [_FULL]),
        ),
        ([traceback(_BANANA), "EADDRINUSE\n"], _TAKEN, "none", [], [_BANANA]),
    ],
)
def test_verdicts(
    logs: list[str], title: str, order: str, consequences: list[str], others: list[str]
) -> None:
    report = report_of(*logs)
    assert _order(report) == (title, order)
    assert (_titles(report.consequences), _titles(report.others)) == (consequences, others)


# Tracebacks ------------------------------------------------------------------------------------------------


def test_an_unknown_exception_is_shown_with_its_place_in_the_script() -> None:
    log = """
        [rank3]: Traceback (most recent call last):
        [rank3]:   File "/home/user/train.py", line 9, in <module>
        [rank3]:     main()
        [rank3]:   File "/home/user/train.py", line 5, in main
        [rank3]:     dist.all_reduce(t)
        [rank3]:   File "/opt/lib/python3.11/site-packages/torch/c10d.py", line 83, in wrapper
        [rank3]:     return func(*args, **kwargs)
        [rank3]:            ^^^^^^^^^^^^^^^^^^^^^
        [rank3]: my.module.StrangeError: no
    """
    report = report_of(log)
    told = _verdict(report).incident
    assert told.raised is not None
    assert str(told.raised.place) == "/home/user/train.py, line 5, in main"
    assert (told.title, told.first.line) == ("my.module.StrangeError: no", 9)


def test_tracebacks_of_several_ranks_may_be_mixed() -> None:
    three, five = traceback(_BANANA, "[rank3]: "), traceback("KeyError: 'x'", "[rank5]: ", "other.py")
    pairs = zip(five.splitlines(), three.splitlines(), strict=True)
    report = report_of("\n".join(line for pair in pairs for line in pair))
    assert (*_order(report), _verdict(report).incident.ranks) == ("KeyError: 'x'", "lines", [5])
    assert "other.py" in str(_verdict(report).incident.raised)
    assert [(told.title, told.ranks) for told in report.others] == [(_BANANA, [3])]


@pytest.mark.parametrize(
    "joint",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_the_first_exception_of_a_chain_is_nearest_to_the_cause(joint: str) -> None:
    log = f"{traceback(_BANANA)}\n{joint}\n\n{traceback('RuntimeError: no training today')}"
    report = report_of(log)
    assert _title(report) == _BANANA
    assert "no training today" in str(_verdict(report).incident.became)
    assert report.consequences == report.others == ()


def test_colours_and_progress_bars_are_no_text() -> None:
    report = report_of("\r 10%|#   |\r 20%|##  |\x1b[31mEADDR\x1b[0mINUSE on \x1b[1;36mport 29500\x1b[0m\r\n")
    assert _verdict(report).incident.facts == {"port": "29500"}


# Order -----------------------------------------------------------------------------------------------------


def test_a_traceback_has_the_time_of_the_line_before() -> None:
    early = "2026-11-15 14:36:10 step 1\n" + traceback(_BANANA)
    late = "2026-11-15 14:36:50 step 9\n" + traceback("KeyError: 'x'")
    report = report_of(late, early)
    assert _order(report) == (_BANANA, "clocks")
    assert "clocks of different machines" in _verdict(report).reasons[-1]


def test_clocks_of_two_machines_that_differ_by_little_have_no_order() -> None:
    logs = [f"2026-11-15T14:36:{second}Z EADDRINUSE\n" for second in ("10.0", "11.5")]
    unknown = traceback(_BANANA, "2026-11-15T14:36:09.0Z ")
    report = report_of(unknown, logs[1], logs[0])
    assert _order(report) == ("The port is taken", "none")  # what is known goes first
    assert _verdict(report).sure == "likely"
    assert _titles(report.others) == [_BANANA]


def test_a_log_without_years_beside_one_with_them() -> None:
    """The times of the first mean the year of the second, whenever it is read."""
    first = Log("a.log", [b"[E1115 14:36:50.1 x.cpp:1] EADDRINUSE\n"], host="a", modified=1.9e9)
    second = Log("b.log", [b"2024-11-15 14:36:10.5 - ERROR - CUDA out of memory\n"], host="a", modified=1.9e9)
    report = report_of(first, second)
    assert _order(report) == ("The memory of a GPU is full", "time")


def test_a_log_without_years_is_not_of_the_future() -> None:
    written = 1_794_700_000.0  # in November 2026
    report = report_of(Log("a.log", [b"[E227 14:36:50.1 x.cpp:1] EADDRINUSE\n"], modified=written))
    assert str(_verdict(report).incident.first.time)[:10] == "2026-02-27"


# torchrun --------------------------------------------------------------------------------------------------


def _table(root: int, other: int, exitcode: str) -> str:
    return f"""\
x.ChildFailedError:
Failures:
[1]:
  time      : 2026-11-15_14:41:26
  host      : node-a
  rank      : {other} (local_rank: 0)
  exitcode  : {exitcode} (pid: 1)
  error_file: <N/A>
  traceback : x
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-15_14:41:26
  host      : node-a
  rank      : {root} (local_rank: 1)
  exitcode  : 1 (pid: 2)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org
============================================================
"""


def test_the_table_of_torchrun_is_proof_if_it_had_to_end_the_others() -> None:
    failures = traceback("KeyError: 'x'", "[rank0]: ") + traceback(_BANANA, "[rank1]: ")
    proof = report_of(failures + _table(1, 0, "-15"))
    assert _order(proof) == (_BANANA, "torchrun")
    none = report_of(failures + _table(1, 0, "1"))
    assert _order(none) == ("KeyError: 'x'", "lines")


def test_a_traceback_in_the_table_is_that_of_its_rank() -> None:
    inner = traceback(_BANANA).replace("\n", "\n  ").rstrip()
    report = report_of(_table(5, 0, "-15").replace("To enable traceback see: https://pytorch.org", inner))
    assert (_title(report), _verdict(report).incident.ranks, _verdict(report).incident.hosts) == (
        _BANANA,
        [5],
        ["node-a"],
    )
    assert str(_verdict(report).incident.first.time) == "2026-11-15 14:41:26"


def _end_of_try(rank: int, agent: int = 7) -> str:
    ended = f"failed (exitcode: 1) local_rank: {rank} (pid: 1) of binary: python"
    return f"E1115 14:36:19.1 {agent} torch/x/api.py:869] {ended}\n"


@pytest.mark.parametrize(
    ("text", "headline"),
    [
        ("./job.sh: line 9: SBATCH: command not found\n" + traceback("KeyError: 1"), "KeyError: 1"),
        (traceback("KeyError: 1") + "./job.sh: line 9: SBATCH: command not found\n", "KeyError: 1"),
        (
            "./job.sh: line 9: conda: command not found\n" + traceback("KeyError: 1"),
            "A command is not installed here",
        ),
        (
            "sh: line 1: cmake: command not found\n" + traceback("RuntimeError: cannot build"),
            "A command is not installed here",
        ),
        (
            "Error in call to target 'encoder.Encoder':\nKeyError(\"no such colour\")\nfull_key: encoder\n",
            "KeyError: no such colour",
        ),
        (
            "train.py: error: argument --fp8: ignored explicit argument 'true'\n",
            "train.py: error: argument --fp8: ignored explicit argument 'true'",
        ),
        (
            "ConnectionResetError: [Errno 104] Connection reset by peer\n"
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Segmentation fault.\n",
            "A DataLoader worker ended",
        ),
    ],
)
def test_what_is_told_of_what_stands_side_by_side(text: str, headline: str) -> None:
    assert _title(explain([log_of_text(text)])) == headline


def test_lines_between_those_of_the_table_are_not_of_its_ranks() -> None:
    begin, end = _table(5, 0, "-15").split("------------------------------------------------------------")
    report = report_of(f"{begin}EADDRINUSE\n------\n{end}")
    assert (_title(report), _verdict(report).incident.ranks) == ("The port is taken", [])


def test_a_local_rank_is_no_rank() -> None:
    report = report_of(_end_of_try(1) + _table(9, 8, "-15"))
    assert _verdict(report).incident.ranks == [9]


def test_the_table_itself_is_no_cause() -> None:
    report = report_of("train.py FAILED\n" + _table(1, 0, "-15"))
    assert _title(report) == "torchrun ended because a rank failed"
    assert report.suspects == ()


def test_what_was_said_first_is_quoted_though_it_has_no_time() -> None:
    inner = traceback(_BANANA).replace("\n", "\n  ").rstrip()
    table = _table(1, 0, "-15").replace("To enable traceback see: https://pytorch.org", inner)
    report = report_of(traceback(_BANANA, "[rank1]: ") + table)
    assert _verdict(report).incident.first.line == 4


def test_the_last_try_counts() -> None:
    log = f"EADDRINUSE\n{_end_of_try(0)}{traceback(_BANANA, '[rank1]: ')}{_end_of_try(1)}"
    report = report_of(log)
    assert (_title(report), _verdict(report).attempt, report.attempts) == (_BANANA, 1, 2)
    assert [each.incident.title for each in report.other_tries] == ["The port is taken"]
    assert _titles(report.consequences) == ["torchrun ended because a rank failed"]
    assert report.others == ()


def test_a_last_try_with_consequences_only_leads_to_the_one_before() -> None:
    log = f"{traceback(_BANANA, '[rank1]: ')}{_end_of_try(1)}{traceback(_CLOSED)}{_end_of_try(0)}"
    report = report_of(log)
    assert (_title(report), _verdict(report).attempt, report.attempts) == (_BANANA, 0, 2)
    assert "A connection to another rank was lost" in _titles(report.consequences)


def test_two_agents_that_fail_are_no_two_tries() -> None:
    log = f"{traceback(_BANANA, '[rank1]: ')}{_end_of_try(1, 7)}EADDRINUSE\n{_end_of_try(0, 8)}"
    assert report_of(log).attempts == 1


# Many ------------------------------------------------------------------------------------------------------


def test_very_many_ranks_are_one_finding() -> None:
    log = "".join(f"[rank{rank}]: {_CLOSED}\n" for rank in range(1000) if rank != 7) * 2
    report = report_of(traceback(_BANANA, "[rank7]: ") + log)
    assert _verdict(report).incident.ranks == [7]
    lost = report.consequences[0]
    assert (lost.count, describe_ranks(lost.ranks)) == (1998, "ranks 0 to 6 and 8 to 999")
    assert sum(bool(seen.text) for seen in lost.seen) <= 3
    assert lost.text == _CLOSED


def test_thousands_of_unknown_exceptions_are_bounded() -> None:
    kinds = [f"Error{letter * number}" for number in range(1, 60) for letter in "abcdefghi"]
    report = report_of("".join(traceback(f"{kind}: x") for kind in kinds))
    assert len(report.others) < 250


# Unknown ---------------------------------------------------------------------------------------------------


def test_lines_that_look_like_a_cause() -> None:
    report = report_of("fine\nit is a failure, said 3\n[rank2]: FATAL: the frobnicator failed\nerror: x\n")
    assert (_title(report), _verdict(report).sure) == ("FATAL: the frobnicator failed", "possible")
    assert _verdict(report).incident.ranks == [2]
    assert {each.text for each in report.suspects} == {"it is a failure, said 3", "error: x"}
    assert "this line states an error first" in as_text(report)
    vague = report_of("fine\nit is a failure, said 3\nwarning: retrying, error\n")
    assert (vague.verdict, vague.found) == (None, True)
    assert [each.text for each in vague.suspects] == ["it is a failure, said 3"]


def test_a_line_that_states_an_error_is_a_verdict_if_a_process_is_gone_after_it() -> None:
    first, gone = "ERROR: shard 3 has a bad header", "srun: error: n1: task 0: Exited with exit code 1"
    alone = report_of(f"fine\n{first}\nERROR: cannot go on\n")
    assert alone.verdict is None
    assert [each.text for each in alone.suspects] == [first, "ERROR: cannot go on"]
    assert "What to do about the first" in as_text(alone)
    assert _title(report_of(f"fine\n{first}\n{gone}\n")) == first
    assert _title(report_of(f"fine\n{gone}\n{first}\n")) == gone
    assert _title(report_of(f"fine\n{gone}\nFATAL: the clean-up failed\n")) == gone
    steps = "".join(f"step {number} loss 0.{number}\n" for number in range(10, 40))
    assert _title(report_of(f"{first}\n{steps}{gone}\n")) == gone
    assert report_of("fine\nERROR: a non-fatal error of the preview\n").verdict is None
    report = report_of(f"fine\nerror: command 'g++' failed with exit code 1\n{first}\n{gone}\n")
    assert _title(report) == gone
    assert as_text(report).index(first) < as_text(report).index("What happened")


# What `rallypoint run` knows -------------------------------------------------------------------------------


def _failure(rank: int, time: float, text: str, tries: int = 0) -> Failure:
    kind, _, message = text.partition(": ")
    who = RankIdentity("node-a", 100, rank, rank, 4, local_world_size=4, tries=tries)
    return Failure(who, time, kind, message, traceback(text).strip())


def test_reports_of_failures_are_logs() -> None:
    failures = [_failure(0, 1.5, _MEMORY), _failure(2, 1.25, _BANANA), _failure(1, 1.0, _CLOSED)]
    report = report_of(*map(log_of_failure, failures))
    assert (*_order(report), _verdict(report).incident.ranks) == (_BANANA, "time", [2])
    assert _titles(report.consequences) == ["A connection to another rank was lost"]
    assert _titles(report.others) == ["The memory of a GPU is full"]


def test_a_report_whose_traceback_was_cut_is_read() -> None:
    cut = Failure(
        RankIdentity("a", 1, -1, -1, 1, local_world_size=1, tries=0),
        1.0,
        "ValueError",
        "x",
        "    step()\nValueError: x",
    )
    assert _title(report_of(log_of_failure(cut))) == "ValueError: x"
    assert complete_stamp(1.0) == log_of_failure(cut).stamp
