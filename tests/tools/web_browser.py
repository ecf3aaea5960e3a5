"""Debian's chromium, driven by Playwright: one process for all pages of a test module, and no download."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from turns import NETWORK, in_turns

SECONDS = 20.0
DESKTOP = (1280, 900)
PHONE = (360, 740)


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser without a window; the test fails where there is none."""
    program = shutil.which("chromium")
    if program is None:
        pytest.fail(
            "there is no chromium: `make tools` installs it, as root on Debian (apt install chromium)"
        )
    expect.set_options(timeout=SECONDS * 1000)
    with in_turns(NETWORK, shared=True), sync_playwright() as playwright:
        # It cannot have its sandbox as root, nor in many containers; it sees nothing but our own page.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Look:
    """A page in a browser, and what went wrong in it."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """What it complained of on its console, violations of its own policy included."""
    requests: list[str] = field(default_factory=list)

    def hear(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def note(self, request: Request) -> None:
        self.requests.append(request.url)

    def strangers(self) -> set[str]:
        """Places that were asked for something, beside the page's own."""
        return {urlsplit(url).netloc for url in self.requests} - {urlsplit(self.page.url).netloc}

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def await_up(self) -> None:
        """Wait until a store is shown."""
        expect(self.page.locator("body")).not_to_have_class("waiting")
        expect(self.page.locator("#live-text")).to_have_text(re.compile("^live"))

    def cells(self, state: str) -> dict[str, Any]:
        """Of the colour of a state, in the map: how many pixels there are, and where the first one is."""
        found: dict[str, Any] = self.page.evaluate(_FIND_COLOUR, state)
        return found


_FIND_COLOUR = """(state) => {
    const canvas = document.getElementById("grid-canvas");
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--${state}`);
    probe.fillRect(0, 0, 1, 1);
    const wanted = probe.getImageData(0, 0, 1, 1).data;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const found = { count: 0, x: -1, y: -1 };
    for (let at = 0; at < data.length; at += 4) {
        if (data[at] !== wanted[0] || data[at + 1] !== wanted[1] || data[at + 2] !== wanted[2]) continue;
        if (data[at + 3] !== 255) continue;
        if (!found.count) {
            found.x = ((at / 4) % canvas.width) / devicePixelRatio;
            found.y = Math.floor(at / 4 / canvas.width) / devicePixelRatio;
        }
        found.count += 1;
    }
    return found;
}"""


@contextmanager
def looking(
    browser: Browser,
    url: str,
    *,
    size: tuple[int, int] = DESKTOP,
    complaints: bool = False,
) -> Iterator[Look]:
    """Open an address; at the end, nothing must have gone wrong, unless complaints are expected."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme="light")
    try:
        look = Look(context.new_page())
        look.page.on("console", look.hear)
        look.page.on("pageerror", lambda error: look.errors.append(str(error)))
        look.page.on("request", look.note)
        look.page.goto(url)
        yield look
        assert look.strangers() == set()
        assert complaints or look.errors == [], look.errors
    finally:
        context.close()
