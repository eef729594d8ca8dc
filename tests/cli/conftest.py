"""The command as a user runs it: in a process of its own, with a model from a module of theirs."""

import os
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from headwater.cli import typer_app

MODULE = """
import torch
from torch import nn

def tiny(num_classes=3):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    head = nn.Sequential(nn.Dropout(0.3), nn.Linear(16, num_classes))
    return nn.Sequential(body, head)

def not_a_model():
    return 5

def explodes():
    raise ValueError("no weights here")
"""
# For runs that are about something else: nothing is measured and planned, which takes longer than all the rest.
PLANNED = '[plan]\ncut = "0"'


class Command:
    """headwater ARGS, run in `folder` with its modules on the path."""

    planned = PLANNED

    def __init__(self, folder):
        self.folder = folder
        (folder / "users_models.py").write_text(MODULE)
        (folder / "breaks_as_it_is_imported.py").write_text('raise RuntimeError("no such operator")')
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        self.env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}

    def start(self, *args):
        return subprocess.Popen(
            [sys.executable, "-m", "headwater.cli", *map(str, args)], cwd=self.folder, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def __call__(self, *args):
        with self.start(*args) as process:
            try:
                process.out, process.err = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process

    def here(self, *args):
        """The same in this process, which saves the import of torch; raises what the command raises."""
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(self.folder))
            return CliRunner().invoke(typer_app, [*map(str, args)], catch_exceptions=False, env={"COLUMNS": "200"})

    def job(self, name, data, extra="", **train):
        settings = "\n".join(f"{key} = {value}" for key, value in {"epochs": 1, "batch_size": 4, **train}.items())
        path = self.folder / f"{name}.toml"
        path.write_text(textwrap.dedent("""
            [model]
            name = "users_models:tiny"
            freeze_until = "1"
            [data]
            url = "{data}"
            transforms = [{{op = "Resize", size = [32, 32]}}, {{op = "ToFloat"}}]
            {extra}
            [train]
            output = "{name}"
            {settings}
        """).format(data=data, extra=extra, name=name, settings=settings))  # fmt: skip
        return path


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    return Command(tmp_path_factory.mktemp("cli"))
