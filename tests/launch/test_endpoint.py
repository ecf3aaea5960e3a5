"""Endpoints in all the forms in which people write them, and back."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import (
    DEFAULT_PORT,
    STORE_PORT,
    Endpoint,
    parse_endpoint,
    parse_endpoints,
    parse_store,
)

pytestmark = pytest.mark.windows

NAMES = ["node-a", "n", "node_a", "NODE", "4node", "node-0.train.example.org", "node-0.example.org."]
V4_HOSTS = ["10.0.0.1", "0.0.0.0"]
V6_HOSTS = [
    *("::1", "::", "fd00::1", "2001:db8:0:0:0:0:0:1", "FD00::AB", "::ffff:10.0.0.1"),
    *("fe80::1%eth0", "fe80::1%2"),
]


@pytest.mark.parametrize("host", [*NAMES, *V4_HOSTS])
def test_a_name_or_an_ipv4_address(host: str) -> None:
    assert parse_endpoint(host) == Endpoint(host, DEFAULT_PORT)
    for number in (29500, 0, 1, 65535):
        assert parse_endpoint(f"{host}:{number}") == Endpoint(host, number)


@pytest.mark.parametrize("host", V6_HOSTS)
def test_an_ipv6_address(host: str) -> None:
    assert parse_endpoint(host) == Endpoint(host, DEFAULT_PORT)
    assert parse_endpoint(f"[{host}]") == Endpoint(host, DEFAULT_PORT)
    assert parse_endpoint(f"[{host}]:29500") == Endpoint(host, 29500)
    assert parse_endpoint(f"[{host}]:0") == Endpoint(host, 0)


def test_an_address_that_looks_like_one_with_a_port_is_an_address() -> None:
    assert parse_endpoint("fd00::1:2950") == Endpoint("fd00::1:2950", DEFAULT_PORT)


def test_space_around_it_does_not_count_and_nothing_means_a_free_port_of_this_machine() -> None:
    for text in ("", " ", "\t\n"):
        assert parse_endpoint(text) == Endpoint("localhost", 0)
    for text in (" node-a:29500", "node-a:29500\n", "\tnode-a:29500 "):
        assert parse_endpoint(text) == Endpoint("node-a", 29500)


NO_ENDPOINTS = {
    "a port alone": ":29500",
    "an empty port": "node-a:",
    "a port too high": "node-a:65536",
    "a port far too high": "node-a:" + "9" * 5000,
    "a port with a space": "node-a: 29500",
    "a port in other digits": "node-a:\uff12\uff19",
    "two ports": "node-a:29500:29501",
    "empty brackets": "[]:29500",
    "a bracket that does not close, with a port": "[::1:29500",
    "a name in brackets": "[node-a]:29500",
    "more behind the bracket": "[::1]x:29500",
    "no IPv6 address": "fd00::1::2",
    "an IPv6 address with a port, without brackets": "fd00::1:29500",
    "a space in the name": "node a:29500",
    "a URL": "tcp://node-a:29500",
    "several": "node-a:29500,node-b:29500",
}


def test_what_is_no_endpoint() -> None:
    for what, text in NO_ENDPOINTS.items():
        with pytest.raises(UsageError) as caught:
            parse_endpoint(text)
        assert caught.value.message == f"{text!r} is no endpoint", what
        assert "HOST:PORT" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a", f"a:{DEFAULT_PORT}"),
        ("", "localhost:0"),
        ("a,b,c:29501", "a:29501,b:29501,c:29501"),
        ("a,b,c", f"a:{STORE_PORT},b:{STORE_PORT},c:{STORE_PORT}"),
        (" a:1, b , c:2\n", "a:1,b:2,c:2"),
        ("[fd00::1],[fd00::2]:3", "[fd00::1]:3,[fd00::2]:3"),
        ("[fd00::1],[fd00::2]", f"[fd00::1]:{STORE_PORT},[fd00::2]:{STORE_PORT}"),
    ],
)
def test_one_or_several(text: str, written: str) -> None:
    endpoints = parse_endpoints(text)
    assert str(endpoints) == written
    assert parse_endpoints(written) == endpoints


@pytest.mark.parametrize("text", ["a,", ",a:1", "a,,b:1", "a b,c:1", "a:1,b:70000"])
def test_several_of_which_one_is_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_endpoints(text)


def test_the_store_that_a_command_asks_may_be_written_as_for_run() -> None:
    assert str(parse_store("node-a", "the store")) == f"node-a:{DEFAULT_PORT}"
    assert str(parse_store("a,b:1", "the store")) == "a:1,b:1"
    for text in ("", "a:0", "a b", "a,b:0"):
        with pytest.raises(UsageError, match=f"^the store is '{text}'"):
            parse_store(text, "the store")


@settings(max_examples=200)
@given(st.text(alphabet="ab0:9.[]%-/ \n", max_size=14) | st.text(max_size=14))
@example("[::1]:29500")
@example("::1")
def test_any_text_is_an_endpoint_that_can_be_written_or_a_usage_error(text: str) -> None:
    try:
        endpoint = parse_endpoint(text)
    except UsageError:
        return
    assert parse_endpoint(str(endpoint)) == endpoint
    assert 0 <= endpoint.port <= 65_535
    assert endpoint.host
