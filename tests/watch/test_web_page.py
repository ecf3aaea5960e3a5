"""The page in a real browser."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect

import rallypoint
from colours import contrast
from rallypoint.errors import ConnectError
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.roll import headline
from rallypoint.store.rollcall.snapshot import Mishap, Replication, Standby
from rallypoint.watch.web.poller import difference
from raw import until
from web_browser import PHONE, Look, browsing, looking
from web_stores import NOW, ScriptedStore, job, page_about

TOKEN = "correct-horse-battery"
EIGHT = {"node-a": 4, "node-b": 4}
HTML = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
TROUBLED = job(
    EIGHT,
    late=[7],
    gone={3: "the connection was reset"},
    waits={0: ("default_pg/0//cpu//0/3", 41.0), 1: ("other", 7.0)},
    barrier=("step/12", [4, 5]),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


def troubled_store() -> ScriptedStore:
    texts = {"plain": b"hello\nworld", "a/1": b"1", "a/2": b"2", HTML: HTML.encode()}
    return ScriptedStore(TROUBLED, {**texts, "binary": bytes(range(256))})


@pytest.fixture
def store() -> ScriptedStore:
    return troubled_store()


@pytest.fixture(scope="module")
def shared(browser: Browser) -> Iterator[tuple[Look, ScriptedStore]]:
    store = troubled_store()
    with page_about(store) as url, looking(browser, url) as found:
        yield found, store


@pytest.fixture
def changing(shared: tuple[Look, ScriptedStore]) -> tuple[Look, ScriptedStore]:
    """A page about a store that the test changes, as if it had just been opened."""
    look, store = shared
    store.snapshot = TROUBLED
    look.page.reload()
    look.await_up()
    expect(look.page.locator("#headline")).to_have_text("6 of 8 ranks joined")
    return shared


@pytest.fixture
def still(changing: tuple[Look, ScriptedStore]) -> Look:
    """A page about a store that stays as it is, as if it had just been opened."""
    return changing[0]


# Ranks


def test_the_headline_says_what_status_says_and_names_the_missing(still: Look) -> None:
    said = headline(judge(TROUBLED))
    assert said.startswith(still.text("#headline"))
    assert still.text("#headline") == "6 of 8 ranks joined"
    assert still.text("#missing-text") == "7 on node-b; gone: 3 on node-a"
    assert still.text("#missing-text") in said
    assert still.page.title() == "2 missing · 6 of 8 ranks joined · Rallypoint"
    shown = {name: still.text(f"#count-{name}") for name in ("joined", "waiting", "late", "gone")}
    assert shown == {"joined": "6", "waiting": "4", "late": "1", "gone": "1"}


def test_the_map_draws_every_state_in_its_colour(still: Look) -> None:
    for state in ("joined", "waiting", "late", "gone"):
        assert still.cells(state)["count"] > 20, state
    assert still.cells("unseen")["count"] == 0


def test_a_rank_that_comes_changes_the_map_the_headline_and_the_waits(
    changing: tuple[Look, ScriptedStore],
) -> None:
    look, store = changing
    age = look.page.locator("#waits-list .age").first
    expect(age).not_to_have_text(age.inner_text())  # it counts on
    store.snapshot = job(EIGHT)
    expect(look.page.locator("#headline")).to_have_text("All 8 ranks joined")
    expect(look.page.locator("#missing")).to_be_hidden()
    expect(look.page.locator("#waits-none")).to_be_visible()
    expect(look.page.locator("#longest")).to_be_hidden()
    assert look.cells("late")["count"] == look.cells("gone")["count"] == 0
    assert look.cells("joined")["count"] > 0


def test_a_click_shows_all_that_is_known_of_a_rank(still: Look) -> None:
    place = still.cells("late")
    box = still.page.locator("#grid-canvas").bounding_box()
    assert box is not None
    still.page.mouse.move(box["x"] + place["x"] + 3, box["y"] + place["y"] + 3)
    expect(still.page.locator("#grid-tip")).to_have_text("rank 7, node-b, late")
    still.page.mouse.click(box["x"] + place["x"] + 3, box["y"] + place["y"] + 3)
    expect(still.page.locator("#details-title")).to_have_text("Rank 7")
    expect(still.page.locator("#details-state")).to_have_text("late")
    still.page.locator("#details-close").click()
    expect(still.page.locator("#details")).to_be_hidden()


def test_details_of_one_that_waits_and_of_one_that_has_gone(still: Look) -> None:
    facts = still.page.locator("#details-facts")
    still.page.fill("#go-to-rank-number", "0")
    still.page.keyboard.press("Enter")
    expect(facts).to_contain_text(
        re.compile(r"Machine\s*node-a\s*Process\s*1000\s*Local rank\s*0\s*Connected")
    )
    expect(facts).to_contain_text(re.compile(r"Waits for\s*default_pg/0//cpu//0/3"))
    expect(facts).to_contain_text("it has said so itself")
    still.page.fill("#go-to-rank-number", "3")
    still.page.keyboard.press("Enter")
    expect(facts).to_contain_text(re.compile(r"Left\s*\d+ s ago"))
    expect(facts).to_contain_text("the connection was reset")


def test_the_keyboard_moves_through_the_map(still: Look) -> None:
    said = still.page.locator("#grid-said")
    still.page.locator("#grid").focus()
    keys = {
        "ArrowRight": "rank 0, node-a, waiting",
        "End": "rank 7, node-b, late",
        "ArrowUp": "rank 3, node-a, gone",
        "ArrowLeft": "rank 2, node-a, joined",
        "ArrowDown": "rank 6, node-b, joined",
        "Home": "rank 0, node-a, waiting",
        "m": "rank 3, node-a, gone",
    }
    for key, expected in keys.items():
        still.page.keyboard.press(key)
        expect(said).to_have_text(expected)
    still.page.keyboard.press("m")
    expect(said).to_have_text("rank 7, node-b, late")
    expect(still.page.locator("#details-title")).to_have_text("Rank 7")
    still.page.keyboard.press("Escape")
    expect(still.page.locator("#details")).to_be_hidden()


def test_everything_can_be_reached_with_the_tab_key_and_shows_it(still: Look) -> None:
    reached = set()
    for _ in range(40):
        still.page.keyboard.press("Tab")
        name, outline = still.page.evaluate(
            "() => { const now = document.activeElement;"
            " return [now.id || now.dataset.part || now.className || now.tagName,"
            " getComputedStyle(now).outlineStyle] }"
        )
        reached.add(name)
        assert outline != "none" or name == "BODY", name
    assert {"skip", "next-missing", "grid", "keys-search", "rank", "key", "waits-list"} <= reached


# Waits, barriers, errors


def test_waits_stand_with_the_longest_first_and_name_who_owes(still: Look) -> None:
    rows = still.page.locator("#waits-list > li")
    expect(rows).to_have_count(3)
    first = rows.first.inner_text()
    assert first.startswith("default_pg/0//cpu//0/3")
    assert "rank 0" in first
    assert "rank 3 on node-a (gone) should have written it" in first
    keys = rows.locator(".key").all_inner_texts()
    assert keys == ["default_pg/0//cpu//0/3", "step/12", "other"]
    rows.first.locator("button").click()
    expect(still.page.locator("#details-title")).to_have_text("Rank 3")


def test_barriers_errors_rounds_and_operations(still: Look) -> None:
    row = still.page.locator("#barriers-list > li")
    assert row.locator("progress").evaluate("bar => [bar.value, bar.max]") == [2, 8]
    assert "2 of 8" in row.inner_text()
    assert "missing: 0\N{EN DASH}3, 6\N{EN DASH}7" in row.inner_text()

    assert "there is no operation 71" in still.text("#errors-list")
    assert "2 of 2 machines joined" in still.text("#rounds-list")
    assert still.page.locator("#operations-list tr").all_inner_texts()[0].split("\t")[:2] == ["SET", "18"]


def test_a_replicated_store_shows_its_engine(changing: tuple[Look, ScriptedStore]) -> None:
    look, store = changing
    page = look.page
    expect(page.locator("#replication")).to_be_hidden()
    kept = Replication("etcd at a", 2, "a:1", (Standby("b:1", 7),), commit_p50=0.002, commit_p99=0.02)
    store.snapshot = replace(store.snapshot, replication=kept)
    expect(page.locator("#replication")).to_be_visible()
    told = look.text("#replication-facts")
    for words in ("etcd at a", "changed once", "b:1 (lag 7)", "p50 2 ms, p99 20 ms"):
        assert words in told
    expect(page.locator("#engine-away")).to_be_hidden()
    store.snapshot = replace(store.snapshot, replication=replace(kept, away_seconds=9.0, error="no answer"))
    expect(page.locator("#engine-away")).to_contain_text("no answer")


def test_charts_draw_the_history(still: Look) -> None:
    for name in ("rate", "p99"):
        path = still.page.locator(f"#chart-{name} path.line").get_attribute("d") or ""
        assert path.count("L") == 120
    label = still.page.locator("#chart-rate svg").get_attribute("aria-label") or ""
    assert "at most 489 in the last" in label
    still.page.locator("#chart-rate svg").hover(position={"x": 200, "y": 60})
    expect(still.page.locator("#chart-rate-now")).to_have_text(re.compile(r"^\d+ at \d\d:\d\d:\d\d$"))


# Keys and values


def test_search_asks_the_store(still: Look) -> None:
    keys = still.page.locator("#keys-list button")
    expect(keys).to_have_count(5)
    still.page.keyboard.press("/")
    still.page.keyboard.type("a/")
    expect(keys).to_have_count(2)
    assert keys.all_inner_texts() == ["a/1", "a/2"]
    assert still.text("#keys-summary") == "2 of 5 keys"
    still.page.fill("#keys-search", "nothing like it")
    expect(still.page.locator("#keys-summary")).to_have_text("0 of 5 keys")


def test_values_as_text_and_as_digits(still: Look) -> None:
    still.page.get_by_role("button", name="plain").click()
    content = still.page.locator("#value-content")
    expect(content).to_have_text("hello\nworld")
    still.page.get_by_label("Hex").check(force=True)
    expect(content).to_have_text(re.compile(r"^0000  68 65 6c 6c 6f 0a 77 6f 72 6c 64 +hello\.world$"))
    still.page.get_by_role("button", name="binary").click()
    expect(still.page.locator("#value-size")).to_have_text("256 bytes")
    expect(content).to_contain_text("00f0  f0 f1 f2")


def test_html_from_the_store_is_text_and_nothing_else(browser: Browser) -> None:
    hostile = job({HTML: 2}, late=[1], waits={0: (HTML, 4.0)}, barrier=(f"b{HTML}", [0]))
    told = replace(hostile, errors=(Mishap(NOW, HTML, HTML),), host=HTML, version=HTML)
    store = ScriptedStore(told, {HTML: HTML.encode()})
    with page_about(store) as url, looking(browser, url) as look:
        look.await_up()
        look.page.locator("#keys-list button").click()
        expect(look.page.locator("#value-content")).to_have_text(HTML)
        look.page.fill("#go-to-rank-number", "0")
        look.page.keyboard.press("Enter")
        expect(look.page.locator("#details-facts")).to_contain_text(HTML)
        assert HTML in look.text("#waits-list")
        assert HTML in look.text("#errors-list")
        assert look.text("#missing-text").startswith("1 on <img src=x onerror=")
        assert look.page.locator("img").count() == 1
        assert look.page.locator("script").count() == 1
        assert "hacked" not in look.page.title()


# When something is lost


def test_a_store_that_is_lost_and_comes_back(changing: tuple[Look, ScriptedStore]) -> None:
    look, store = changing
    store.failure = ConnectError("cannot reach the store at node-0:29500", hint="nothing listens there")
    try:
        banner = look.page.locator("#banner")
        expect(banner).to_be_visible()
        assert "No news from the store at node-0:29500" in banner.inner_text()
        assert "nothing listens there" in banner.inner_text()
        expect(look.page.locator("#live-text")).to_have_text("no news")
        assert look.text("#headline") == "6 of 8 ranks joined"
    finally:
        store.failure = None
    expect(banner).to_be_hidden()
    look.await_up()
    look.errors.clear()  # it may have asked for keys meanwhile


def test_a_store_that_is_not_there_at_first(browser: Browser, store: ScriptedStore) -> None:
    store.failure = ConnectError("cannot reach it")
    with page_about(store) as url, looking(browser, url) as look:
        expect(look.page.locator("#banner")).to_be_visible()
        expect(look.page.locator("#grid")).to_be_hidden()
        store.failure = None
        look.await_up()
        expect(look.page.locator("#grid")).to_be_visible()


def test_a_page_that_loses_its_server_says_so_and_comes_back(browser: Browser, store: ScriptedStore) -> None:
    with ExitStack() as server:
        url = server.enter_context(page_about(store))
        with looking(browser, url, complaints=True) as look:
            look.await_up()
            server.close()
            banner = look.page.locator("#banner")
            expect(banner).to_be_visible()
            assert "This page has lost its server" in banner.inner_text()
            assert "has ended, or is out of reach" in banner.inner_text()
            expect(look.page.locator("#live-text")).to_have_text("no connection")
            store.snapshot = job(EIGHT)
            server.enter_context(page_about(store, port=urlsplit(url).port or 0))
            expect(banner).to_be_hidden()
            look.await_up()
            assert look.text("#headline") == "All 8 ranks joined"


# Who may see it


def test_a_token_is_asked_for_refused_and_accepted(browser: Browser, store: ScriptedStore) -> None:
    with page_about(store, token=TOKEN) as url, looking(browser, url, complaints=True) as look:
        expect(look.page.locator("h1")).to_have_text("A token is needed")
        look.page.get_by_label("Token").fill("wrong-token-altogether")
        look.page.keyboard.press("Enter")
        expect(look.page.locator("h1")).to_have_text("A token is needed")
        look.page.get_by_label("Token").fill(TOKEN)
        look.page.keyboard.press("Enter")
        look.await_up()
        assert look.page.url == url
        (cookie,) = look.page.context.cookies()
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        assert look.page.evaluate("document.cookie") == ""
        assert all("Content Security Policy" not in error for error in look.errors)


# How it looks


def test_on_a_phone_nothing_has_to_be_scrolled_sideways(browser: Browser) -> None:
    long_key = "a/very/long/key/" * 12
    jobs = [
        job(machines, late=[5], waits={0: (long_key, 4.0)}, barrier=(long_key + "b", [1]))
        for machines in (EIGHT, {f"node-{number:04d}": 8 for number in range(256)})
    ]
    store = ScriptedStore(jobs[0], {long_key: b"x" * 5000})
    with page_about(store) as url, looking(browser, url, size=PHONE) as look:
        look.await_up()
        look.page.locator("#keys-list button").click()
        expect(look.page.locator("#value-content")).to_be_visible()
        look.page.locator("#next-missing").click()
        expect(look.page.locator("#details")).to_be_visible()
        assert look.page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
        store.snapshot = jobs[1]
        expect(look.page.locator("#headline")).to_have_text("2,047 of 2,048 ranks joined")
        assert look.page.evaluate("document.documentElement.scrollWidth") == PHONE[0]


def test_dark_and_light(still: Look) -> None:
    """As it is opened, and when the user changes it later."""
    grounds = {}
    schemes: list[Literal["dark", "light"]] = ["dark", "light"]
    try:
        for scheme in schemes:
            still.page.emulate_media(color_scheme=scheme)
            still.page.reload()
            still.await_up()
            ground = still.page.evaluate("getComputedStyle(document.body).backgroundColor")
            grounds[scheme] = sum(map(int, re.findall(r"\d+", ground)[:3]))
            assert still.cells("late")["count"] > 20
            still.page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
            assert still.page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
            until(lambda: still.cells("late")["count"] > 20, "the map is drawn in the other colours")
    finally:
        still.page.emulate_media(color_scheme="light")
    assert grounds["dark"] < 150 < 600 < grounds["light"]


def test_who_wants_no_motion_gets_none(still: Look) -> None:
    dot = still.page.locator(".dot")
    assert dot.evaluate("dot => getComputedStyle(dot).animationName") != "none"
    still.page.emulate_media(reduced_motion="reduce")
    try:
        assert dot.evaluate("dot => getComputedStyle(dot).animationName") == "none"
    finally:
        still.page.emulate_media(reduced_motion="no-preference")


PAGE = Path(rallypoint.__file__).parent / "watch" / "web" / "page"
PAIRS = [
    *((text, ground) for text in ("text", "muted", "bad-text", "link") for ground in ("surface", "ground")),
    *(("on-joined", "joined"), ("on-waiting", "waiting"), ("on-late", "sunken"), ("on-gone", "sunken")),
    *(("bad-text", "bad-ground"), ("text", "bad-ground"), ("good", "ground")),
]


def test_all_text_has_enough_contrast() -> None:
    light, dark = re.findall(r":root \{(.*?)\}", (PAGE / "colours.css").read_text(), re.DOTALL)[:2]
    for scheme in (light, light + dark):
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", scheme))
        for text, ground in PAIRS:
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for state in ("joined", "waiting", "late", "gone"):
            assert contrast(colours[state], colours["sunken"]) >= 2.2, state


IMAGES = Path(__file__).parents[2] / "docs" / "images"


def test_the_pictures_in_the_guide_are_there_and_small() -> None:
    """`examples/screenshots.py` makes them, from a real job."""
    named = re.findall(r"!\[.+\]\(\.\./images/(.+)\)", (IMAGES.parent / "guides" / "web.md").read_text())
    assert set(named) == {each.name for each in IMAGES.glob("page-*")}
    assert all((IMAGES / name).stat().st_size < 200_000 for name in named)


# Many ranks

LARGEST = {f"node-{number:04d}": 8 for number in range(2048)}


@pytest.mark.slow
def test_sixteen_thousand_ranks_are_drawn_quickly_and_can_be_told_apart(browser: Browser) -> None:
    waits = {rank: (f"key/{rank % 90}", 30.0) for rank in range(0, 6000, 7)}
    store = ScriptedStore(job(LARGEST, late=[5, 16383], gone={9000: "reset"}, waits=waits), moves=False)
    with page_about(store) as url, looking(browser, url) as look:
        look.await_up()
        assert look.text("#headline") == "16,381 of 16,384 ranks joined"
        assert look.text("#missing-text") == "5 on node-0000; 16383 on node-2047; gone: 9000 on node-1125"
        for state in ("late", "waiting"):
            assert look.cells(state)["count"] >= 8
        assert look.page.evaluate(_SECONDS_TO_DRAW) < 0.25
        look.page.locator("#grid").focus()
        look.page.keyboard.press("End")
        expect(look.page.locator("#grid-said")).to_have_text("rank 16383, node-2047, late")
        expect(look.page.locator("#trouble-list > li")).to_have_count(3)
        look.page.get_by_label("only machines with missing ranks").check()
        look.page.keyboard.press("Shift+Tab")
        look.page.locator("#grid").focus()
        look.page.keyboard.press("Home")
        expect(look.page.locator("#grid-said")).to_have_text("rank 0, node-0000, waiting")


_SECONDS_TO_DRAW = """async () => {
    const { layOut } = await import("./assets/layout.js");
    const machines = Array.from({ length: 2048 }, (_, host) => ({
        host, ranks: Array.from({ length: 8 }, (_, at) => 8 * host + at), states: Array(8).fill("j"),
    }));
    const times = Array.from({ length: 10 }, () => {  // the best counts: others may need the processor, too
        const began = performance.now();
        layOut(machines, 850, 600);
        return (performance.now() - began) / 1000;
    });
    return Math.min(...times);
}"""

_LAY_OUT = """async ([counts, width, height]) => {
    const { layOut, cellAt } = await import("./assets/layout.js");
    let first = 0;
    const machines = counts.map((count, host) => ({
        host, ranks: Array.from({ length: count }, () => first++), states: [],
    }));
    const layout = layOut(machines, width, height);
    const { size, cells } = layout;
    return {
        size,
        height: layout.height,
        ranks: cells.length,
        isInOrder: cells.every((cell, index) => cell.rank === index),
        isInside: cells.every(({ x, y }) => x >= 0 && x + size <= width)
            && cells.every(({ y }) => y >= 0 && y + size <= layout.height),
        isFound: cells.every(({ x, y }, index) => cellAt(layout, x, y) === index
            && cellAt(layout, x + size - 1, y + size - 1) === index),
    };
}"""


CROWDS = [[2], [1, 1], [4, 4], [8] * 24, [8] * 25, [3, 70, 1] * 20, [200] * 30, [8] * 2048, [16384]]


def test_every_rank_has_a_place_of_its_own(still: Look) -> None:
    for counts in CROWDS:
        for width in (300, 850, 1400):
            layout = still.page.evaluate(_LAY_OUT, [counts, width, 600])
            case = f"{counts[:5]} in {width}"
            assert layout["ranks"] == sum(counts), case
            assert layout["isInOrder"], case
            assert layout["isInside"], case
            assert layout["isFound"], case
            assert layout["size"] >= (30 if sum(counts) <= 8 else 5), case
            assert layout["height"] <= 600 or layout["size"] == 5, case


# What the page computes


def random_picture(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    names = ["a", "b", "__proto__", "constructor", "", "7"]
    content: dict[str, Any] = {}
    for name in chance.sample(names, chance.randint(0, 4)):
        inner = depth < 3 and chance.random() < 0.5
        content[name] = (
            random_picture(chance, depth + 1) if inner else chance.choice([0, 1.5, "x", [1, "y"], True])
        )
    return content


_MERGE = """async (cases) => {
    const { merge } = await import("./assets/stream.js");
    const sorted = (value) => value instanceof Map
        ? [...value].map(([name, inner]) => [name, sorted(inner)]).sort()
        : value;
    return cases.map(([before, patch]) => sorted(merge(merge(null, JSON.parse(before)), JSON.parse(patch))));
}"""


def test_the_page_applies_patches_as_the_server_means_them(still: Look) -> None:
    chance = random.Random(7)
    pairs = [(random_picture(chance), random_picture(chance)) for _ in range(300)]
    cases = [[json.dumps(before), json.dumps(difference(before, after))] for before, after in pairs]
    assert still.page.evaluate(_MERGE, cases) == [in_order(after) for _, after in pairs]


def in_order(value: object) -> object:
    """Objects as lists of their names and values: JavaScript has its own order for names."""
    if isinstance(value, dict):
        return sorted([name, in_order(inner)] for name, inner in value.items())
    return value


TEXTS = {
    "duration(0.44)": "0.4 s",
    "duration(41.4)": "41 s",
    "duration(200)": "3 min 20 s",
    "duration(7500)": "2 h 5 min",
    "duration(-1)": "0.0 s",
    "latency(-1)": "\N{EN DASH}",
    "latency(0.0000123)": "12 µs",
    "latency(0.00134)": "1.3 ms",
    "latency(0.25)": "250 ms",
    "stepRate(2.5)": "2.5 / s",
    "stepRate(0.02)": "one in 50 s",
    "stepRate(0)": "no steps of late",
    "bytes(999)": "999 bytes",
    "bytes(1)": "1 byte",
    "bytes(123456789)": "123 MB",
    "ranks('0-5,7,…')": "0\N{EN DASH}5, 7, …",
    "waiting('3', 1, 2)": "rank 3 and 2 clients",
    "visible('a\\u0000b\\u202ec\\td')": "a␀b\\u202ec\td",
}


def test_texts(still: Look) -> None:
    calls = ", ".join(f"text.{call}" for call in TEXTS)
    script = f"async () => {{ const text = await import('./assets/text.js'); return [{calls}] }}"
    assert dict(zip(TEXTS, still.page.evaluate(script), strict=True)) == TEXTS
