"""What ranks are doing: stacks read, folded, put together and said. Pure."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.cli import run
from rallypoint.client import tcp
from rallypoint.frames import Frame
from rallypoint.launch.stacks.activity import (
    MOST_PACKED,
    Child,
    MachineActivity,
    ProcessFacts,
    RankActivity,
    pack,
    unpack,
)
from rallypoint.launch.stacks.frames import fold, is_complete, read_dump
from rallypoint.launch.stacks.progress import Movement, Pace, only, put_together
from rallypoint.launch.stacks.words import summary_lines
from rallypoint.launch.template import fresh_process

PACKAGES = "/opt/env/lib/python3.11/site-packages"
ALL_REDUCE = (
    Frame(f"{PACKAGES}/torch/distributed/distributed_c10d.py", 3252, "all_reduce"),
    Frame(f"{PACKAGES}/torch/distributed/c10d_logger.py", 83, "wrapper"),
    Frame("/home/me/train.py", 41, "train"),
    Frame("/home/me/train.py", 60, "<module>"),
)
LOADING = (
    Frame("/home/me/data.py", 88, "load_batch"),
    Frame("/home/me/train.py", 33, "train"),
    Frame("/home/me/train.py", 60, "<module>"),
)


class TestReading:
    def test_what_faulthandler_writes_is_read_back(self) -> None:
        def wait_here() -> None:
            gate.wait()

        gate = threading.Event()
        thread = threading.Thread(target=wait_here)
        thread.start()
        try:
            with tempfile.TemporaryFile("w+") as file:
                faulthandler.dump_traceback(file, all_threads=True)
                file.seek(0)
                text = file.read()
        finally:
            gate.set()
            thread.join()
        dump = read_dump(text)
        assert dump is not None
        assert dump.stack[0].function == "test_what_faulthandler_writes_is_read_back"
        assert dump.stack[0].file == __file__
        assert any(frame.function == "wait_here" for stack in dump.others for frame in stack)

    def test_the_main_thread_is_the_last_and_a_helper_that_writes_is_left_out(self) -> None:
        frame = '  File "a.py", line 1 in f\n'
        helper = f"Current thread 0x2 (most recent call first):\n{frame}\n"
        other = f"Thread 0x1 [other] (most recent call first):\n{frame}\n"
        main = 'Thread 0x00a3 (most recent call first):\n  File "b.py", line 2 in g\n'
        dump = read_dump(other + helper + main)
        assert dump is not None
        assert dump.stack == (Frame("b.py", 2, "g"),)
        assert dump.others == ((Frame("a.py", 1, "f"),),)
        assert dump.idents == (1, 0xA3)
        dump = read_dump(other + main.replace("Thread", "Current thread"))
        assert dump is not None
        assert dump.stack == (Frame("b.py", 2, "g"),)

    def test_of_more_threads_than_are_written_the_main_one_is_not_known(self) -> None:
        head = "Thread 0x1 (most recent call first):\n"
        assert read_dump(f'{head}  File "a.py", line 1 in f\n  ...\n') is not None
        assert read_dump(f"{head * 100}...\n") is None

    @pytest.mark.parametrize(
        ("written", "meant"),
        [
            (r"caf\xe9.py", "café.py"),
            (r"\u65e5\U0001f600", "日😀"),
            (r"a\x41b", r"a\x41b"),
            (r"a\x1b[31m", "a\x1b[31m"),
        ],
    )
    def test_escapes_are_undone_where_faulthandler_makes_them(self, written: str, meant: str) -> None:
        dump = read_dump(f'Stack (most recent call first):\n  File "{written}", line 3 in {written}\n')
        assert dump is not None
        assert dump.stack == (Frame(meant, 3, meant),)
        unknown = read_dump("Stack (most recent call first):\n  File ???, line ??? in ???\n")
        assert unknown is not None
        assert unknown.stack == (Frame("", 0, "???"),)

    def test_a_dump_is_complete_when_the_outermost_frame_is_there(self) -> None:
        text = (
            'Stack (most recent call first):\n  File "a.py", line 1 in f\n  File "a.py", line 9 in <module>\n'
        )
        assert is_complete(text)
        assert not any(is_complete(text[:end]) for end in range(len(text)))

    @given(st.text())
    def test_whatever_is_written_is_no_error(self, text: str) -> None:
        read_dump(text)
        read_dump(f"Stack (most recent call first):\n{text}")


class TestFolding:
    def test_torchs_frames_fold_to_the_collective(self) -> None:
        doing = fold(ALL_REDUCE)
        assert (doing.call, doing.waits) == ("all_reduce", True)
        assert [each.line for each in doing.own] == [41, 60]

    def test_a_collective_deep_in_another_package_is_named(self) -> None:
        through = (*ALL_REDUCE[:2], Frame(f"{PACKAGES}/accelerate/utils/operations.py", 9, "reduce"))
        assert fold((*through, *ALL_REDUCE[2:])) == fold(ALL_REDUCE)

    @pytest.mark.parametrize(
        ("file", "function", "call", "waits"),
        [
            (
                f"{PACKAGES}/torch/utils/data/dataloader.py",
                "__next__",
                "torch.utils.data.dataloader.__next__",
                False,
            ),
            (f"{PACKAGES}/torch/_tensor.py", "backward", "torch._tensor.backward", True),
            ("/usr/lib/python3.11/threading.py", "wait", "threading.wait", False),
            (f"{PACKAGES}/rallypoint/client/tcp.py", "wait", "rallypoint.client.tcp.wait", True),
            (tcp.__file__, "wait", "tcp.wait", True),
            ("/usr/lib/python3.11/multiprocessing/__init__.py", "get", "multiprocessing.get", False),
            (
                r"C:\env\Lib\site-packages\torch\cuda\__init__.py",
                "synchronize",
                "torch.cuda.synchronize",
                True,
            ),
        ],
    )
    def test_other_calls_are_named_by_their_module(
        self, file: str, function: str, call: str, waits: bool
    ) -> None:
        doing = fold((Frame(file, 5, function), *LOADING))
        assert (doing.call, doing.waits, doing.own) == (call, waits, LOADING)

    def test_own_code_is_in_no_call_and_what_has_started_it_is_not_own(self) -> None:
        assert fold(LOADING).call == ""
        for file in (fresh_process.__file__, run.__file__, "/work/rallypoint/__main__.py"):
            assert fold((*LOADING, Frame(file, 249, "_run"))) == fold(LOADING), file


def machine(host: str, *ranks: RankActivity) -> MachineActivity:
    return MachineActivity(host, ranks)


def waiting(rank: int, seconds: float = 252.0) -> RankActivity:
    return RankActivity(rank, 100 + rank, ALL_REDUCE, seconds, step=1204)


ODD = RankActivity(2, 102, LOADING, 252.0, facts=ProcessFacts("sleeps", "read() of /mnt/data/shard-17.tar"))
COMPUTING = replace(ODD, facts=ProcessFacts("runs", cores=0.98))


class TestWords:
    def test_one_that_has_ended_is_the_oddest(self) -> None:
        ended = replace(ODD, rank=1, ended="its process is gone")
        lines = summary_lines(put_together([machine("a", waiting(0), ended, ODD, waiting(3))]))
        assert lines[0].endswith("2 ranks are elsewhere:")
        assert lines[1].startswith("  rank 1 on a has ended (its process is gone): last seen in load_batch")
        assert lines[2].startswith("  rank 2 on a: load_batch (data.py:88)")

    def test_all_at_the_same_place(self) -> None:
        [line] = summary_lines(put_together([machine("a", waiting(0), waiting(1))]))
        assert line.startswith("all 2 ranks wait in all_reduce (train.py:41, step 1,204)")
        assert "do sizes or order differ" in line

    def test_ranks_of_which_nobody_tells(self) -> None:
        silent = replace(machine("a", waiting(0), waiting(1)), world_size=4)
        [line] = summary_lines(put_together([silent]))
        assert line.endswith("; nothing is known of ranks 2 and 3")
        assert summary_lines(put_together([silent, machine("b", ODD)]))[-1] == "nothing is known of rank 3"

    def test_ranks_that_are_not_asked_for_are_not_missed(self) -> None:
        told = replace(machine("a", waiting(0), waiting(1), ODD), world_size=4)
        work = put_together(only([told], [range(1, 3)]))
        assert [each.ranks for each in work.groups] == [[2], [1]]
        assert work.unknown == ()

    def test_many_ranks_stay_readable_and_quick(self) -> None:
        """Each rank takes as long among many as among few."""

        def tell(count: int) -> tuple[list[str], float]:
            machines = []
            for number in range(count):
                ranks = [waiting(8 * number + local) for local in range(8)]
                if number % 512 == 5:
                    ranks[3] = replace(ODD, rank=8 * number + 3)
                machines.append(machine(f"node-{number}", *ranks))
            packed = [pack(each) for each in machines]
            began = time.process_time()
            told = [unpack(each) for each in packed]
            lines = summary_lines(put_together([each for each in told if each is not None]))
            return lines, time.process_time() - began

        few = min(tell(256)[1] for _ in range(5))
        lines, seconds = tell(2048)
        assert lines[0].startswith("16,380 of 16,384 ranks wait in all_reduce")
        assert lines[0].endswith("ranks 43, 4139, 8235 and 12331 are elsewhere:")
        assert len(lines) == 2
        assert min(seconds, tell(2048)[1]) < 3 * 8 * few


class TestStalls:
    @pytest.mark.parametrize(
        ("other", "idle"),
        [
            (replace(ODD, idle_seconds=250.0), 250.0),  # it reads a file
            (replace(ODD, still_seconds=0.0, idle_seconds=250.0), 250.0),  # it polls
            (replace(ODD, still_seconds=250.0, idle_seconds=1.8), 1.8),  # it computes, or moves data
            (replace(ODD, still_seconds=1.8, idle_seconds=1.8), 1.8),  # it came here just now
            (replace(ODD, still_seconds=250.0, idle_seconds=-1.0), 250.0),  # its launcher is an older one
            (replace(ODD, ended="gone"), 252.0),
        ],
    )
    def test_the_job_has_made_no_progress_since_its_last_rank_has(
        self, other: RankActivity, idle: float
    ) -> None:
        work = put_together([machine("a", replace(waiting(0), idle_seconds=0.0), other)])
        assert work.idle_seconds == idle
        assert work.is_stalled(200) == (idle >= 200)
        assert not work.is_stalled(300)
        assert work.waiting_seconds == 252, "it is enough when a time-out is near"

    @pytest.mark.parametrize(
        ("ranks", "is_stalled"),
        [
            ((waiting(0), waiting(1, 1.8)), False),
            ((ODD,), False),  # a server that is idle
            ((ODD, replace(ODD, rank=3)), True),
            ((COMPUTING, replace(COMPUTING, rank=3)), False),
            ((replace(waiting(0), ended="gone"),), False),
        ],
    )
    def test_several_ranks_stand_still_or_one_waits(
        self, ranks: tuple[RankActivity, ...], is_stalled: bool
    ) -> None:
        assert put_together([machine("a", *ranks)]).is_stalled(200) == is_stalled

    def test_a_rank_that_waits_for_a_key_is_no_odd_one(self) -> None:
        facts = ProcessFacts("sleeps", "poll() of a connection to 127.0.0.1 port 40213")
        polling = RankActivity(1, 101, LOADING[1:], 252.0, facts=facts)
        sleeping = RankActivity(0, 100, LOADING, 252.0, facts=ProcessFacts("sleeps", "sleep()"))
        work = put_together([machine("a", sleeping, polling)], {1: "go"})
        assert summary_lines(work) == [
            "1 of 2 ranks waits in store.wait() for `go` (train.py:33), for 4 min 12 s; rank 0 on a is "
            "elsewhere:",
            "  load_batch (data.py:88) <- train (train.py:33), for 4 min 12 s: sleep()",
        ]
        assert work.is_stalled(200)
        both = put_together([machine("a", sleeping, polling)], {0: "come", 1: "go"})
        assert [each.ranks for each in both.groups if each.doing.waits] == [[1]], "its main thread sleeps"

    def test_who_owes_a_key_comes_first_of_those_that_are_elsewhere(self) -> None:
        others = [replace(ODD, rank=rank, stack=LOADING[rank - 2 :]) for rank in (2, 3)]
        awaited = {0: "default_pg/0//cpu//0/3"}
        work = put_together([machine("a", waiting(0), *others)], awaited)
        assert [each.ranks for each in work.odd] == [[3], [2]]


class TestMovement:
    @pytest.mark.parametrize(
        ("seen", "still", "idle"),
        [
            ({}, 90.0, 90.0),
            ({"wakes": -1}, 90.0, 90.0),  # the system does not count: the stack alone tells
            ({"wakes": 1000}, 0.0, 90.0),  # it polls
            ({"computes": 1}, 90.0, 30.0),  # or loops: a third of the time that it has been there counts
            ({"step": 1}, 0.0, 0.0),
            ({"stack": 1}, 0.0, 0.0),
            ({"moved": 1}, 0.0, 0.0),
        ],
    )
    def test_what_counts_as_a_move_and_as_progress(
        self, seen: dict[str, float], still: float, idle: float
    ) -> None:
        rank = Movement(0.0)
        rank.note(0, ALL_REDUCE, 0, 0)
        for at in range(1, 10):
            if "moved" in seen:
                rank.advance(10.0 * at)
            rank.note(
                10.0 * at,
                LOADING[at % 2 :] if "stack" in seen else ALL_REDUCE,
                wakes=int(at * seen.get("wakes", 1)),
                step=int(at * seen.get("step", 0)),
                computes="computes" in seen,
            )
        assert (rank.still_seconds(90.0), rank.idle_seconds(90.0)) == (still, idle)

    def test_steps_per_second(self) -> None:
        rank = Movement(0.0)
        for now in range(5):
            rank.note(10.0 * now, ALL_REDUCE, -1, 20 * now)
        assert rank.steps_per_second == 2.0
        rank.note(50.0, ALL_REDUCE, -1, 0)  # it has begun again
        assert rank.steps_per_second == -1.0


_frames = st.builds(Frame, st.text(max_size=20), st.integers(0, 10**6), st.text(max_size=20))
_stacks = st.lists(_frames, max_size=5).map(tuple)
_ranks = st.builds(
    RankActivity,
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    _stacks,
    ended=st.text(max_size=20),
    threads=st.lists(_stacks, max_size=3).map(tuple),
    children=st.lists(st.builds(Child, st.integers(1, 9), _stacks), max_size=3).map(tuple),
)


class TestPacking:
    @given(st.builds(MachineActivity, st.text(max_size=20), st.lists(_ranks, max_size=4).map(tuple)))
    def test_what_is_packed_is_unpacked(self, told: MachineActivity) -> None:
        text = pack(told)
        assert text.isascii()
        assert unpack(text) == told
        summary_lines(put_together([told]))

    @given(st.text() | st.binary().map(lambda data: pack(MachineActivity("a", ()))[:-1] + data.hex()))
    def test_what_is_none_is_none(self, text: str) -> None:
        assert unpack(text) is None or isinstance(unpack(text), MachineActivity)

    def test_a_machine_with_much_to_tell_tells_less(self) -> None:
        def deep(rank: int) -> RankActivity:
            stacks = [
                tuple(Frame(f"/{rank}/{at}/{n * 7919}.py", n, f"f{n * rank}") for n in range(100))
                for at in range(9)
            ]
            return RankActivity(rank, 1, stacks[0], threads=tuple(stacks[1:]))

        text = pack(machine("a", *map(deep, range(64))))
        assert len(text) <= MOST_PACKED
        told = unpack(text)
        assert told is not None
        assert len(told.ranks) == 64

    def test_a_bomb_is_not_unpacked(self) -> None:
        import base64
        import zlib

        assert unpack(base64.b64encode(zlib.compress(b" " * (64 << 20))).decode()) is None


class TestPace:
    def test_looks_come_every_ten_seconds_and_sooner_where_patience_is_short(self) -> None:
        assert (Pace(180).waiting, Pace(180).every, Pace(180).family_after) == (180, 10, 30)
        assert (Pace(8).waiting, Pace(8).every, Pace(8).family_after) == (8, 1, 4)
        assert Pace(1).every == 0.5

    def test_a_time_out_may_not_strike_before_it_is_said(self) -> None:
        assert Pace(180, timeout=600).waiting == 180
        for seconds in (5, 12, 30, 200):
            pace = Pace(180, timeout=seconds)
            # It is known up to a look later that a rank waits, and said after a few looks in a row.
            assert pace.waiting == pace.before_timeout
            assert pace.waiting + pace.every + 0.5 < seconds

    def test_who_waits_for_one_that_has_ended_has_half_a_minute(self) -> None:
        pace = Pace(180, timeout=600, has_ended=True)
        assert (pace.waiting, pace.urgent, pace.before_timeout) == (30, 30, 450)
        assert Pace(20, has_ended=True).waiting == 20
