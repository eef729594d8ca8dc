"""The stage of `bench faults`: three nodes that share a store, one more with its cache on a small disk, and a trainer.
Two of the three keep tables, too.

Owns `Scene`: what can be broken, and how it is made whole again. Nodes speak TLS and ask for a token; the store is
behind a proxy that can fail (`bench.badstore`). A node comes back on its port and with its state folder.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

from bench import badstore, pictures, traces
from bench.faulty import PIXELS, RESIZED
from bench.rig import Host, Node, Rig, RigUp
from bench.rig.python import python
from bench.rig.remote import Remote
from bench.rig.upload import upload
from bench.trained import STEPS
from headwater.core.access import entry_text, token_digest
from headwater.core.redact import TOKEN_START

NODES = ("a", "b", "c")
CACHED = "d"  # the node that keeps rows
BUCKET = "photos"
NUM_CLASSES = 10
DISK_BYTES, CACHE_BYTES = 16 << 20, 8 << 20
# job → where its data is, and its nodes
TRAINING = ("a", "b")  # those of jobs that train on nodes
JOBS = {"pictures": ("plain", NODES), "packed": ("packed", NODES), "cached": ("plain", (CACHED,)),
        "cold": ("plain", (CACHED,)), "partitioned": ("plain", TRAINING), "embedded": ("", TRAINING)}  # fmt: skip
_PROXY_PORT = 9000
END_WITHIN_S = 60.0
_NO_ROOM = "no rows are kept on disk from now on"
RIG = Rig(
    storage=tuple(Host(name, cores=(0,)) for name in (*NODES, CACHED)),
    trainers=(Host("trainer", cores=(1,)),),
    store=Host("store", cores=(0, 1), cpu=2.0),
)


class Scene:
    """All of it, up."""

    def __init__(self, up: RigUp, scratch: Path, stack: ExitStack, num_pictures: int, seed: int) -> None:
        self.up, self._scratch, self._stack = up, scratch, stack
        self.random = random.Random(seed)
        self.num_samples = num_pictures
        # Answers of the store that were spoiled, kept rows that were found damaged, caches that met a full disk.
        self.num_hits = 0
        self._num_spoiled = self._num_damaged = 0
        self.nodes: dict[str, Node] = {}
        self._opened: set[str] = set()
        self._tokens, self._secret = scratch / "tokens.toml", TOKEN_START + "x" * 43
        self.checkpoint = scratch / "checkpoint"
        self.renew()
        self._certify()
        (scratch / "tmp").mkdir()
        folder, self.what = pictures.folder(scratch, num_pictures, NUM_CLASSES)
        store = up.start_store()
        listen = (up.address("store"), _PROXY_PORT)
        self._store = stack.enter_context(up.open("store", "bench.badstore:BadStore", listen=listen, seed=seed,
                                                  store=badstore.address(store.endpoint)))  # fmt: skip
        self._env = {**store.env, "XDG_CACHE_HOME": f"{scratch}/cache", "TMPDIR": f"{scratch}/tmp",
                     "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/cache/torch",  # else in TMPDIR, and stays there
                     "HEADWATER_TOKEN": self._secret, "HEADWATER_TLS_CA": f"{scratch}/node.pem"}  # fmt: skip
        self.trainer = self._start_trainer()
        up.run("store", python("headwater.cli", "pack", str(folder), f"{scratch}/packed", "--resize", str(RESIZED),
                               "--crop", str(PIXELS), "--shard-size", "1"))  # fmt: skip
        upload(up, store, folder, f"{BUCKET}/plain")
        upload(up, store, scratch / "packed", f"{BUCKET}/packed")
        self._env |= badstore.endpoint(listen)
        self._store.wait()
        self.disk = stack.enter_context(_disk(up.folder / "disk"))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self.start, (*NODES, CACHED)))

    def num_ids(self, job: str) -> int:
        """Of an epoch: samples, or steps on all nodes."""
        return STEPS * len(TRAINING) if job == "embedded" else self.num_samples

    # Nodes

    def start(self, name: str) -> None:
        """A node, where it was before."""
        options = ["--tokens", str(self._tokens), "--tls-cert", f"{self._scratch}/node.pem", "--tls-key",
                   f"{self._scratch}/node.key", "--threads", "1"]  # fmt: skip
        if name == CACHED:
            options += ["--cache-size", str(CACHE_BYTES), "--cache-dir", str(self.rows)]
            self._num_damaged = 0
        if name in TRAINING:
            options += ["--tables", f"{self._scratch}/tables-{name}", "--table-size", "1GB", "--table-memory", "64MB"]
        self.nodes[name] = self.up.start_node(name, [f"s3://{BUCKET}"], options=options, env=self._env)

    def kill(self, name: str) -> None:
        self.nodes[name].process.kill()
        self.nodes[name].process.wait()

    def restart(self, *names: str) -> None:
        """kill -9, all at once, and start them again."""
        for name in names:
            self.kill(name)
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(self.start, names))

    def end(self) -> list[str]:
        """End jobs and nodes in good order; what they leave behind while the rig is still up."""
        self.trainer.ask(do="close")
        for node in self.nodes.values():
            node.process.terminate()
        for node in self.nodes.values():
            node.process.wait(END_WITHIN_S)
        left = [f"process {pid} on host {name}" for name in self.nodes for pid in self.up.processes(name)]
        left += [f"table {path}" for path in self._scratch.glob("tables-*/**/*") if path.is_file()]
        return left + traces.locks_held(self._scratch) + traces.locks_held(self.up.folder)

    # The store

    def answer(self, mode: str) -> None:
        """How the store answers from now on: see `bench.badstore`."""
        spoiled = self._store.ask(mode=mode)
        self.num_hits += spoiled - self._num_spoiled
        self._num_spoiled = spoiled

    # The cache's disk

    @property
    def rows(self) -> Path:
        return self.disk / "rows"

    def empty_cache(self) -> None:
        """The node begins with nothing kept, and room."""
        self.kill(CACHED)
        self.free_disk()
        shutil.rmtree(self.rows, ignore_errors=True)
        self.start(CACHED)

    def fill_disk(self) -> None:
        with contextlib.suppress(OSError), (self.disk / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free_disk(self) -> None:
        (self.disk / "ballast").unlink(missing_ok=True)

    def flip_bits(self, count: int) -> None:
        """In files of kept rows and their keys, anywhere."""
        files = [path for path in sorted(self.rows.rglob("*")) if path.suffix in (".rows", ".keys")]
        files = [path for path in files if path.stat().st_size]
        for path in self.random.choices(files, k=count) if files else ():
            file = os.open(path, os.O_RDWR)
            try:
                place = self.random.randrange(os.fstat(file).st_size)
                old = os.pread(file, 1, place)
                os.pwrite(file, bytes([old[0] ^ 1 << self.random.randrange(8)]), place)
            finally:
                os.close(file)

    def count_full(self) -> None:
        """Whether the node has met the full disk, of which it says one line."""
        self.num_hits += _NO_ROOM in self.nodes[CACHED].log.read_text(errors="replace")

    def count_damaged(self) -> None:
        damaged = int(self.trainer.ask(do="damaged", name="cached", address=self.nodes[CACHED].address))
        self.num_hits += damaged - self._num_damaged
        self._num_damaged = damaged

    # Tokens

    def renew(self) -> None:
        self._write_tokens({})

    def expire(self) -> None:
        self._write_tokens({"expires": date(2020, 1, 1)})

    def _write_tokens(self, fields: dict[str, Any]) -> None:
        new = self._tokens.with_suffix(".new")
        new.write_text(entry_text("bench", token_digest(self._secret), fields))
        new.replace(self._tokens)

    def _certify(self) -> None:
        """One certificate for all nodes, which the trainer trusts as it is."""
        names = ",".join(f"IP:{self.up.address(host.name)}" for host in RIG.storage)
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                        "-keyout", "node.key", "-out", "node.pem", "-days", "2", "-subj", "/CN=node", "-addext",
                        f"subjectAltName={names}"], cwd=self._scratch, check=True, capture_output=True)  # fmt: skip

    # The trainer

    def ask(self, do: str, job: str, **arguments: Any) -> dict[str, Any]:
        """Have the trainer do this with a job, which is begun if it was not."""
        if job not in self._opened:
            place, names = JOBS[job]
            addresses = [self.nodes[name].address for name in names]
            self.trainer.ask(do="open", name=job, url=f"s3://{BUCKET}/{place}", nodes=addresses)
            self._opened.add(job)
        found: dict[str, Any] = self.trainer.ask(do=do, name=job, **arguments)
        return found

    def replace_trainer(self) -> None:
        """kill -9, and another one."""
        self.trainer.kill()
        self.trainer = self._start_trainer()
        self._opened.clear()

    def _start_trainer(self) -> Remote:
        trainer = self.up.open("trainer", "bench.faulty:Trainer", env=self._env, num_classes=NUM_CLASSES)
        return self._stack.enter_context(trainer)


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[Path]:
    """A disk of its own, and small."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
