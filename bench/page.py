"""What the page costs a node with 50 tenants, and what it looks like.

Owns the claim that being looked at takes less than 5 % of one core. The node is a process of its own; 50 tenants, each
with a token, have fetched rows, and go on to, so that there is something to show. Its CPU is read from the kernel in
turns: nobody looks; one page is open; five are. A page asks every two seconds, as `page.js` does.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console

from bench import browser
from bench.browser import DESKTOP, PHONE, Browser
from bench.result import Result
from headwater.core.access import entry_text, token_digest
from headwater.data.layouts import list_samples
from headwater.data.transforms import Resize, ToFloat, Transforms
from headwater.data.wire import Chunk, Extraction
from headwater.errors import HeadwaterError
from headwater.train.access import Access
from headwater.train.client import NodeClient

NUM_TENANTS = 50
PAGE_EVERY_S = 2.0  # as EVERY_MS in page.js
VIEWERS = (0, 1, 5)
LIMIT = 0.05  # of one core
PAUSE_S = 5.0  # of a tenant between two chunks: the node is to have time left, so that its CPU says what looking costs


def run(quick: bool, console: Console) -> Result:
    turn_s, rounds = (4.0, 2) if quick else (12.0, 5)
    with tempfile.TemporaryDirectory(prefix="headwater-page-") as name, _scene(Path(name)) as scene:
        console.print(f"{NUM_TENANTS} tenants; {rounds} rounds of {turn_s:g} s with {VIEWERS} open pages")
        for viewers in VIEWERS:  # once, uncounted
            _busy(scene, viewers, 1.0)
        measured: dict[int, list[float]] = {viewers: [] for viewers in VIEWERS}
        for _ in range(rounds):
            for viewers in VIEWERS:
                measured[viewers].append(_busy(scene, viewers, turn_s))
        status = _get(scene, "/status.json")
        answer_s = statistics.median(_timed(scene) for _ in range(20))
        written = _pictures(scene) if browser.missing() is None else []
    base = statistics.median(measured[0])
    cases: list[dict[str, Any]] = [
        {"open_pages": viewers, "node_cores_median": statistics.median(each),
         "more_than_without": statistics.median(each) - base, "lowest": min(each), "highest": max(each)}
        for viewers, each in measured.items()
    ]  # fmt: skip
    one, five = (statistics.median(measured[viewers]) - base for viewers in VIEWERS[1:])
    return Result(
        "page",
        quick,
        {"num_tenants": len(json.loads(status)["nodes"][0]["tenants"]), "core_share_one": max(one, 0.0),
         "core_share_five": max(five, 0.0), "answer_ms": 1e3 * answer_s, "answer_bytes": len(status)},
        {"num_tenants": "50", "core_share_one": f"≤ {LIMIT}", "core_share_five": "report"},
        cases,
        bound="none: what is not looked at costs nothing",
        limited_by="making one look of the counters and writing it as JSON; pages that ask within a quarter of "
                   "a second share one",
        notes=["node_cores_median is all of the node's CPU, with the rows that tenants fetch; more_than_without is the "
               "page's, and may come out below zero where it is less than what tenants' work varies by"],
        draw=partial(_draw, written) if written else None,
    )  # fmt: skip


@contextmanager
def _scene(folder: Path) -> Iterator[dict[str, Any]]:
    """A node over small pictures, with tenants at work, and an operator's token."""
    generator, pictures = np.random.default_rng(0), folder / "pictures" / "a"
    pictures.mkdir(parents=True)
    for number in range(16):
        Image.fromarray(generator.integers(0, 255, (48, 48, 3), np.uint8)).save(pictures / f"{number}.jpg")
    tokens = {f"team-{number:02d}": f"hw_{number:02d}{os.urandom(24).hex()}" for number in range(NUM_TENANTS)}
    operator = f"hw_{os.urandom(24).hex()}"
    text = [entry_text(name, token_digest(token), {}) for name, token in tokens.items()]
    text.append(entry_text("operator", token_digest(operator), {"operator": True}))
    (folder / "tokens.toml").write_text("\n".join(text))
    node = subprocess.Popen(
        [sys.executable, "-m", "headwater.cli", "serve", str(folder / "pictures"), "--listen", "127.0.0.1:0", "--http",
         "127.0.0.1:0", "--tokens", str(folder / "tokens.toml"), "--state", str(folder / "state"), "--threads", "1",
         "--cache-size", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "COLUMNS": "1000"},
    )  # fmt: skip
    stopped, threads = threading.Event(), []
    try:
        assert node.stdout is not None
        address = next(found[0] for line in node.stdout if (found := re.search(r"grpc://[\d.:]+\d", line)))
        http = next(found[1] for line in node.stdout if (found := re.search(r"(http://[\d.]+:\d+)", line)))
        for number, (name, token) in enumerate(tokens.items()):
            worker = threading.Thread(
                target=_tenant, args=(address, name, token, folder / "pictures", stopped, number / NUM_TENANTS)
            )
            worker.start()
            threads.append(worker)
        scene = {"pid": node.pid, "http": http, "address": address, "token": operator, "folder": folder}
        deadline = time.monotonic() + 60
        while len(json.loads(_get(scene, "/status.json"))["nodes"][0]["tenants"]) < NUM_TENANTS:
            if time.monotonic() > deadline:
                raise RuntimeError("not all tenants came within a minute")
            time.sleep(0.2)
        yield scene
    finally:
        stopped.set()
        for worker in threads:
            worker.join(30)
        node.kill()
        node.wait()
        if node.stdout is not None:
            node.stdout.close()


def _tenant(address: str, name: str, token: str, url: Path, stopped: threading.Event, begin: float) -> None:
    """Fetch rows now and then; one in ten tenants asks for what it may not have, once."""
    client, samples = NodeClient(address, Access(token)), list_samples(str(url))
    transforms = Transforms([Resize((32, 32)), ToFloat()])
    want = Extraction(samples.url, transforms, None, (transforms.pixel_spec,), node_batch=8)
    chunk = Chunk(want, name, 0, 0, 0, tuple(samples.take(range(len(samples)))))
    if name.endswith("7"):
        with suppress(HeadwaterError):
            client.list_samples(_elsewhere())
    stopped.wait(begin * 2)
    while not stopped.is_set():
        client.rows(chunk, stopped)
        stopped.wait(PAUSE_S)
    client.close()


def _elsewhere() -> Any:
    from headwater.data.wire import Listing

    return Listing("file:///srv/other")


def _busy(scene: dict[str, Any], viewers: int, seconds: float) -> float:
    """Cores that the node took while so many pages were open."""
    ended = threading.Event()

    def look(number: int) -> None:
        ended.wait(PAGE_EVERY_S * number / max(1, viewers))
        while not ended.is_set():
            _get(scene, "/status.json")
            ended.wait(PAGE_EVERY_S)

    pages = [threading.Thread(target=look, args=(number,)) for number in range(viewers)]
    for page in pages:
        page.start()
    begin_s, begin = _cpu_s(scene["pid"]), time.perf_counter()
    time.sleep(seconds)
    taken = (_cpu_s(scene["pid"]) - begin_s) / (time.perf_counter() - begin)
    ended.set()
    for page in pages:
        page.join()
    return taken


def _cpu_s(pid: int) -> float:
    """Of all its threads, as fine as the scheduler counts."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def _get(scene: dict[str, Any], path: str) -> bytes:
    request = urllib.request.Request(scene["http"] + path, headers={"Authorization": f"Bearer {scene['token']}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def _timed(scene: dict[str, Any]) -> float:
    time.sleep(0.3)  # or it would be an answer that was made before
    begin = time.perf_counter()
    _get(scene, "/status.json")
    return time.perf_counter() - begin


def _pictures(scene: dict[str, Any]) -> list[bytes]:
    """The page in a real Chromium, on a desk and on a phone."""
    found = []
    for size in (DESKTOP, PHONE):
        with Browser(size) as window:
            window.open(f"{scene['http']}/#key={scene['token']}")
            window.wait("return document.getElementById('state').innerText === 'live'")
            window.wait("return document.querySelectorAll('#tenants tbody tr').length >= arguments[0]", NUM_TENANTS)
            time.sleep(6 * PAGE_EVERY_S)  # for the line of rates to be one
            path = scene["folder"] / "page.png"
            found.append(window.picture(path).read_bytes())
    return found


def _draw(written: list[bytes], path: Path) -> None:
    path.write_bytes(written[0])
    path.with_name(f"{path.stem}-phone.png").write_bytes(written[1])
