"""Every command in the documents is one that there is, with options that it has; nothing of them is run."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from tests.docs.blocks import ROOT, all_blocks, pages, prose_of

from headwater.cli import typer_app

GROUP = typer.main.get_command(typer_app)
MAKE = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Programs of others: what they take is theirs to say.
OTHERS = {"openssl", "docker", "kubectl", "cp", "systemctl", "export", "sysctl", "ssh", "git", "cd", "curl"}
PYTHON = ("python", "python3", ".venv/bin/python")


def commands(text: str):
    """The words of each line that is a command; comments and continued lines are put right."""
    for line in text.replace("\\\n", " ").split("\n"):
        for part in re.split(r"\s#\s|\s#$", line)[0].split("&&"):
            part = part.strip().removeprefix("sudo ").split(" > ")[0].split(" >> ")[0]
            if part.split(" ")[0] in {"headwater", "make", "pip", *PYTHON, *OTHERS}:
                yield shlex.split(part)


def written():
    """(where, words) of every command in a block, and of every one in running text that begins with a word of ours."""
    for block in all_blocks():
        if block.kind in ("", "bash", "sh", "console"):
            for words in commands(block.text):
                yield block.name, words
    for page in pages():
        for code in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", prose_of(page)):
            words = code.replace("\n", " ").split(" ")
            if words[0] in ("headwater", "make", "pip", *PYTHON) and len(words) > 1 and "'" not in words[1]:
                yield str(page.relative_to(ROOT)), [*words, "…"]  # as a rule a part of one


WRITTEN = list(written())


def test_there_are_commands_to_check():
    assert sum(words[0] == "headwater" for _, words in WRITTEN) > 40


def of(*programs):
    found = [(where, words) for where, words in WRITTEN if words[0] in programs]
    return [pytest.param(words, id=f"{where} {' '.join(words)}"[:120]) for where, words in found]


@pytest.mark.parametrize("words", of("headwater"))
def test_a_verb_and_its_options_are_there(words):
    if words[1].startswith("-"):
        known = {option for each in GROUP.params for option in each.opts} | {"--help"}
        assert set(words[1:]) - {"…"} <= known
        return
    verb = GROUP.commands[words[1]]
    if "…" not in words:
        verb.make_context(words[1], words[2:])  # as the command line is read; nothing is called
        return
    known = {option for each in verb.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
    given = {word.split("=")[0] for word in words[2:] if re.match(r"--?[a-z]", word)}
    assert given <= known, f"headwater {words[1]} has no {', '.join(sorted(given - known))}"


@pytest.mark.parametrize("words", of("make"))
def test_a_target_of_make_is_there(words):
    assert next(word for word in words[1:] if "=" not in word and word != "…") in MAKE


@pytest.mark.parametrize("words", of("pip"))
def test_an_extra_is_there(words):
    for extras in re.findall(r"\[([\w,-]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(EXTRAS)


@pytest.mark.parametrize("words", of(*PYTHON))
def test_a_module_or_a_file_is_there(words):
    from bench.__main__ import BENCHMARKS
    from bench.scenarios.page import NAMES

    if words[1] != "-m":
        assert words[1].startswith("-") or (ROOT / words[1]).exists()
        return
    module, rest = words[2], [word for word in words[3:] if word != "…"]
    if module in ("venv", "pip", "http.server", "headwater.cli"):
        return
    path = ROOT / module.replace(".", "/")
    assert path.is_dir() or path.with_suffix(".py").exists(), f"there is no {module}"
    name = next((word for word in rest if re.fullmatch(r"[a-z][a-z-]*", word)), None)
    if module == "bench" and name:
        assert name in BENCHMARKS
    if module == "bench.scenarios" and name:
        assert name in NAMES


def test_options_in_running_text_are_options_of_something():
    """`--like-this`, alone: of a verb of ours, of a benchmark, or of the rig."""
    known = {option for verb in GROUP.commands.values() for each in verb.params for option in each.opts}
    known |= {option for each in GROUP.params for option in each.opts}
    for path in [*(ROOT / "bench").rglob("*.py"), *(ROOT / "website").rglob("*.py"), *(ROOT / "examples").glob("*.py")]:
        known |= set(re.findall(r'"(--[a-z][\w-]*)"', path.read_text()))
    lost = {}
    for page in pages():
        for option in re.findall(r"`(--[a-z][\w-]*\w)(?![\w-])[^`]*`", prose_of(page)):
            if option not in known and option != "--help":
                lost.setdefault(option, []).append(page.name)
    assert not lost


def test_every_environment_variable_of_ours_is_read_somewhere():
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "bench").rglob("*.py"), *(ROOT / "tests").rglob("*.py"),
             *(ROOT / "deploy").rglob("*.yaml")]  # fmt: skip
    sources = "\n".join(path.read_text() for path in files)
    for page in pages():
        for name in set(re.findall(r"\bHEADWATER_[A-Z_]+", Path(page).read_text())):
            assert name in sources, f"{page.name}: nothing reads {name}"
