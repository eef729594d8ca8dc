"""The package as it is handed out: the wheel and the sdist, in clean environments; and completion in a shell."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STATIC = {f"headwater/page/static/{name}" for name in ("index.html", "page.css", "page.js", "icon.svg")}


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=1100, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The wheel, and the sdist that it was made from, as `python -m build` makes them, in a copy of the sources."""
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    tracked = run(
        "git", "ls-files", "-co", "--exclude-standard", "src", "pyproject.toml", "README.md", "LICENSE", cwd=ROOT
    )
    for name in tracked.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools import build_meta as b; print(b.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", build, folder, cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        sdist,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel, sdist


@pytest.mark.slow
def test_wheel_and_sdist_have_the_page_and_every_module(dist):
    wheel, sdist = dist
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert STATIC | modules | {"headwater/py.typed"} <= names
    with tarfile.open(sdist) as archive:
        assert {f"src/{each}" for each in STATIC | modules} <= {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "openvino", "int8", "train"])
def test_the_wheel_installs_and_runs_in_a_clean_environment(dist, tmp_path, extra):
    """A node's has no torch, and serves; a trainer's has it, and imports everything."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pins = ("-c", ROOT / "constraints.txt")
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        *pins,
        f"{dist[0]}[{extra}]" if extra else dist[0],
        env=env,
        cwd=tmp_path,
    )
    command = tmp_path / "venv" / "bin" / "headwater"
    assert "serve" in run(command, "--help", env=env, cwd=tmp_path)
    said = run(command, "doctor", "--json", env=env, cwd=tmp_path)
    assert '"wrong": 0' in said
    assert ("storage node" in said) == (extra != "train")
    code = "import importlib.util, headwater, headwater.page; assert len(headwater.page.static()) == 4; " \
           "print(importlib.util.find_spec('torch') is not None)"  # fmt: skip
    assert run(python, "-c", code, env=env, cwd=tmp_path).strip() == str(extra == "train")
    if extra == "train":
        run(python, "-c", "import headwater as hw; [getattr(hw, name) for name in hw.__all__]", env=env, cwd=tmp_path)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_verbs_and_options(shell):
    env = {**os.environ, "_HEADWATER_COMPLETE": f"source_{shell}"}
    script = run(sys.executable, "-c", "from headwater.cli import app; app(prog_name='headwater')", env=env)
    assert "headwater" in script
    args = {"_TYPER_COMPLETE_ARGS": "headwater do"}
    asked = {"bash": {"COMP_WORDS": "headwater do", "COMP_CWORD": "1"}, "zsh": args,
             "fish": {**args, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}}[shell]  # fmt: skip
    env = {**os.environ, "_HEADWATER_COMPLETE": f"complete_{shell}", **asked}
    code = "from headwater.cli import app; app(prog_name='headwater')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert "doctor" in done.stdout


def test_installing_completion_writes_the_users_shell_files(tmp_path):
    env = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    code = "import sys; from headwater.cli import app; sys.argv = ['headwater', '--install-completion', 'bash']; app()"
    run(sys.executable, "-c", code, env=env)
    assert "headwater" in (tmp_path / ".bashrc").read_text()
    assert any("_HEADWATER_COMPLETE" in path.read_text() for path in tmp_path.rglob("*.sh"))
