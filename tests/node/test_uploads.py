"""A prefix is uploaded once, kept by digest, and never run unless it is a self-contained ONNX model."""

import contextlib
import errno
import hashlib
import io
import os
import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from headwater.data import wire
from headwater.errors import ConfigError, RefusedError
from headwater.node import prefixes
from headwater.node.service import Node
from headwater.train.client import NodeClient


def leftovers(state):
    return sorted(path.name for path in (state / "prefixes").iterdir())


def test_a_prefix_runs_beside_the_pictures(upload, client, build, chunk_of, never, pictures):
    prefix = upload(build.model())
    reply = client.rows(chunk_of(prefix), never)
    pixels = client.rows(chunk_of(), never)
    expected = pixels.tensors[0].astype(np.float32).mean(axis=(1, 2)) / 255
    np.testing.assert_allclose(reply.tensors[0], expected, rtol=1e-5)
    assert reply.good.all()


def test_a_second_job_uploads_nothing_even_after_a_restart(client, build, tmp_path, state, pictures, monkeypatch):
    data = build.model()
    path = tmp_path / "prefix.onnx"
    path.write_bytes(data)
    client.needs(build.digest(data), path)
    client.prepare()

    def no_upload(self, digest, path):
        raise AssertionError("uploaded again")

    monkeypatch.setattr(NodeClient, "upload", no_upload)
    client.prepare()
    again = Node("grpc://127.0.0.1:0", (str(pictures),), state=state, num_threads=1)
    other = NodeClient(f"grpc://127.0.0.1:{again.port}")
    try:
        other.needs(build.digest(data), path)
        other.prepare()
    finally:
        other.close()
        again.stop(5)


class Evil:
    """Unpickling it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def torch_file(path):
    buffer = io.BytesIO()
    torch.save({"model": Evil(path)}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("make", [lambda path: pickle.dumps(Evil(path)), torch_file], ids=["pickle", "torch.save"])
def test_a_malicious_upload_does_not_run(upload, tmp_path, make, state, client):
    trap = tmp_path / "trap"
    with pytest.raises(RefusedError, match=r"not an ONNX file|not a model"):
        upload(make(trap))
    assert not trap.exists()
    assert leftovers(state) == []
    assert client.hello()["protocol"] == wire.PROTOCOL


def uploads(build):
    model = build.model()
    return {
        "random bytes": np.random.default_rng(0).bytes(5000),
        "empty": b"",
        "truncated": model[: len(model) // 2],
        "one byte short": model[:-1],
        "text": b"<html>",
        "absolute file": build.with_a_tensor_in("/etc/passwd"),
        "file above": build.with_a_tensor_in("../x"),
        "file beside": build.with_a_tensor_in("x"),
        "custom operator": build.model(domain="evil.domain"),
        "ORT format": b"\x18\x00\x00\x00ORTM" + bytes(100),
    }


@pytest.mark.parametrize("name", uploads(type("B", (), {"model": lambda domain="": b"", "with_a_tensor_in": id})))
def test_what_is_no_whole_model_is_refused_and_leaves_nothing(
    name, build, upload, state, client, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_bytes(bytes(12))
    with pytest.raises(RefusedError, match="the prefix"):
        upload(uploads(build)[name])
    assert leftovers(state) == []
    assert client.hello()["protocol"] == wire.PROTOCOL


def test_weights_in_another_file_are_named_as_the_fault(build, upload):
    with pytest.raises(RefusedError, match="weights in another file"):
        upload(build.with_a_tensor_in("/etc/passwd"))


def test_a_wrong_digest_is_refused(build, upload, state):
    with pytest.raises(RefusedError, match=r"sha256.*upload it again"):
        upload(build.model(), digest="0" * 64)
    assert leftovers(state) == []


def test_a_prefix_above_the_limit_is_refused_with_the_flag_that_raises_it(upload, state):
    with pytest.raises(RefusedError, match="--max-upload"):
        upload(bytes(5_000_000))
    assert leftovers(state) == []


@pytest.mark.parametrize(("module", "name"), [(tempfile, "mkstemp"), (os, "replace")])
def test_a_full_disk_refuses_an_upload_with_the_folder_and_the_way_out(build, upload, state, monkeypatch, module, name):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, name, full)
    with pytest.raises(RefusedError, match=rf"{state}/prefixes: No space left on device; make room .*--state FOLDER"):
        upload(build.model())
    monkeypatch.undo()
    assert leftovers(state) == []
    assert upload(build.model())


def test_a_damaged_stored_prefix_is_asked_for_again(build, upload, client, state, pictures, chunk_of, never, tmp_path):
    prefix = upload(build.model())
    stored = state / "prefixes" / f"{prefix}.onnx"
    stored.write_bytes(stored.read_bytes()[:-3] + b"abc")
    again = Node("grpc://127.0.0.1:0", (str(pictures),), state=state, num_threads=1)
    other = NodeClient(f"grpc://127.0.0.1:{again.port}")
    try:
        other.needs(prefix, tmp_path / "upload.onnx")
        assert other.rows(chunk_of(prefix), never).good.all()
        assert hashlib.sha256(stored.read_bytes()).hexdigest() == prefix
    finally:
        other.close()
        again.stop(5)


def test_parts_of_killed_uploads_are_swept_at_the_next_start(state, pictures):
    folder = state / "prefixes"
    folder.mkdir(parents=True)
    (folder / "999999999-x.part").write_bytes(b"half")
    (folder / f"{os.getpid()}-x.part").write_bytes(b"under way")
    Node("grpc://127.0.0.1:0", (str(pictures),), state=state, num_threads=1).stop(5)
    assert leftovers(state) == [f"{os.getpid()}-x.part"]


def test_the_folder_of_prefixes_stays_within_its_limit_and_drops_the_longest_unused(tmp_path, monkeypatch):
    for check in ("check_self_contained", "check_upload"):
        monkeypatch.setattr(prefixes, check, lambda *args: None)
    monkeypatch.setattr(prefixes, "FILES_KEPT", 2)
    kept = prefixes.Prefixes(tmp_path, max_bytes=10, try_out=lambda path: None)
    digests = []
    for number in range(4):
        data = bytes([number]) * 8
        digests.append(hashlib.sha256(data).hexdigest())
        kept.put(digests[-1], [data])
        os.utime(tmp_path / f"{digests[-1]}.onnx", (number, number))
    assert [digest in kept for digest in digests] == [False, False, True, True]


def test_what_is_loaded_runs_on_though_its_file_made_room_for_others(build, upload, client, state, chunk_of, never):
    prefix = upload(build.model())
    assert client.rows(chunk_of(prefix), never).good.all()
    (state / "prefixes" / f"{prefix}.onnx").unlink()
    assert client.rows(chunk_of(prefix), never).good.all()


def test_a_prefix_that_is_asked_for_is_the_last_to_go(build, upload, client, state, chunk_of, never, monkeypatch):
    prefix = upload(build.model())
    assert client.rows(chunk_of(prefix), never).good.all()
    file = state / "prefixes" / f"{prefix}.onnx"
    os.utime(file, (1, 1))
    monkeypatch.setattr(prefixes, "TOUCH_EVERY_S", 0.0)
    assert client.rows(chunk_of(prefix), never).good.all()
    assert file.stat().st_mtime > 1


def test_chunks_that_are_refused_together_send_the_prefix_once(build, client, chunk_of, never, tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_bytes(build.model())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    client.needs(digest, path)
    sent, whole = [], client.upload
    monkeypatch.setattr(client, "upload", lambda *what: (sent.append(what), whole(*what)))
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: client.rows(chunk_of(digest), never), range(4)))
    assert all(reply.good.all() for reply in replies)
    assert len(sent) == 1


def test_a_prefix_whose_own_file_is_gone_is_not_the_nodes_fault(client, tmp_path):
    with pytest.raises(ConfigError, match="start the job again"):
        client.upload("0" * 64, tmp_path / "gone.onnx")


def test_a_trainer_that_hangs_up_is_not_a_full_disk(tmp_path, build):
    held, model = prefixes.Prefixes(tmp_path, 1 << 30, try_out=lambda path: None), build.model()

    @contextlib.contextmanager
    def room(num_bytes):
        raise BrokenPipeError("the trainer has hung up")
        yield

    with pytest.raises(BrokenPipeError):
        held.put(hashlib.sha256(model).hexdigest(), [model], room)
    assert not any(tmp_path.iterdir())


def test_an_upload_that_waits_for_its_turn_gives_signs_of_life(tmp_path, build, monkeypatch):
    monkeypatch.setattr(prefixes, "SIGN_EVERY_S", 0.01)
    held = prefixes.Prefixes(tmp_path, 1 << 30, try_out=lambda path: None)
    signs, model = [], build.model()
    for _ in range(prefixes.TRIED_AT_ONCE):
        held._trying.acquire()

    def sign():
        signs.append(1)
        if len(signs) == 3:
            held._trying.release()

    held.put(hashlib.sha256(model).hexdigest(), [model], sign=sign)
    assert len(signs) == 3
