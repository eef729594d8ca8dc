"""Runs a system program (`ip`, `tc`) and turns its failure into a RigError."""

from __future__ import annotations

import subprocess

from bench.rig.description import RigError


def tool(*command: str) -> str:
    """What the command printed."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RigError(f"`{' '.join(command)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
