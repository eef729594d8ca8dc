"""What workers and the aggregator say over TCP: joining, starting, leaving. Owns `Lines`, proofs, tags and keys.

One JSON object a line. The connection stays open for as long as the job runs: it tells both sides at once when the
other one is gone. Nobody says the key: each side proves that it has it by an HMAC over the other's nonce, and the
packets' tags are made from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Any

from headwater.core.form import shown
from headwater.core.plain import plain
from headwater.core.redact import TOKEN_START
from headwater.errors import ConfigError

PROTOCOL = 2
MAX_LINE_BYTES = 1 << 16
KEY_VARIABLE = "HEADWATER_REDUCE_KEY"
LEAST_KEY = 16  # characters


class Lines:
    """A connection that says and hears JSON objects; never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._heard = bytearray()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer whose machine went away says nothing: found out after about 5 + 3·2 s.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 5),
            ("TCP_KEEPINTVL", 2),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 11_000),
        ):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self.sock.fileno()

    def say(self, **what: Any) -> bool:
        """Whether the kernel took it. Lines are short and few: a peer that has no room for one has stopped reading."""
        line = json.dumps(what).encode() + b"\n"
        try:
            return self.sock.send(line) == len(line)
        except OSError:
            return False

    def hear(self) -> list[dict[str, Any]] | None:
        """What has come; None: the other side is gone, or talks nonsense."""
        try:
            while said := self.sock.recv(MAX_LINE_BYTES):
                self._heard += said
                if len(self._heard) > MAX_LINE_BYTES:
                    return None
            is_over = True
        except BlockingIOError:
            is_over = False
        except OSError:
            return None
        *lines, rest = bytes(self._heard).split(b"\n")
        self._heard = bytearray(rest)
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        if not all(isinstance(each, dict) for each in found) or (is_over and not found):
            return None
        return found

    @property
    def has_more(self) -> bool:
        """Something came that is no whole line yet."""
        return bool(self._heard)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


def said_of(value: object) -> str:
    """What the other side said, in words: it may be anything, and too deep to be written out."""
    return plain(value)[:2000] if isinstance(value, str) else shown(value)


def nonce() -> str:
    return secrets.token_hex(16)


def proof(key: bytes, *parts: object) -> str:
    """What only somebody with the key can say about these."""
    text = "".join(f"{len(str(part))}:{part}," for part in parts)  # no two lists of parts have the same text
    said = text.encode("utf-8", "surrogatepass")  # strangers may say half a character, which JSON has
    return hmac.new(key, said, hashlib.sha256).hexdigest()


def is_proof(said: object, key: bytes, *parts: object) -> bool:
    return isinstance(said, str) and hmac.compare_digest(said.encode(errors="replace"), proof(key, *parts).encode())


def tag_of(key: bytes, *parts: object) -> int:
    """64 bits that nobody guesses who has not seen a packet of that job; never 0."""
    return int(proof(key, "tag", *parts)[:16], 16) or 1


def tag_bytes(tag: int) -> bytes:
    return tag.to_bytes(8, "little")


def key_bytes(key: str | None) -> bytes:
    """The key of a worker: given, or in the environment; empty if there is none."""
    text = os.environ.get(KEY_VARIABLE, "") if key is None else key
    return _checked(text.strip(), "key=" if key is not None else KEY_VARIABLE) if text else b""


def read_keys(path: Path) -> list[bytes]:
    """The keys of an aggregator's file, one a line; a file that is not there is made, with one new key."""
    try:
        if not path.exists():
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(TOKEN_START + secrets.token_urlsafe(32) + "\n")
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"the key file {path} can be read by others; chmod 600 {path}")
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} can't be read or made: {error}") from None
    keys = [_checked(line, f"the key file {path}") for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"the key file {path} has no key; remove it, and `headwater reduce` makes one")
    return keys


def _checked(key: str, where: str) -> bytes:
    if len(key) < LEAST_KEY:
        raise ConfigError(f"{where} has a key of {len(key)} characters; {LEAST_KEY} are needed, and `headwater reduce "
                          "--key-file FILE` makes a good one")  # fmt: skip
    return key.encode()


def address(text: str, what: str) -> tuple[str, int]:
    """HOST:PORT as a pair."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{what} is {text!r}; it must look like 10.0.0.5:8816")
    return host.strip("[]"), int(port)
