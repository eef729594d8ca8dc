"""The documents hang together: every page is in the navigation, every link and anchor leads somewhere, in the
repository and on the site; and the Python reference has everything that is public, with every argument told."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import pytest
from bench.__main__ import BENCHMARKS
from tests.docs.blocks import ROOT
from website import reference
from website.stage import DOCS, links, navigation, stage

import headwater as hw

WRITTEN = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]


def anchors(path: Path) -> set[str]:
    """Of the headings, as the repository's view and the site make them."""
    found: set[str] = set()
    is_code = False
    for line in path.read_text().split("\n"):
        is_code ^= line.strip().startswith("```")
        if not is_code and (heading := re.match(r"#{1,6} (.+)", line)):
            text = re.sub(r"\[(.+?)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = 1
            while slug in found:
                slug, count = f"{slug}-{count}", count + 1
            found.add(slug)
    return found


def lost(paths: list[Path]) -> list[str]:
    """Links that lead nowhere."""
    found = []
    for path in paths:
        for link in links(path.read_text()):
            name, _, anchor = link.partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            to = Path(os.path.normpath(path.parent / name)) if name else path
            if not to.exists() or (anchor and anchor not in anchors(to)):
                found.append(f"{path.name}: {link}")
    return found


def test_links_and_anchors_resolve_in_the_repository():
    assert not lost(WRITTEN)


def test_links_and_anchors_resolve_on_the_site(tmp_path):
    stage(tmp_path)
    pages = sorted(tmp_path.rglob("*.md"))
    assert len(pages) > len(WRITTEN)
    assert not lost(pages)
    assert not [page for page in pages if "<!-- reference:" in page.read_text() and page.name == "api.md"]


def test_the_navigation_has_every_page_once():
    entries = [(DOCS / link).resolve() for _, pages in navigation() for _, link in pages]
    assert len(entries) == len(set(entries))
    inside = {DOCS / "decisions", DOCS / "results", DOCS / "scenarios"}
    expected = {path for path in DOCS.rglob("*.md") if path.parent not in inside} - {DOCS / "index.md"}
    assert expected <= set(entries)
    assert {ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "examples", DOCS / "decisions", DOCS / "results",
            DOCS / "scenarios" / "README.md"} == set(entries) - expected  # fmt: skip


def test_every_staged_page_is_in_a_tree(tmp_path):
    stage(tmp_path)
    named = {tmp_path / "index.md"}
    for page in tmp_path.rglob("*.md"):
        for tree in re.findall(r"```\{toctree\}\n(.+?)```", page.read_text(), re.DOTALL):
            for entry in filter(None, (line.strip() for line in tree.split("\n"))):
                if not entry.startswith(":"):
                    name = re.sub(r".*<(.+)>", r"\1", entry)  # the page, with a title before it or without
                    named.add(page.parent / f"{name}.md")
    assert set(tmp_path.rglob("*.md")) == named


def test_a_decision_has_its_number():
    for path in (DOCS / "decisions").glob("*.md"):
        assert path.read_text().startswith(f"# {path.name[:3]}: ")


def test_each_benchmark_is_on_its_page_with_its_command_and_its_picture():
    text = (DOCS / "benchmarks.md").read_text()
    for name in BENCHMARKS:
        assert f"\n## {name}\n" in text
        assert re.search(rf"python -m bench {name}\b", text)
    pictures = {path.stem for path in (DOCS / "results").glob("*.png")}
    newest = {name for name in pictures if not (name.endswith("-quick") and name.removesuffix("-quick") in pictures)}
    assert not {name for name in newest if f"(results/{name}.png)" not in text}


def test_the_reference_has_every_public_name():
    text = (DOCS / "api.md").read_text()
    assert set(re.findall(r"<!-- reference: (\w+) -->", text)) == set(hw.__all__)
    assert reference.public_names() == hw.__all__


def functions():
    """(name, node) of what users call, and of what makes what they make."""
    for name in ("near", "freeze", "partition", "from_torchvision"):
        yield name, node_of(reference._literal("headwater", "_HOMES")[name], name)
    yield "attach", node_of("headwater.reduce.hook", "attach")
    for module, name in (("headwater.reduce.reducer", "Reducer"), ("headwater.train.embedding", "EmbeddingBag")):
        yield name, next(each for each in node_of(module, name).body
                         if isinstance(each, ast.FunctionDef) and each.name == "__init__")  # fmt: skip


def node_of(module, name):
    return next(each for each in reference._tree(module).body if getattr(each, "name", "") == name)


@pytest.mark.parametrize(("name", "node"), [pytest.param(name, node, id=name) for name, node in functions()])
def test_a_docstring_tells_every_argument_and_the_errors(name, node):
    text = ast.get_docstring(node)
    arguments = [*node.args.args, *node.args.kwonlyargs]
    names = {each.arg for each in arguments if each.arg != "self" and not each.arg.startswith("_")}
    assert not {each for each in names if not re.search(rf"\b{each}\b", text)}
    assert re.search(r"\b\w+Error\b", text), "which errors does it raise?"


def test_public_members_have_docstrings():
    homes = reference._literal("headwater", "_HOMES")
    classes = [(homes[name], name) for name in ("Job", "Rows", "Plan", "EmbeddingBag")]
    classes += [("headwater.train.loader", "Loader"), ("headwater.train.partition", "PartitionJob"),
                ("headwater.train.partition", "Batch"), ("headwater.reduce.hook", "Attached")]  # fmt: skip
    bare = []
    for module, name in classes:
        for each in node_of(module, name).body:
            is_public = isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
            if is_public and not ast.get_docstring(each) and each.name not in ("forward", "extra_repr"):
                bare.append(f"{name}.{each.name}")
        assert ast.get_docstring(node_of(module, name))
    assert not bare
    for name, module in reference.transforms():
        assert ast.get_docstring(node_of(module, name)), name


def test_numbers_of_engines_are_those_of_the_results():
    """What engines.md says of int8 and bf16 is what the result that it names has."""
    cases = {each["model"]: each for each in json.loads((DOCS / "results" / "engine.json").read_text())["cases"]}
    text = (DOCS / "engines.md").read_text().replace("\n", " ")
    for name in ("int8", "bf16"):
        told = re.search(rf"{name} ran ([\d.]+) to ([\d.]+) times as fast as eager PyTorch", text)
        ratios = [each[f"{name}_over_eager"] for each in cases.values()]
        assert told
        assert (float(told[1]), float(told[2])) == (round(min(ratios), 1), round(max(ratios), 1))
    kept = re.search(r"ViT-tiny kept (\d+), (\d+), (\d+) and (\d+) %", text)
    assert kept
    agreements = [cases[name]["int8_agreement"] for name in ("resnet18", "resnet50", "mobilenet", "vit")]
    assert [int(each) for each in kept.groups()] == [round(100 * each) for each in agreements]


def test_numbers_of_peers_are_those_of_the_results():
    """What peers.md says of memory follows from the result that it names."""
    found = json.loads((DOCS / "results" / "offload.json").read_text())["cases"]
    memory = {(each["model"], each["mbit_per_s"], each["side"]): each["memory_bytes"] for each in found}
    ratios = [memory[model, rate, "headwater"] / memory[model, rate, "plain"] for model, rate, side in memory
              if side == "plain"]  # fmt: skip
    text = (DOCS / "peers.md").read_text().replace("\n", " ")
    told = re.search(r"on the trainer ([\d.]+) to ([\d.]+) times the plain loop's", text)
    assert told
    assert (float(told[1]), float(told[2])) == (round(min(ratios), 1), round(max(ratios), 1))
