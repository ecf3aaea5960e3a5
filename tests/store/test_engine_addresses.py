"""The URLs of `--engine`: what they say, and what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.store.replica.engines.address import EngineAddress, Tls, parse_address
from rallypoint.store.replica.engines.opening import open_log


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("etcd://a", EngineAddress("etcd", (("a", 2379),), "rallypoint")),
        (
            "etcd://a,b,c:4001/job",
            EngineAddress("etcd", (("a", 4001), ("b", 4001), ("c", 4001)), "job"),
        ),
        ("etcd://a:1,b:2/team/job", EngineAddress("etcd", (("a", 1), ("b", 2)), "team/job")),
        (
            "etcd://[fd00::1],[::1]:77,10.0.0.1/?job=x%20y",
            EngineAddress("etcd", (("fd00::1", 2379), ("::1", 77), ("10.0.0.1", 2379)), "x y"),
        ),
        ("etcds://me:p%40ss@a/j", EngineAddress("etcd", (("a", 2379),), "j", "me", "p@ss", Tls())),
        (
            "etcd://a/j?ca=/x/ca.pem&cert=c.pem&key=k.pem",
            EngineAddress("etcd", (("a", 2379),), "j", tls=Tls("/x/ca.pem", "c.pem", "k.pem")),
        ),
        ("redis://h", EngineAddress("redis", (("h", 6379),), "rallypoint")),
        (
            "rediss://:pass@h:7000/3?job=j",
            EngineAddress("redis", (("h", 7000),), "j", "", "pass", Tls(), 3),
        ),
        (
            "redis+sentinel://a,b,c/mymaster?job=j",
            EngineAddress(
                "redis+sentinel", (("a", 26379), ("b", 26379), ("c", 26379)), "j", master="mymaster"
            ),
        ),
        (
            "rediss+sentinel://u:p@a:1/m/2",
            EngineAddress("redis+sentinel", (("a", 1),), "rallypoint", "u", "p", Tls(), 2, "m"),
        ),
    ],
)
def test_urls(url: str, address: EngineAddress) -> None:
    assert parse_address(url, {}) == address


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "is no URL of an engine"),
        ("a:2379", "is no URL of an engine"),
        ("http://a", "is no URL of an engine"),
        ("etcd://u:secret@", "a host that is none"),
        ("etcd://u:secret@a,,b", "a host that is none"),
        ("etcd://u:secret@a:0", "a host that is none"),
        ("etcd://u:secret@a:70000", "a host that is none"),
        ("etcd://u:secret@fd00::1", "a host that is none"),
        ("etcd://u:se/cret@a", "is no URL of an engine"),
        ("etcd://u:se?cret@a", "is no URL of an engine"),
        ("etcd://u:se#cret@a/j", "is no URL of an engine"),
        ("etcd://u:se@cret@a/j", "is no URL of an engine"),
        ("etcd://u:secret@a/j?job=k", "names a job twice"),
        ("etcd://u:secret@a?jobs=k", "unknown option 'jobs'"),
        ("etcd://u:secret@a?job=k&job=l", "an option twice"),
        ("etcd://u:secret@a?cert=c.pem", "one of cert and key"),
        ("etcd://u:secret@a?password-file=f", "a password and a file"),
        ("etcd://u@a?password-file=/not/there", "cannot be read"),
        ("redis://u:secret@h/job", "no use for"),
        ("redis://u:secret@h/0/1", "no use for"),
        ("redis://u:secret@a,b", "one host"),
        ("redis+sentinel://u:secret@a", "which master"),
        ("redis+sentinel://u:secret@a/m/x", "no use for"),
        ("redis://u:secret@a/0?sentinel-password-file=f", "names no Sentinels"),
    ],
)
def test_urls_that_are_wrong(url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse_address(url, {})
    assert "secret" not in str(caught.value)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("redis://h/0?password=hunter2", "etcd:/root:hunter2@h/job", "root:hunter2@h:2379/job"),
        *("redis://:hunter?2@h/0", "redis://:hunter#2@h/0", "redis://:x?hunter@h@h/0", "etcd://:hunter2/job"),
    ],
)
def test_a_url_that_is_wrong_is_shown_without_its_password(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(url)
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["rediss", "etcds"])
def test_files_that_cannot_be_used_are_told_at_once(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("no certificate", encoding="utf-8")
    for option, words in (
        (f"ca={tmp_path}/gone.pem", "gone.pem cannot be read: No such file"),
        (f"ca={tmp_path}/no.pem", "no.pem holds no certificate"),
        (f"cert={tmp_path}/no.pem&key={tmp_path}/gone.pem", "gone.pem cannot be read: No such file"),
        (f"cert={tmp_path}/no.pem&key={tmp_path}/no.pem", "no.pem and .*no.pem hold no certificate"),
    ):
        with pytest.raises(UsageError, match=words):
            open_log(f"{scheme}://h/?{option}")


def test_where_a_password_may_be(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("from a file\n", encoding="utf-8")
    environ = {"RALLYPOINT_ENGINE_PASSWORD": "from the environment"}
    assert parse_address("etcd://me@a", environ).password == "from the environment"
    assert parse_address("etcd://me:own@a", environ).password == "own"
    address = parse_address(f"redis://a?password-file={file}", environ)
    assert address.password == "from a file"
    assert "from" not in repr(address) + str(address)


def test_what_cannot_be_asked_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="acknowledgements"):
        open_log("etcd://a", acks=1)
    for name in [each for each in sys.modules if each.startswith("rallypoint.store.replica.engines.etcd")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UsageError, match=r"\.\[etcd\]"):
        open_log("etcd://me:secret@a")
