"""Sessions at a server: every request once, whatever breaks, and who counts while it is away."""

from __future__ import annotations

import pytest

from ends import (
    BEAT,
    BYE,
    CALLED,
    DONE,
    PRESENT,
    REFUSED,
    SIGN_OF_LIFE,
    TOKEN,
    UNCHANGED,
    Desk,
    Played,
    arrive,
    batch,
    blob,
    end_of_wait,
    frame,
    i64,
    leave,
    pop_called,
    read_frames,
    recall,
    session,
    wait_in_turn,
)
from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.core.context import Close
from rallypoint.store.core.store import Core
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.wire.encoding import counted_request, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.sessions import ASK, FrameReader
from test_core import add, barrier, get, push, set_, wait

pytestmark = pytest.mark.windows

ANNOUNCED = b"rallypoint/sessions/3"
OTHER_TOKEN = bytes(16)
PING = request(Op.PING, tail=b"ping")


@pytest.fixture
def desk() -> Desk:
    return Desk(Core())


# The announcement


@pytest.mark.parametrize("front", [Core(), RelayCore(TOKEN)], ids=["server", "relay"])
def test_sessions_are_announced_by_a_key_that_is_there(front: Core | RelayCore) -> None:
    (client,) = Desk(front).open()
    assert client.ask(ASK) == b"\x00"


def test_the_announcement_is_not_stored_and_counts_only_by_itself(desk: Desk) -> None:
    (client,) = desk.open()
    relay = Played(desk)
    client.ask(set_(b"k"))
    assert client.ask(counted_request(Op.CHECK, [b"k", ANNOUNCED])) == b"\x01"
    assert client.ask(counted_request(Op.CHECK, [ANNOUNCED, ANNOUNCED])) == b"\x01"
    assert client.ask(request(Op.GETNUMKEYS)) == i64(1)
    assert client.ask(request(Op.LIST_KEYS)) == i64(1) + blob(b"k")
    assert client.ask(get(ANNOUNCED)) == blob(b"")
    assert relay.send(ASK) == [(0, DONE, b"\x00")]


# Which store, and whether it is alive


@pytest.mark.parametrize("front", [Core(), RelayCore(TOKEN)], ids=["server", "relay"])
def test_what_stands_behind_the_name_of_another_store_is_not_for_this_one(front: Core | RelayCore) -> None:
    right, other = Desk(front).open(2)
    assert right.ask(b"\x31" + blob(b"") + PING) == b"ping"
    assert other.ask(PING + b"\x31" + blob(b"job/7") + PING) == b"ping"
    assert other.error is not None
    assert "there is no store named b'job/7' here" in other.error.message


@pytest.mark.parametrize("front", [Core(), RelayCore(TOKEN)], ids=["server", "relay"])
def test_a_beat_is_answered_between_frames_and_is_none(front: Core | RelayCore) -> None:
    (end,) = Desk(front).open()
    told = end.ask(session() + BEAT + batch(1, 0, ASK) + BEAT + BEAT)
    frames = frame(1, 1, (0, DONE, b"\x00"))
    assert told[25:] == SIGN_OF_LIFE + frames + 2 * SIGN_OF_LIFE
    for size in (1, 7, 8, 9, len(told)):
        reader = FrameReader()
        pieces = [told[25 + start : 25 + start + size] for start in range(0, len(told) - 25, size)]
        assert [each for piece in pieces for each in reader.feed(piece)] == [frames[8:]]


# Opening, taking up, ending


def test_the_welcome_tells_what_is_granted_taken_and_taken_at_most() -> None:
    desk = Desk(Core(Limits(session_seconds=2.5, request_bytes=5_000)))
    (end,) = desk.open()
    assert end.ask(session(keep=10_000)) == b"\x00" + i64(2_500) + i64(0) + i64(5_000)
    end.send(batch(1, 0) + batch(2, 0))
    end.close()
    (end,) = desk.open()
    assert end.ask(session(keep=700, known=True)) == b"\x01" + i64(700) + i64(2) + i64(5_000)


def test_a_session_that_should_be_known_and_is_not_is_not_begun_anew(desk: Desk) -> None:
    (end,) = desk.open()
    assert end.ask(session(known=True)) == b"\x02" + bytes(24)
    assert not len(desk.front.sessions)
    end.send(batch(1, 0, set_(b"k")))
    assert end.error is not None


@pytest.mark.parametrize(
    "sent",
    [
        session() + session(OTHER_TOKEN),
        session(TOKEN[:15]),
        session(TOKEN + b"x"),
        session(b""),
        session(taken=1),
        session() + batch(2, 0),
        session() + batch(1, 0) + batch(1, 0),
        session() + batch(0, 0),
        session() + batch(1, 1),
        session() + b"\x21" + blob(bytes(15)),
        session() + batch(1, 0)[:-16] + b"\x21" + blob(bytes(16) + bytes(7)),
        session() + BYE + batch(1, 0),
        session() + BYE + BYE,
        batch(1, 0),
        PRESENT,
        BYE,
        arrive(b"b", 2, 1),
        leave(0),
        wait_in_turn(b"k"),
        recall(b"k"),
        pop_called(b"q", 0),
    ],
)
def test_what_breaks_the_rules_of_sessions_closes_the_connection(desk: Desk, sent: bytes) -> None:
    (offender, other) = desk.open(2)
    offender.send(sent)
    assert offender.error is not None
    assert other.ask(request(Op.GETNUMKEYS)) == i64(0)


def test_there_are_no_more_sessions_than_connections() -> None:
    desk = Desk(Core(Limits(connections=2)))
    for token in (TOKEN, OTHER_TOKEN):
        relay = Played(desk, token)
        relay.lose()
    (end,) = desk.open()
    end.send(session(b"x" * 16))
    assert isinstance(end.error, LimitError)
    assert relay.open().answer == 1


def test_a_request_that_is_none_is_refused_alone(desk: Desk) -> None:
    relay = Played(desk)
    broken = [
        b"",
        b"\xff",
        bytes([Op.VALIDATE]) + bytes(4),
        request(Op.CANCEL_WAIT),
        request(Op.PING, tail=b"ping"),
        barrier(b"b", 1),
        session(OTHER_TOKEN),
        batch(2, 0),
        PRESENT,
        set_(b"k", b"v")[:-1],
        get(b"k") + b"x",
        get(b"k") + get(b"k"),
        b"\x05\x01",
        b"\x05" + i64(1),
        b"\x03" + b"\xff" * 8,
        add(b"k", 1)[:-1],
    ]
    answers = relay.send(set_(b"k", b"old"), *broken, get(b"k"))
    assert [status for _, status, _ in answers] == [DONE, *[REFUSED] * len(broken), DONE]
    assert [tag for tag, _, _ in answers] == list(range(len(broken) + 2))
    assert answers[-1][2] == blob(b"old")
    assert all(content for _, status, content in answers if status == REFUSED)


def test_a_request_that_breaks_a_limit_is_refused_alone() -> None:
    desk = Desk(Core(Limits(key_bytes=20, value_bytes=300, keys_per_request=2, stored_bytes=1_000)))
    relay = Played(desk)
    sent = [
        (set_(b"k" * 21), b"key_bytes"),
        (get(b"k" * 21), b"key_bytes"),
        (set_(b"k", b"v" * 301), b"value_bytes"),
        (counted_request(Op.CHECK, [b"a", b"b", b"c"]), b"keys_per_request"),
        (wait(b"a", b"b", b"c"), b"keys_per_request"),
        (arrive(b"b", 2, 0), b"ARRIVE"),
        (arrive(b"b", 2, 1 << 60), b"ARRIVE"),
        (add(b"word", 1), b"no number"),
    ]
    answers = relay.send(set_(b"word", b"twelve"), *[each for each, _ in sent], get(b"word"))
    assert answers[0] == (0, DONE, b"")
    assert answers[-1] == (len(sent) + 1, DONE, blob(b"twelve"))
    for (_, status, content), (_, why) in zip(answers[1:-1], sent, strict=True):
        assert status == REFUSED
        assert why in content


# Every request once, every frame until it is taken


def test_frames_are_kept_until_they_are_taken_and_sent_again_as_they_were(desk: Desk) -> None:
    (end,) = desk.open()
    end.ask(session())
    first = end.ask(batch(1, 0, add(b"n", 1)))
    second = end.ask(batch(2, 0, add(b"n", 1)))
    third = end.ask(batch(3, 1, add(b"n", 1)))
    end.close()
    (end,) = desk.open()
    assert end.ask(session(known=True, taken=1))[25:] == second + third
    end.close()
    (end,) = desk.open()
    assert end.ask(session(known=True, taken=3))[25:] == b""
    assert [read_frames(each)[0].items for each in (first, second, third)] == [
        [(number, DONE, i64(number + 1))] for number in range(3)
    ]


def test_a_batch_that_is_sent_again_is_carried_out_once_though_its_taken_is_old(desk: Desk) -> None:
    (end,) = desk.open()
    end.ask(session())
    end.ask(batch(1, 0, add(b"n", 1)))
    end.ask(batch(2, 1, add(b"n", 1)))
    end.close()
    (end,) = desk.open()
    # It has got both frames, but its third batch says what was so when it was first sent.
    assert end.ask(session(known=True, taken=2)) == b"\x01" + i64(60_000) + i64(2) + i64(64 << 20)
    (answer,) = read_frames(end.ask(batch(3, 0, add(b"n", 1))))
    assert answer == (3, 3, [(2, DONE, i64(3))])


@pytest.mark.parametrize("taken", [0, 3, 2**64 - 1])
def test_frames_that_were_let_go_or_never_sent_cannot_be_asked_for(desk: Desk, taken: int) -> None:
    relay = Played(desk)
    relay.send(get(b"k"))
    relay.send(get(b"k"))
    relay.send()
    relay.lose()
    (end,) = desk.open()
    if taken:  # a log that has lost what was sent: the relay is told that its session is lost
        assert end.ask(session(known=True, taken=taken)) == b"\x02" + bytes(24)
    else:
        end.send(session(known=True, taken=taken))
        assert end.error is not None


def test_a_session_taken_up_while_its_connection_seems_alive_goes_on_over_the_new_one(desk: Desk) -> None:
    relay = Played(desk)
    relay.send(add(b"n", 1))
    old = relay.end
    assert relay.open() == (1, 60_000, 1, 64 << 20)
    assert "another connection" in str(old.error)
    relay.present()
    assert relay.send(add(b"n", 1)) == [(1, DONE, i64(2))]


def test_a_session_that_comes_late_with_old_news_displaces_nobody(desk: Desk) -> None:
    relay = Played(desk)
    relay.send(add(b"n", 1))
    relay.send()  # the first frame is taken, and let go
    (late,) = desk.open()
    late.send(session(known=True, taken=0))
    assert late.error is not None
    assert relay.end.error is None
    assert relay.send(add(b"n", 1)) == [(1, DONE, i64(2))]


def test_what_still_comes_over_a_displaced_connection_is_not_carried_out() -> None:
    core = Core()
    old, new = (core.open(name) for name in ("old", "new"))
    for connection in (old, new):
        connection.receive(b"\x00\xce\xf7\x85\x3c")
    old.receive(session() + batch(1, 0, add(b"n", 1)))
    new.receive(session(known=True))
    with pytest.raises(ProtocolError, match="has none"):
        old.receive(batch(2, 0, add(b"n", 10)))
    assert [each.client for each in core.outbox.take_others() if isinstance(each, Close)] == [old]
    core.close(old)
    core.check_invariants()
    assert new.session is not None
    (answer,) = read_frames(new.receive(batch(2, 0, add(b"n", 1))))
    assert answer.items == [(1, DONE, i64(2))]


# Limits and ends


def test_a_session_is_given_up_when_it_has_been_away_for_as_long_as_it_is_kept(desk: Desk) -> None:
    relay = Played(desk)
    (client,) = desk.open()
    relay.lose()
    desk.pass_time(100.0)
    desk.pass_time(159.9)
    assert relay.open().answer == 1
    relay.lose()
    desk.pass_time(200.0)  # its time begins anew
    desk.pass_time(259.9)
    assert len(desk.front.sessions) == 1
    desk.pass_time(260.0)
    assert not len(desk.front.sessions)
    assert relay.open().answer == 2
    assert client.ask(request(Op.GETNUMKEYS)) == i64(0)


@pytest.mark.parametrize("give_up", ["bye", "time"])
def test_a_session_that_ends_takes_along_what_it_waits_for(desk: Desk, give_up: str) -> None:
    relay = Played(desk)
    one, two = desk.open(2)
    relay.send(wait(b"q"), wait(b"k"), arrive(b"b", 2, 1))
    one.send(wait(b"q"))
    two.send(push(b"q"))
    if give_up == "bye":
        relay.end.send(BYE)
    else:
        relay.lose()
        desk.pass_time(0.0)
        desk.pass_time(60.0)
    assert one.take() == b"\x00"  # the call goes on to the next
    assert two.ask(barrier(b"b", 2)) == b""
    assert one.ask(set_(b"k") + barrier(b"b", 2)) == b"\x00"
    assert relay.open().answer == 2


def test_a_relay_that_does_not_tell_what_it_has_taken_is_cut_off_at_the_limit() -> None:
    desk = Desk(Core(Limits(unsent_bytes=10_000)))
    (end,) = desk.open()
    end.send(session() + batch(1, 0, set_(b"k", b"v" * 3_000)))
    for number in range(2, 6):
        end.send(batch(number, 1, get(b"k")))
    assert end.error is None
    end.send(batch(6, 1, add(b"n", 1)))
    assert isinstance(end.error, LimitError)
    assert "unsent_bytes" in end.error.message
    # Nothing of it was carried out; and who tells goes on.
    (end,) = desk.open()
    end.send(session(known=True, taken=5))
    end.take()
    end.send(batch(6, 5, add(b"n", 1)))
    assert read_frames(end.take())[0].items[-1][2] == i64(1)


def test_a_large_answer_that_there_is_no_room_for_is_refused_and_not_remembered() -> None:
    desk = Desk(Core(Limits(unsent_bytes=20_000)))
    relay = Played(desk)
    relay.send(set_(b"k", b"v" * 9_000), set_(b"l", b"w" * 9_000))
    first, second = sorted(relay.send(get(b"k"), get(b"l")))
    assert first[:2] == (2, DONE)
    assert second[:2] == (3, REFUSED)
    assert b"unsent_bytes" in second[2]
    ((_, status, content),) = relay.send(recall(b"l"))
    assert (status, content) == (DONE, blob(b"w" * 9_000))


def test_a_session_that_was_left_in_the_middle_of_a_batch_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(Core())
    (end,) = desk.open()
    end.send(session())
    monkeypatch.setattr(desk.front.engine, "get", None)  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        end.send(batch(1, 0, add(b"n", 1), get(b"k")))
    assert not len(desk.front.sessions)


# What counts while a session is away


def test_arrivals_of_who_is_away_do_not_count_until_it_is_present_again(desk: Desk) -> None:
    relay = Played(desk)
    one, two = desk.open(2)
    assert relay.send(arrive(b"b", 3, 2)) == []
    relay.lose()
    assert one.ask(barrier(b"b", 3)) == b""
    assert two.ask(barrier(b"b", 3)) == b""
    assert relay.open().answer == 1
    assert (one.take(), two.take()) == (b"", b"")
    assert relay.present() == [(0, DONE, i64(1))]
    assert (one.take(), two.take()) == (b"\x00", b"\x00")
    assert one.ask(barrier(b"b", 3) + barrier(b"c", 1)) == b"\x00"
    assert two.ask(barrier(b"b", 3)) == b"\x00"
    assert relay.items() == [(0, DONE, i64(1))]


def test_the_end_of_a_wait_tells_the_last_batch_that_was_taken(desk: Desk) -> None:
    relay = Played(desk)
    (client,) = desk.open()
    relay.send(wait(b"k"))
    relay.send()
    relay.send()
    client.send(set_(b"k"))
    assert relay.items() == [(0, DONE, end_of_wait(3))]
    assert relay.send(wait(b"k")) == [(1, DONE, end_of_wait(4))]


def test_a_push_passes_over_who_is_away_and_calls_it_when_it_is_back(desk: Desk) -> None:
    relay = Played(desk)
    (client,) = desk.open()
    relay.send(wait(b"q"))
    client.send(wait(b"q"))
    relay.lose()
    client.send(push(b"q", b"1"))
    assert client.take() == b"\x00"
    client.send(push(b"q", b"2"))
    assert client.take() == b""
    assert relay.come_back() == [(0, CALLED, end_of_wait(1))]
    assert relay.send(pop_called(b"q", 0)) == [(1, DONE, i64(2) + blob(b"1"))]


# Queues


def test_who_was_passed_over_waits_in_turn_and_is_called_next(desk: Desk) -> None:
    relay = Played(desk)
    (client,) = desk.open()
    client.send(wait(b"q"))
    client.send(push(b"q", b"1"))
    assert relay.send(wait_in_turn(b"q"), wait_in_turn(b"q")) == []
    client.send(push(b"q", b"2"))
    assert relay.items() == [(0, CALLED, end_of_wait(1))]
    assert relay.send(leave(0)) == [(1, CALLED, end_of_wait(2)), (2, DONE, i64(1))]
    assert relay.send(pop_called(b"q", 1)) == [(3, DONE, i64(2) + blob(b"1"))]
    assert relay.send(leave(1)) == [(4, DONE, i64(0))]  # it is over with the pop


@pytest.mark.parametrize("waiting", [wait(b"k"), arrive(b"b", 2, 1)], ids=["wait", "arrival"])
def test_a_pop_in_the_name_of_one_who_still_waits_harms_nobody_else(desk: Desk, waiting: bytes) -> None:
    relay = Played(desk)
    (client,) = desk.open()
    relay.send(waiting, pop_called(b"q", 0))
    assert client.ask(set_(b"k", b"v") + get(b"k")) == blob(b"v")
    client.send(barrier(b"b", 2))
    assert client.error is None


# Barriers


def test_arrivals_of_a_number_are_released_in_their_order_and_in_part(desk: Desk) -> None:
    relay = Played(desk)
    (client,) = desk.open()
    assert relay.send(arrive(b"b", 4, 3)) == []
    assert relay.send(arrive(b"b", 4, 3)) == [(0, DONE, i64(3)), (1, DONE, i64(1))]
    assert client.ask(barrier(b"b", 4)) == b""
    assert relay.send(arrive(b"b", 4, 1)) == [(1, DONE, i64(2)), (2, DONE, i64(1))]
    assert client.take() == b"\x00"


@pytest.mark.parametrize(
    ("size", "weight", "released", "left"), [(2, 7, 6, 1), (3, 3, 3, 0), (1, 5, 5, 0), (-4, 2, 2, 0)]
)
def test_as_many_as_fill_a_barrier_several_times_are_released_at_once(
    desk: Desk, size: int, weight: int, released: int, left: int
) -> None:
    relay = Played(desk)
    assert relay.send(arrive(b"b", size, weight)) == [(0, DONE, i64(released))]
    assert relay.send(leave(0, 99)) == [(1, DONE, i64(left))]


# Values that cross once


LONG = b"v" * 300


def reads(desk: Desk, *requests: bytes) -> list[tuple[int, bytes]]:
    """What a relay that has read a long value at `k` is answered afterwards."""
    relay = Played(desk)
    assert relay.send(set_(b"k", LONG), get(b"k"))[1][2] == blob(LONG)
    return [(status, content) for _, status, content in relay.send(*requests)]


def test_a_value_that_is_the_one_sent_last_is_not_sent_again(desk: Desk) -> None:
    unchanged = (UNCHANGED, b"")
    assert reads(desk, recall(b"k"), recall(b"k"), get(b"k"), recall(b"k")) == [
        unchanged,
        unchanged,
        (DONE, blob(LONG)),
        unchanged,
    ]


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (set_(b"k", b"w" * 300), b"w" * 300),
        (set_(b"k", b"short"), b"short"),
        (request(Op.DELETE_KEY, b"k"), b""),
        (request(Op.COMPARE_SET, b"k", LONG, b"w" * 300), b"w" * 300),
    ],
    ids=["set", "short", "deleted", "compared"],
)
def test_a_value_that_has_changed_is_sent_to_who_recalls_it(desk: Desk, change: bytes, value: bytes) -> None:
    assert reads(desk, change, recall(b"k"))[1] == (DONE, blob(value))


def test_the_last_64_values_are_remembered(desk: Desk) -> None:
    relay = Played(desk)
    keys = [b"k%d" % number for number in range(65)]
    relay.send(*[set_(key, LONG) for key in keys])
    relay.send(*[get(key) for key in keys[:64]])
    statuses = [status for _, status, _ in relay.send(*[recall(key) for key in keys[:64]])]
    assert statuses == [UNCHANGED] * 64
    relay.send(recall(keys[0]), get(keys[64]))
    answers = relay.send(recall(keys[0]), recall(keys[64]), recall(keys[1]))
    assert [status for _, status, _ in answers] == [UNCHANGED, UNCHANGED, DONE]
