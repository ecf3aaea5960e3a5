"""The preface: both ends prove the secret, or nothing is said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import AccessError
from rallypoint.store.wire.preface import NONCE_BYTES, ClientPreface, Right, ServerPreface, key_for

pytestmark = pytest.mark.windows

_SECRET, _OTHER = b"s" * 32, b"o" * 32
_CERTIFICATE = b"c" * 32


def _server(secret: bytes = _SECRET, nonce: bytes = b"S" * NONCE_BYTES) -> ServerPreface:
    return ServerPreface({right: key_for(right, secret) for right in Right}, _CERTIFICATE, nonce)


def _client(
    secret: bytes = _SECRET, right: Right = Right.ALL, certificate: bytes = _CERTIFICATE, nonce: bytes = b"C"
) -> ClientPreface:
    return ClientPreface(right, key_for(right, secret), certificate, nonce * NONCE_BYTES)


def _talk(client: ClientPreface, server: ServerPreface, change: Any = lambda _, data: data) -> list[bytes]:
    """Let both talk to their end; `change` sees each message, with its number. The messages."""
    said = [change(0, client.begin())]
    speaker: Any = server
    while said[-1]:
        answer, rest = speaker.receive(said[-1])
        assert not rest
        said.append(change(len(said), answer))
        speaker = client if speaker is server else server
    return said


@given(st.sampled_from(list(Right)), st.lists(st.integers(1, 40), max_size=12), st.binary(max_size=8))
def test_both_prove_the_same_secret_however_it_is_split(right: Right, cuts: list[int], behind: bytes) -> None:
    client, server = _client(right=right), _server()

    def in_pieces(data: bytes) -> list[bytes]:
        pieces = []
        for cut in cuts:
            pieces.append(data[:cut])
            data = data[cut:]
        return [piece for piece in (*pieces, data) if piece]

    def pass_on(to: Any, data: bytes) -> tuple[bytes, bytes]:
        answers, rests = zip(*(to.receive(piece) for piece in in_pieces(data)), strict=True)
        return b"".join(answers), b"".join(rests)

    proof, _ = pass_on(server, client.begin())
    answer, _ = pass_on(client, proof)
    pass_on(server, answer[:-1])
    welcome, rest = server.receive(answer[-1:] + behind)
    assert rest == behind
    assert client.receive(welcome + behind) == (b"", behind)
    assert client.is_done
    assert server.right is right


@given(st.integers(0, 3), st.data())
def test_a_changed_bit_is_never_accepted(number: int, data: st.DataObject) -> None:
    """Whatever somebody in between changes in one message: nobody is let in by both ends."""
    client, server = _client(), _server()

    def change(index: int, message: bytes) -> bytes:
        if index != number or not message:
            return message
        place = data.draw(st.integers(0, 8 * len(message) - 1))
        return bytes(byte ^ (1 << place % 8 if at == place // 8 else 0) for at, byte in enumerate(message))

    try:
        _talk(client, server, change)
    except AccessError:
        assert not client.is_done
        return
    assert not client.is_done  # it waits for more


@pytest.mark.parametrize(
    ("client", "told"),
    [
        (_client(_OTHER), "another secret"),
        (_client(certificate=b"m" * 32), "somebody is in between"),
        (ClientPreface(Right.ALL, key_for(Right.LOOK, _SECRET), _CERTIFICATE, b"C" * NONCE_BYTES), "another"),
    ],
    ids=["other-secret", "other-certificate", "a token asks for all"],
)
def test_both_ends_say_why(client: ClientPreface, told: str) -> None:
    server = _server()
    proof, _ = server.receive(client.begin())
    with pytest.raises(AccessError, match="does not prove") as refused:
        client.receive(proof)
    with pytest.raises(AccessError, match=told):
        server.receive(refused.value.replies)
    assert not client.is_done
    assert server.right is None


def test_a_replayed_preface_is_refused() -> None:
    first, server = _client(), _server()
    said = _talk(first, server)
    again = _server(nonce=b"N" * NONCE_BYTES)
    again.receive(said[0])
    with pytest.raises(AccessError, match="does not prove"):
        again.receive(said[2])
    assert again.right is None


def test_a_client_that_lies_about_the_proof_is_refused() -> None:
    """A client that takes any server's proof for good has none of its own."""
    server = _server()
    server.receive(_client(_OTHER).begin())
    with pytest.raises(AccessError, match="does not prove"):
        server.receive(b"\x01" + b"p" * 32)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"rallypoint 2\n", b"rallypoint 1\nx" + b"n" * 32])
def test_what_is_no_preface_is_refused(data: bytes) -> None:
    with pytest.raises(AccessError):
        _server().receive(data)


@given(st.lists(st.binary(max_size=120), max_size=6))
def test_whatever_comes_nobody_is_let_in(pieces: list[bytes]) -> None:
    for end in (_server(), _client()):
        try:
            for piece in pieces:
                end.receive(piece)
        except AccessError:
            pass
        assert not end.is_done


def test_a_proof_that_comes_with_the_greeting_is_refused_at_once() -> None:
    """It cannot be right, as it was made before the server's nonce was known."""
    with pytest.raises(AccessError, match="does not prove"):
        _server().receive(_client().begin() + b"\x01" + b"p" * 32)
