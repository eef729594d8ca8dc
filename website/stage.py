"""All documents in one folder, as the site has them.

Links in the documents are made for the repository: to files, to folders, to examples. Here each gets a page, and links
are changed to lead there. The list on docs/index.md is the site's navigation; nothing else says what it has.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from website.reference import reference

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"\s*(```+|~~~+)")
_REFERENCE = re.compile(r"^<!-- reference: ([\w.]+) -->$", re.MULTILINE)
# Folders that a link may name, with what stands on their page.
FOLDERS = {
    "decisions": ("Decisions", "One page each: the question, the choice, what was rejected, what would reverse it."),
    "results": ("Results", "What benchmarks and simulations wrote; [benchmarks.md](../benchmarks.md) says how to make "
                           "them again."),
    "examples": ("Examples", "Short programs, which the tests run."),
}  # fmt: skip


class StageError(Exception):
    """Links that lead nowhere, all of them."""


def navigation() -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, (title, link) of each page), as docs/index.md lists them."""
    found: list[tuple[str, list[tuple[str, str]]]] = []
    for line in (DOCS / "index.md").read_text().split("\n"):
        if heading := re.match(r"## (.+)", line):
            found.append((heading[1], []))
        elif found and (entry := re.match(r"- \[(.+?)\]\(([^)]+)\)", line)):
            found[-1][1].append((entry[1], entry[2]))
    return found


def sources() -> dict[Path, Path]:
    """A file of the repository → its page below the site's folder."""
    found = {ROOT / "README.md": Path("readme.md"), ROOT / "CHANGELOG.md": Path("changelog.md")}
    found |= {path: path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md"))}
    found |= {path: Path("examples", f"{path.stem}.md") for path in sorted((ROOT / "examples").glob("*.py"))}
    return found


def pages_of_folders() -> dict[Path, Path]:
    """The same for folders."""
    found = {(ROOT if name == "examples" else DOCS) / name: Path(name, "index.md") for name in FOLDERS}
    return {**found, DOCS / "scenarios": Path("scenarios", "README.md")}


def stage(target: Path) -> None:
    """Write everything that the site is made of into this folder."""
    pages, lost = sources(), list[str]()
    known = {**pages, **pages_of_folders()}
    for path in DOCS.rglob("*.png"):
        known[path] = path.relative_to(DOCS)
        _put(target / known[path], path.read_bytes())

    def lead(source: Path, link: str) -> str:
        """Where this link of a file leads on the site."""
        name, _, anchor = link.partition("#")
        if not name or "://" in name:
            return link
        to = Path(os.path.normpath(source.parent / name))
        if to not in known:
            lost.append(f"{source.relative_to(ROOT)}: {link}")
            return link
        return os.path.relpath(known[to], pages[source].parent) + (f"#{anchor}" if anchor else "")

    for source, page in pages.items():
        if source.suffix == ".py":
            text = _example(source)
        else:
            text = with_links(source.read_text(), lambda link, source=source: lead(source, link))
            text = _REFERENCE.sub(lambda match: reference(match[1]), text)
        _put(target / page, text.encode())
    for name, (title, about) in FOLDERS.items():
        # A result is called as its file is: quick runs and other machines' have the title of the benchmark.
        inside = {path.stem: path.stem if name == "results" else _title(path)
                  for path in sorted((target / name).glob("*.md"))}  # fmt: skip
        text = f"# {title}\n\n{about}\n\n" + "".join(f"- [{called}]({stem}.md)\n" for stem, called in inside.items())
        tree = _tree([f"{called} <{stem}>" for stem, called in inside.items()])
        _put(target / name / "index.md", (text + tree).encode())
    scenarios = target / "scenarios" / "README.md"
    others = sorted(path.stem for path in scenarios.parent.glob("*.md") if path != scenarios)
    _put(scenarios, (scenarios.read_text() + _tree(others)).encode())
    index = target / "index.md"
    for heading, entries in navigation():
        to = [(title, lead(DOCS / "index.md", link).removesuffix(".md")) for title, link in entries]
        _put(index, (index.read_text() + _tree([f"{title} <{page}>" for title, page in to], heading)).encode())
    if lost:
        raise StageError("\n".join(["links that lead nowhere:", *lost]))


def with_links(text: str, change: Callable[[str], str]) -> str:
    """The text with every link changed; those in code are none."""
    return "".join(LINK.sub(lambda match: f"]({change(match[1])})", part) if is_text else part
                   for is_text, part in _parts(text))  # fmt: skip


def links(text: str) -> list[str]:
    """Where a text leads."""
    return [match for is_text, part in _parts(text) if is_text for match in LINK.findall(part)]


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """(is it text, a part): code in fences, indented, and between backticks is none."""
    fence, after_empty = "", True
    for line in text.splitlines(keepends=True):
        if fence:
            yield False, line
            if line.strip().startswith(fence):
                fence = ""
        elif opened := _FENCE.match(line):
            fence = opened[1]
            yield False, line
        elif line.startswith("    ") and after_empty:
            yield False, line
            continue  # the next line of the block is behind this one as behind an empty line
        else:
            for place, part in enumerate(re.split(r"(`+[^`]*`+)", line)):
                yield place % 2 == 0, part
        after_empty = not line.strip()


def _example(path: Path) -> str:
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return f"# {path.name}\n\n{docstring.split(chr(10) * 2)[0]}\n\n```python\n{text}```\n"


def _title(path: Path) -> str:
    return next(line[2:] for line in path.read_text().split("\n") if line.startswith("# "))


def _tree(entries: list[str], caption: str = "") -> str:
    head = f":caption: {caption}\n" if caption else ""
    return "\n```{toctree}\n:hidden:\n" + head + "\n" + "\n".join(entries) + "\n```\n"


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
