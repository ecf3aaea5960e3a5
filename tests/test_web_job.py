"""A job in which a rank is held back: the page, `rallypoint status` and /metrics tell the same of it."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from rallypoint.cli.main import main
from raw import until
from web_browser import Look, browsing, looking
from web_jobs import SECONDS, ConnectedJob, RunningJob, running_job


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


Told = dict[str, Any]
"""How many ranks are expected, joined, missing and waiting, which are missing, and what is waited for."""


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Told]:
    """What `rallypoint status` tells of a store, in this process."""

    def call(store: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["rallypoint", "status", store, "--json"])
        with pytest.raises(SystemExit):
            main()
        return told_by(json.loads(capsys.readouterr().out)["roll"])

    return call


def told_by(roll: dict[str, Any]) -> Told:
    states = [each["state"] for each in roll["ranks"]]
    return {
        "expected": roll["expected"],
        "joined": roll["joined"],
        "late": states.count("late"),
        "gone": states.count("gone"),
        "waiting": states.count("waiting"),
        "missing": roll["missing"],
        "keys": [each["key"] for each in roll["awaited"]],
    }


def metrics_of(job: RunningJob) -> Told:
    with urllib.request.urlopen(f"{job.url}metrics", timeout=SECONDS) as response:
        text = response.read().decode()

    def value(name: str) -> int:
        (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return int(float(found))

    states = {state: value(f'rallypoint_ranks{{state="{state}"}}') for state in ("late", "gone", "waiting")}
    missing = re.findall(r'^rallypoint_missing_rank\{.*rank="(\d+)"', text, re.MULTILINE)
    assert value("rallypoint_ranks_missing") == states["late"] + states["gone"] == len(missing)
    return {
        "expected": value("rallypoint_ranks_expected"),
        "joined": value("rallypoint_ranks_joined"),
        **states,
        "missing": sorted(map(int, missing)),
        "keys": value("rallypoint_awaited_keys"),
    }


# All at once: between two questions, the page may change.
_READ = """() => {
    const text = (id) => document.getElementById(id).textContent;
    const keys = document.querySelectorAll("#waits-list .key");
    return {
        headline: text("headline"),
        missing: text("missing-text"),
        counts: ["joined", "late", "gone", "waiting"].map((name) => [name, Number(text(`count-${name}`))]),
        keys: [...keys].map((key) => key.textContent),
    };
}"""


def page_of(look: Look) -> Told:
    read = look.page.evaluate(_READ)
    counts = dict(read["counts"])
    said = re.fullmatch(r"(?:All|(\d+) of) (\d+) ranks joined", read["headline"])
    assert said is not None
    assert int(said[1] or said[2]) == counts["joined"]
    missing = re.findall(r"\b\d+\b", re.sub(r" on \S+", "", read["missing"]))
    return {
        "expected": int(said[2]),
        **counts,
        "missing": sorted(map(int, missing)),
        "keys": read["keys"],
    }


@pytest.mark.parametrize(
    "kind",
    [
        ConnectedJob,
        pytest.param(
            RunningJob,
            marks=[
                pytest.mark.slow,
                pytest.mark.timeout(600),
                pytest.mark.skipif(sys.platform != "linux", reason="torch's clients are known by processes"),
            ],
        ),
    ],
    ids=["connections", "torch"],
)
def test_page_status_and_metrics_agree(
    browser: Browser, tmp_path: Path, status: Callable[[str], Told], kind: type[RunningJob]
) -> None:
    with (tmp_path / "log").open("w+") as log, running_job(4, log, kind) as job:

        def assert_agreed(told: Told) -> None:
            """Nothing moves any more: what each of them tells has to be this."""
            until(lambda: page_of(look) == told, f"the page tells {told}", SECONDS)
            assert status(job.store) == told
            assert metrics_of(job) == {**told, "keys": len(told["keys"])}

        job.start(0, 1, 2)
        with looking(browser, job.url) as look:
            look.await_up()
            expect(look.page.locator("#headline")).to_have_text("3 of 4 ranks joined", timeout=SECONDS * 1000)
            expect(look.page.locator("#waits-list > li")).to_have_count(1)
            held_back = {"expected": 4, "joined": 3, "late": 1, "gone": 0, "waiting": 3}
            assert_agreed({**held_back, "missing": [3], "keys": ["0//cpu//0/3"]})
            assert "rank 3 (late) should have written it" in look.text("#waits-list")
            assert look.text("#waits-list .who") == "ranks 0\N{EN DASH}2"

            job.start(3)
            job.await_sums()
            complete = {"expected": 4, "joined": 4, "late": 0, "gone": 0, "waiting": 0}
            assert_agreed({**complete, "missing": [], "keys": []})

            job.finish(2)
            one_less = {"expected": 4, "joined": 3, "late": 0, "gone": 1, "waiting": 0}
            assert_agreed({**one_less, "missing": [2], "keys": []})
            job.finish(0, 1, 3)
