"""The page in a real Chromium: its numbers are those of /metrics, and a person can use it with keys and on a phone."""

import json
import re
import threading
import urllib.request

import pytest
from bench import browser as program
from bench.browser import DESKTOP, PHONE, Browser
from prometheus_client.parser import text_string_to_metric_families

from headwater.cli.runfiles import RunFiles
from headwater.cli.ui import Door
from headwater.core.trace import Span, perfetto
from headwater.data.layouts import list_samples
from headwater.data.transforms import Resize, ToFloat, Transforms
from headwater.data.wire import Chunk, Extraction
from headwater.errors import RefusedError
from headwater.train.access import Access
from headwater.train.client import NodeClient

pytestmark = pytest.mark.skipif(program.missing() is not None, reason=f"a browser: {program.missing()}")

HOSTILE = "<img src=x onerror=document.title='taken'>"
# Everything that is read must stand out from what is behind it (WCAG AA).
CONTRAST = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgb = (css) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data]; };
const light = (c) => c.slice(0, 3)
  .map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; })
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (node) => { for (; node; node = node.parentElement) {
  const c = rgb(getComputedStyle(node).backgroundColor); if (c[3] === 255) return c; } return [255, 255, 255, 255]; };
const found = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode.parentElement;
  if (!walk.currentNode.data.trim() || !node.checkVisibility() || node.closest('.skip, noscript')) continue;
  const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) found.push(`${node.className || node.tagName}: ${walk.currentNode.data.trim()}`);
}
return found;
"""


@pytest.fixture(scope="module")
def window():
    with Browser(DESKTOP) as window:
        yield window


@pytest.fixture(scope="module")
def node(start_node_once, pictures):
    """A node that has done some work, and refused some."""
    node = start_node_once(pictures, options=("--http", "127.0.0.1:0"))
    node.http = re.search(r"metrics are at (http://[\d.]+:\d+)", node.process.stdout.readline())[1]
    samples = list_samples(str(pictures))
    transforms = Transforms([Resize((8, 8)), ToFloat()])
    want = Extraction(samples.url, transforms, None, (transforms.pixel_spec,), node_batch=8)
    client = NodeClient(node.address)
    chunk = Chunk(want, "job", 0, 0, 0, tuple(samples.take(range(len(samples)))))
    client.rows(chunk, threading.Event())
    with pytest.raises(RefusedError):
        client.rows(Chunk(Extraction(f"file:///{HOSTILE}", transforms, None, want.boundary), "job", 0, 0, 1,
                          chunk.samples), threading.Event())  # fmt: skip
    client.close()
    return node


def estimate(plan, cut, rate, kind):
    """As `headwater plan --json` tells it."""
    cut = {"index": cut, "name": f"layer{cut}" if cut else "input"}
    loads = [{"resource": "the CPU of store-1", "kind": kind, "s_per_sample": 1 / rate},
             {"resource": "the link from store-1", "kind": "link down", "s_per_sample": 0.4 / rate}]  # fmt: skip
    return {"plan": {**plan, "cut": cut}, "estimated": {"samples_per_s": rate, "down_bytes_per_sample": 4096.0,
            "loads": loads, "limiting": loads[0]["resource"], "explanation": f"limited at {rate}"}}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A plan with alternatives, and a timeline."""
    from headwater.core.plan import Plan

    folder = tmp_path_factory.mktemp("run")
    tiers = dict.fromkeys(("read", "decode", "augment", "prefix"), "storage")
    plan = Plan(**tiers, cut=2, cut_name="layer2").to_json()
    cuts = [estimate(plan, 0, 40.0, "link down"), estimate(plan, 1, 80.0, "node"), estimate(plan, 2, 100.0, "trainer")]
    said = {"plan": plan, "explanation": "Cut at layer2.", "estimates": [cuts[2], cuts[1]], "cuts": cuts}
    (folder / "plans.json").write_text(json.dumps(said))
    spans = [Span("trainer", "loop", "step", 0.0, 2.0), Span("n", "a", "read", 1.0, 1.0)]
    (folder / "trace.json").write_text(perfetto(spans))
    return folder


@pytest.fixture(scope="module")
def door(node, run):
    door = Door("127.0.0.1:0", [node.address], RunFiles([run, run / "trace.json"]), Access())
    door.url = f"http://127.0.0.1:{door.port}/#key={door.key}"
    yield door
    door.close()


def is_live(window, url):
    window.open("about:blank")
    window.open(url)
    window.wait("return document.getElementById('state').innerText === 'live'")
    return window


def test_the_numbers_on_a_nodes_page_are_those_of_metrics(window, node):
    is_live(window, node.http)
    said = window.run("return [...document.querySelectorAll('[data-metric]')].map((e) => ({...e.dataset}))")
    with urllib.request.urlopen(f"{node.http}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    told = {}
    for each in (sample for family in families for sample in family.samples):
        labels = list(each.labels.values())
        for width in range(len(labels) + 1):
            key = each.name, ",".join(labels[:width])
            told[key] = told.get(key, 0.0) + each.value
    compared = [each for each in said if not each["metric"].startswith("process_")]  # those change by being looked at
    assert {"headwater_rows_sent_total", "headwater_errors_total", "headwater_rows_made_total"} <= {
        each["metric"] for each in compared
    }
    for each in compared:
        assert float(each["value"]) == told[each["metric"], each["labels"]], each
    assert told["headwater_rows_sent_total", "anyone"] == 50
    assert "50" in window.text("#tenants")
    assert window.said() == []


def test_what_a_stranger_sent_is_text_on_the_page(window, node):
    is_live(window, node.http)
    assert "RefusedError" in window.text("#faults")
    assert "<img src=x" in window.text("#faults")
    assert window.run("return document.querySelectorAll('.faults img').length") == 0
    assert "taken" not in window.run("return document.title")


def test_cuts_are_compared_with_the_arrow_keys_and_with_the_pointer(window, door):
    is_live(window, door.url)
    window.wait("return document.querySelectorAll('#cuts [role=option]').length === 3")
    assert "Cut at layer2" in window.text("#cut")
    window.run("document.querySelector('#cuts [aria-selected=true]').focus()")
    window.press("Left")
    assert "Cut at layer1" in window.text("#cut")
    assert "20 % slower" in window.text("#cut")
    assert window.run("return document.activeElement.getAttribute('aria-label')").startswith("layer1: 80.0 pictures/s")
    window.hover("#cut-0")
    assert "limited at 40" in window.text("#cut")


def test_the_timeline_is_read_moment_by_moment_with_keys(window, door):
    is_live(window, door.url)
    window.wait("return !document.getElementById('timeline').hidden")
    assert "step 1.00" in window.text("#cursor-said")
    assert "read " not in window.text("#cursor-said")
    window.run("document.getElementById('cursor').value = 200; document.getElementById('cursor').focus()")
    window.press("Right")
    assert "read 1.00" in window.text("#cursor-said")


def test_the_key_leaves_the_address_and_without_it_nothing_is_shown(window, door):
    is_live(window, door.url)
    assert window.run("return location.hash") == ""
    window.run("sessionStorage.clear()")
    window.open(f"http://127.0.0.1:{door.port}/?again")
    window.wait("return !document.getElementById('door').hidden")
    assert window.run("return document.getElementById('all').hidden && document.activeElement.id") == "key"
    window.press(*door.key, "Enter")
    window.wait("return document.getElementById('state').innerText === 'live'")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_is_wider_than_the_window_and_everything_can_be_read(window, door, size):
    try:
        window.resize(size)
        is_live(window, door.url)
        assert window.run("return document.documentElement.scrollWidth <= innerWidth")
        for scheme in ("light", "dark"):
            window.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            assert window.run(CONTRAST) == []
    finally:
        window.devtools("Emulation.setEmulatedMedia", features=[])
        window.resize(DESKTOP)


def test_whatever_is_used_has_a_name_and_a_place_among_the_keys(window, door):
    is_live(window, door.url)
    nameless = """return [...document.querySelectorAll('button, input, a, [role=option], svg')].filter((e) =>
      e.checkVisibility() && e.getAttribute('aria-hidden') !== 'true' && !(e.innerText || e.labels?.length ||
      e.getAttribute('aria-label') || e.getAttribute('aria-labelledby'))).map((e) => e.outerHTML.slice(0, 80))"""
    assert window.run(nameless) == []
    reached = set()
    for _ in range(12):
        window.press("Tab")
        reached.add(window.run("return document.activeElement.id || document.activeElement.className"))
    assert {"cursor", "panel scroll"} <= reached
    assert any(each.startswith("cut-") for each in reached)


def test_a_node_that_dies_is_said_and_its_return_is_seen(window, start_node, pictures):
    node = start_node(pictures)
    door = Door("127.0.0.1:0", [node.address], RunFiles([]), Access())
    try:
        is_live(window, f"http://127.0.0.1:{door.port}/#key={door.key}")
        node.kill()
        window.wait("return document.getElementById('state').innerText === 'does not answer'")
        assert "does not answer" in window.text("#note")
        start_node(pictures, listen=node.listen)
        window.wait("return document.getElementById('state').innerText === 'live'", within_s=90.0)
        assert window.run("return document.getElementById('note').hidden")
    finally:
        door.close()
