"""`python -m website`: build the site into site/."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from website.stage import ROOT, stage

HERE = Path(__file__).parent


def build(target: Path) -> int:
    """Strictly: a warning fails. What Sphinx keeps for itself stays out of the site."""
    with tempfile.TemporaryDirectory(prefix="headwater-site-") as scratch:
        source, kept = Path(scratch) / "source", Path(scratch) / "kept"
        stage(source)
        command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-E", "-d", kept,
                   "-c", HERE, source, target]  # fmt: skip
        code = subprocess.run(list(map(str, command)), check=False).returncode
    (target / ".buildinfo").unlink(missing_ok=True)
    return code


def main() -> int:
    target = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "site"
    code = build(target)
    if code == 0:
        print(f"the site is in {target}; open {target / 'index.html'} in a browser (no server is needed)")
    return code


if __name__ == "__main__":
    sys.exit(main())
