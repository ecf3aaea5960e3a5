"""What ranks do, on the page of a real server in a real browser, as a launcher reports it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, expect

from processes import Server, serving
from rallypoint.client.tcp import TCPStore
from rallypoint.frames import Frame
from rallypoint.launch.stacks.activity import Child, MachineActivity, ProcessFacts, RankActivity, pack
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.plan import Plan, PlannedMachine
from rallypoint.store.rollcall.question import PLAN, STALL
from raw import until
from web_browser import DESKTOP, PHONE, SECONDS, Look, browsing, looking

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J"
TORCH = "/opt/env/lib/python3.11/site-packages/torch"
WAITING = (
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"),
    Frame("/home/me/train.py", 41, "train"),
)
LOADING = (Frame("/home/me/data.py", 88, HOSTILE), Frame("/home/me/train.py", 33, "train"))


def waiting(rank: int) -> RankActivity:
    return RankActivity(rank, 100 + rank, WAITING, 252.0, step=1204, steps_per_second=2.0, step_seconds=252.0)


ODD = RankActivity(
    2,
    102,
    LOADING,
    252.0,
    step=1203,
    steps_per_second=0.5,
    step_seconds=253.0,
    facts=ProcessFacts("sleeps", f"read() of /mnt/{HOSTILE}", 3_000_000_000),
    threads=((Frame("/usr/lib/python3.11/threading.py", 5, "wait"),),),
    children=(Child(77, (Frame("/home/me/worker.py", 9, HOSTILE),), ProcessFacts("is stopped")),),
)
MACHINE = MachineActivity("node-a", (waiting(0), waiting(1), ODD, waiting(3)))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with (folder / "log").open("w+") as log, serving("libuv", log, ("--web", "0")) as running:
        until(lambda: "the page is at " in running.read_log(), "the page is up")
        yield running


@contextmanager
def told_page(
    browser: Browser, server: Server, size: tuple[int, int] = DESKTOP
) -> Iterator[tuple[Look, TCPStore]]:
    """The page, and the launcher that has told what its four ranks do."""
    [url] = re.findall(r"the page is at (http://\S+)", server.read_log())
    with (
        TCPStore(server.host, server.port, timeout=SECONDS, role=Role.AGENT) as launcher,
        looking(browser, url, size=size) as look,
    ):
        launcher.set(PLAN, Plan(0, (PlannedMachine("node-a", 0, 4),)).to_json())
        launcher.report(pack(MACHINE))
        expect(look.page.locator("#work")).to_be_visible()
        yield look, launcher


def test_the_odd_rank_its_line_and_a_straggler_are_on_the_page(browser: Browser, server: Server) -> None:
    with told_page(browser, server) as (look, launcher):
        page = look.page
        rows = page.locator("#work-list > li")
        expect(rows).to_have_count(2)
        odd = rows.first.inner_text()
        assert odd.startswith("rank 2 on node-a is elsewhere, in")
        assert r"<img src=x onerror=alert(1)>\x1b[2J (data.py:88) <- train (train.py:33) step 1,203" in odd
        assert r"read() of /mnt/<img src=x onerror=alert(1)>\x1b[2J" in odd
        expect(rows.first).to_have_class("odd")
        age = rows.first.locator(".age")
        expect(age).to_have_text(re.compile(r"^has not moved for 4 min \d+ s$"))
        expect(age).not_to_have_text(age.inner_text())  # it counts on
        main = rows.last.inner_text()
        assert main.startswith("3 of 4 ranks wait for others in")
        assert "all_reduce <- train (train.py:41) step 1,204" in main

        slow = page.locator("#steps-list > li").first
        assert slow.inner_text().split("\n")[:3] == ["rank 2 on node-a", "0.5 / s", "25 % of the median"]
        assert slow.locator("progress").evaluate("bar => bar.value") == 0.25
        assert look.text("#steps-median") == "the median of all: 2 / s"

        rows.first.locator("button").click()
        expect(page.locator("#details-title")).to_have_text("Rank 2")
        stacks = page.locator("#details-stacks > li")
        expect(stacks).to_have_count(3)
        frames = stacks.first.locator(".frames > li")
        assert frames.first.inner_text().split("\n") == [
            r"<img src=x onerror=alert(1)>\x1b[2J own",
            "/home/me/data.py:88",
        ]
        facts = page.locator("#details-facts")
        expect(facts).to_contain_text(re.compile(r"Not moved\s*for 4 min"))
        expect(facts).to_contain_text(re.compile(r"Step\s*1,203, 0.5 / s"))
        expect(facts).to_contain_text(re.compile(r"Memory\s*3 GB"))
        expect(stacks.nth(1).locator(".frames")).to_be_hidden()
        stacks.nth(1).locator("summary").press("Enter")
        expect(stacks.nth(1).locator(".frames > li")).to_contain_text("threading.py:5")
        expect(stacks.nth(1).locator(".mark")).to_be_hidden()
        assert stacks.nth(2).locator("summary").inner_text().startswith("Process 77")

        assert page.locator("img[src=x]").count() == 0
        ranks = (*MACHINE.ranks[:2], replace(ODD, stack=WAITING), waiting(3))
        launcher.report(pack(replace(MACHINE, ranks=ranks)))
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("all 4 ranks wait for others in")
        assert stacks.nth(1).locator("details").get_attribute("open") is not None, "it is as it was left"
        train = (
            replace(ODD, still_seconds=0.0),
            *(replace(waiting(at), still_seconds=0.0) for at in (0, 1, 3)),
        )
        launcher.report(pack(replace(MACHINE, ranks=train)))
        expect(rows.first).to_contain_text("rank 2 on node-a is in")  # others move as well: it is not odd
        expect(page.locator("#work .odd")).to_have_count(0)
        launcher.report("")
        expect(page.locator("#work")).to_be_hidden()
        expect(page.locator("#steps")).to_be_hidden()
        expect(stacks).to_have_count(0)


def test_a_job_that_makes_no_progress_says_so_first_and_names_the_odd_rank(
    browser: Browser, server: Server
) -> None:
    with told_page(browser, server) as (look, launcher):
        page = look.page
        launcher.delete_key(PLAN)  # without it, no rank is missing
        expect(page.locator("main > :visible").first).to_have_id("stall")
        title = page.locator("#stall-title")
        expect(title).to_have_text(re.compile(r"The job has made no progress for 4 min 1?\d s"))
        expect(page.locator("#stall-text")).to_have_text(re.compile("^rank 2 on node-a is elsewhere: "))
        expect(page).to_have_title(re.compile("^no progress · "))
        launcher.report(pack(replace(MACHINE, ranks=(waiting(0), replace(ODD, still_seconds=0.0)))))
        expect(page.locator("#stall")).to_be_hidden()


def test_what_a_launcher_says_of_a_stall_is_at_the_top_also_on_a_phone(
    browser: Browser, server: Server
) -> None:
    with told_page(browser, server, PHONE) as (look, launcher):
        page = look.page
        notice = page.locator("#stall")
        expect(notice).to_be_hidden()
        launcher.set(STALL, f"3 of 4 ranks wait\n  rank 2: {HOSTILE * 20}")
        expect(page.locator("#stall-text")).to_contain_text("3 of 4 ranks wait\n  rank 2: <img src=x")
        expect(notice).to_contain_text("␛[2J")
        expect(page).to_have_title(re.compile("^no progress · "))
        page.locator("#work-list button").first.click()
        expect(page.locator("#details-stacks > li")).to_have_count(3)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
        top = {
            name: page.locator(f"#{name}").bounding_box() for name in ("stall", "headline", "work", "keys")
        }
        heights = [box["y"] for box in top.values() if box is not None]
        assert heights == sorted(heights)
        assert len(heights) == 4
        launcher.delete_key(STALL)
        expect(notice).to_be_hidden()
