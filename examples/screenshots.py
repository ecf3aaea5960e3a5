"""The pictures of the page in docs/images: of a training job on two machines, in which one rank comes late.

    python examples/screenshots.py docs/images

The job is data-parallel training under `rallypoint run`. Both machines are this one, under two names, which
takes root on Linux. Rank 6 is held back on purpose; then all of them train. It takes three minutes, and needs
torch, the extra `web`, playwright, pillow and chromium.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from rallypoint.client.snapshots import HEAD
from rallypoint.client.tcp import TCPStore
from rallypoint.watch.web.hosting import host_web

PATIENCE = 120.0
HELD_SECONDS = 40
TRAINING_SECONDS = 75
MACHINES = ("node-a", "node-b")
RANKS = 4  # on each machine

TRAIN = """
import os, pathlib, sys, time
import rallypoint, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
(folder / f"store-{rank}").write_text(os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"])
while rank == 6 and not (folder / "go").exists():
    time.sleep(0.1)
torch.set_num_threads(1)
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
end, step = torch.zeros(1), 0
while not end:
    points = torch.rand(64, 2) * 2 - 1
    loss = nn.functional.mse_loss(model(points), points.prod(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    rallypoint.step(step)
    store.set(f"loss/rank {rank}", f"step {step}: {loss.item():.5f}")
    end.fill_((folder / "done").exists())
    dist.all_reduce(end)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Shot:
    """One picture: which window, in which colours, of how much of the page."""

    name: str
    width: int
    height: int
    scheme: Literal["dark", "light"]
    scale: float = 1.5


HELD_BACK = [Shot("page-missing-rank", 1280, 860, "light")]
TRAINING = [
    Shot("page-light", 1280, 860, "light"),
    Shot("page-dark", 1280, 860, "dark"),
    Shot("page-phone", 390, 844, "light", 2),
]


def main() -> int:
    """Run the job, and take all pictures; the exit code."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    if sys.platform != "linux" or os.geteuid() != 0:
        sys.exit("two machines on one take root on Linux")
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name, running_job(Path(name)), browsing() as browser:
        page = host_web(find_store(Path(name)))
        try:
            show(browser, page.url, HELD_BACK, target, select=6, wait_for="7 of 8 ranks joined")
            (Path(name) / "go").touch()
            show(browser, page.url, TRAINING, target, select=None, wait_for="All 8 ranks joined")
            (Path(name) / "done").touch()
        finally:
            page.server.release()
    return 0


@contextmanager
def running_job(folder: Path) -> Iterator[None]:
    """An agent on each machine, one after the other; all are ended when the block is left."""
    script = folder / "train.py"
    script.write_text(TRAIN)
    size = [f"--nnodes={len(MACHINES)}", f"--nproc-per-node={RANKS}"]
    command = [sys.executable, "-m", "rallypoint", "run", *size]
    port = free_port()
    place = f"--rdzv-endpoint=127.0.0.1:{port}"
    agents = []
    try:
        for machine in MACHINES:
            named = ["unshare", "--uts", "sh", "-c", f'hostname {machine} && exec "$@"', "sh"]
            whole = [*named, *command, place, str(script), str(folder)]
            with (folder / f"{machine}.log").open("w") as log:
                agents.append(
                    subprocess.Popen(whole, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                )
            until(lambda: is_listened_on(port), "the first machine holds the meeting place")
        yield
    finally:
        end(agents)


def end(agents: list[subprocess.Popen[bytes]]) -> None:
    """Agents that have ended by themselves, or are told to."""
    for agent in agents:
        try:
            agent.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGTERM)
            agent.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listened_on(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def find_store(folder: Path) -> tuple[str, int]:
    """The store of the job, by way of the relay that its ranks were given."""
    given = folder / "store-0"
    until(lambda: given.exists() and given.read_text(), "rank 0 comes")
    host, _, port = given.read_text().rpartition(":")
    with TCPStore(host, int(port), timeout=PATIENCE) as relay:
        place = json.loads(relay.get(HEAD))
    return str(place[0]), int(place[1])


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"not in time: {what}")
        time.sleep(0.2)


# The browser


@contextmanager
def browsing() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--font-render-hinting=none"]
        )
        try:
            yield browser
        finally:
            browser.close()


def show(
    browser: Browser, url: str, shots: list[Shot], target: Path, select: int | None, wait_for: str
) -> None:
    """Wait for a headline, and for the charts to fill; then take the pictures."""
    patient = browser.new_page()
    patient.goto(url)
    expect(patient.locator("#headline")).to_have_text(wait_for, timeout=PATIENCE * 1000)
    time.sleep(HELD_SECONDS if select is not None else TRAINING_SECONDS)
    patient.close()
    for shot in shots:
        context = browser.new_context(
            viewport={"width": shot.width, "height": shot.height},
            color_scheme=shot.scheme,
            device_scale_factor=shot.scale,
        )
        take(context.new_page(), url, target / f"{shot.name}.png", select)
        context.close()


def take(page: Page, url: str, path: Path, select: int | None) -> None:
    page.goto(url)
    expect(page.locator("#live-text")).to_have_text("live", timeout=PATIENCE * 1000)
    expect(page.locator("#keys-list tr").first).to_be_attached()
    if select is not None:
        page.fill("#go-to-rank-number", str(select))
        page.keyboard.press("Enter")
        expect(page.locator("#details-facts > div").first).to_be_visible()
        page.locator("#go-to-rank-number").fill("")
        page.locator("#go-to-rank-number").blur()
    page.evaluate("scrollTo(0, 0)")
    save(page.screenshot(), path)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def save(content: bytes, path: Path) -> None:
    """With a palette of its own: a page of few colours needs no more, and is a third of the size."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    palette = image.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    palette.save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
