"""Certificates of an authority of the tests' own, tokens, and a small data set."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from headwater.core.access import entry_text, token_digest

TOKENS = {name: f"hw_{name[0] * 43}" for name in ("all", "train", "old", "foreign", "later")}


@dataclass(frozen=True)
class Certificates:
    """Files in PEM. The node's and the client's are signed by `ca`; `other` is another authority."""

    folder: Path

    def __getattr__(self, name):
        return self.folder / name.replace("_", ".")


def openssl(folder, *args):
    done = subprocess.run(["openssl", *args], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("ca", "other"):
        openssl(folder, "req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2",
                "-subj", f"/CN={name}")  # fmt: skip
    for name in ("node", "client"):
        openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", "names", "-out", f"{name}.pem")  # fmt: skip
    return Certificates(folder)


def entry(name, **fields):
    return entry_text(name, token_digest(TOKENS[name]), fields)


@pytest.fixture(scope="session")
def tokens():
    return TOKENS


@pytest.fixture(scope="session")
def entry_of():
    """entry_of(name, **fields): what the tokens file has of one of the tokens."""
    return entry
