"""Quotas: what is above them waits, goes, or is refused; and tenants don't see each other."""

import threading
from dataclasses import replace

import pyarrow as pa
import pytest

from headwater.core.access import Grant, Quota, entry_text, token_digest
from headwater.core.fair import Fair
from headwater.data import wire
from headwater.errors import RefusedError, UnreachableError
from headwater.node import quotas
from headwater.node.quotas import Quotas
from headwater.node.service import Node
from headwater.train.access import Access
from headwater.train.client import NodeClient

SCHEMA = pa.schema([("x", pa.int64())])
TOKENS = {name: f"hw_{name * 43}" for name in "ab"}


def grant(tenant="a", **quota):
    return Grant(tenant, "0" * 64, quota=Quota(**quota))


def test_no_more_streams_run_at_once_than_may_and_all_come_through(tmp_path):
    held, most, running, lock = Quotas(tmp_path), [0], [0], threading.Lock()

    def work():
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        yield "row"
        with lock:
            running[0] -= 1

    def one(found):
        found.append(
            [each for each in held.stream(grant(max_chunks=2), SCHEMA, work(), lambda: False, 8) if each == "row"]
        )

    found = []
    threads = [threading.Thread(target=one, args=(found,)) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [["row"]] * 8
    assert most[0] <= 2


def test_who_waits_gets_signs_of_life_and_another_tenant_does_not_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(quotas, "_POLL_S", 0.01)
    held = Quotas(tmp_path)
    first = held.stream(grant(max_chunks=1), SCHEMA, iter(["first"]), lambda: False, 8)
    assert next(first) == "first"
    second = held.stream(grant(max_chunks=1), SCHEMA, iter(["second"]), lambda: False, 8)
    signs = [next(second) for _ in range(3)]
    assert [sign[0].num_rows for sign in signs] == [0, 0, 0]
    assert {wire.unpack_waiting(sign[1]) for sign in signs} == {wire.Waiting(wire.QUOTA)}
    assert list(held.stream(grant("b", max_chunks=1), SCHEMA, iter(["other"]), lambda: False, 8)) == ["other"]
    first.close()
    assert list(second)[-1] == "second"


def test_rows_above_the_rate_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(quotas, "_POLL_S", 0.01)
    held, slow = Quotas(tmp_path), grant(rows_per_s=10)
    assert list(held.stream(slow, SCHEMA, iter(["at once"]), lambda: False, 1)) == ["at once"]
    later = list(held.stream(slow, SCHEMA, iter(["later"]), lambda: False, 1))
    assert later[-1] == "later"
    assert len(later) > 1


def test_nobody_waits_for_one_who_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(quotas, "_POLL_S", 0.01)
    held, slow = Quotas(tmp_path), grant(rows_per_s=1, max_chunks=1)
    for _ in range(3):
        assert list(held.stream(slow, SCHEMA, iter(["told"]), lambda: True, 10**6))[-1] == "told"


def test_a_queue_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(quotas, "_POLL_S", 0.01)
    monkeypatch.setattr(quotas, "MAX_WAITING", 1)
    held, few = Quotas(tmp_path), grant(max_chunks=1)
    inside, waiting, late = (held.stream(few, SCHEMA, iter(["x"]), lambda: False, 1) for _ in range(3))
    next(inside)
    next(waiting)
    with pytest.raises(RefusedError, match="1 requests of tenant a wait already; lower the plan's prefetch"):
        next(late)


def test_a_tenants_longest_unused_prefixes_go_first_and_nobody_elses(tmp_path):
    held, small = Quotas(tmp_path), grant(max_prefix_bytes=20)

    def upload(who, name):
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(bytes(8))
        held.uploaded(who, name)
        return path

    theirs = upload(grant("b"), "b1")
    mine = [upload(small, f"a{number}") for number in range(4)]
    assert [path.exists() for path in mine] == [False, False, True, True]
    assert theirs.exists()
    again = Quotas(tmp_path)  # after a restart
    last = tmp_path / "a9.onnx"
    last.write_bytes(bytes(20))
    again.uploaded(replace(small), "a9")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a9.onnx", "a9.tenant", "b1.onnx", "b1.tenant"]


@pytest.fixture
def tenants(pictures, state, tmp_path):
    """Two tenants of one node."""
    file = tmp_path / "tokens.toml"
    entries = {"a": {"max_chunks": 1, "rows_per_second": 1000, "weight": 3}, "b": {}}
    file.write_text("".join(entry_text(name, token_digest(TOKENS[name]), entries[name]) for name in "ab"))
    node = Node("grpc://127.0.0.1:0", (str(pictures),), state=state, num_threads=2, tokens=file)
    clients = {name: NodeClient(f"grpc://127.0.0.1:{node.port}", Access(TOKENS[name])) for name in "ab"}
    yield clients
    for each in clients.values():
        each.close()
    node.stop(5)


def test_a_tenant_sees_its_own_prefixes_alone(tenants, build, chunk_of, tmp_path, never):
    (tmp_path / "x.onnx").write_bytes(build.model())
    prefix = build.digest(build.model())
    tenants["a"].upload(prefix, tmp_path / "x.onnx")
    replies = []
    threads = [
        threading.Thread(target=lambda: replies.append(tenants["a"].rows(chunk_of(prefix), never))) for _ in range(3)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [reply.good.all() for reply in replies] == [True] * 3  # one after the other
    assert [each["digest"] for each in tenants["a"].hello()["prefixes"]] == [prefix]
    assert tenants["b"].hello()["prefixes"] == []


def test_a_trainer_that_waits_for_its_quota_knows_and_says_so_once(tenants, chunk_of, never, monkeypatch, caplog):
    free, enter = threading.Event(), Quotas._enter
    monkeypatch.setattr(Quotas, "_enter", lambda held, grant: free.wait(0.01) and enter(held, grant))
    for _ in range(2):
        free.clear()
        chunk, found = chunk_of(), []
        asking = threading.Thread(target=lambda chunk=chunk, found=found: found.append(tenants["a"].rows(chunk, never)))
        asking.start()
        while not (heard := tenants["a"].heard(chunk)) or heard.waits_for != wire.QUOTA:
            asking.join(0.01)
            assert asking.is_alive()
        free.set()
        asking.join(60)
        assert found[0].good.all()
    assert caplog.text.count("waiting for the quota of this token there") == 1
    assert len(tenants["a"].list_samples(wire.Listing(chunk.extraction.url))) == 50


def test_prefixes_that_are_only_named_are_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(quotas, "MAX_USED", 3)
    held, here = Quotas(tmp_path), [f"{number:064}" for number in range(5)]
    for digest in here:
        (tmp_path / f"{digest}.onnx").touch()
    for digest in [*here, *(f"{number:064}" for number in range(1000, 2000))]:
        held.uses(grant(), digest)
    assert [each["digest"] for each in held.shown(grant(), [{"digest": each} for each in here])] == here[-3:]
    assert len(held._used["a"]) == 3


def test_a_tokens_weight_is_that_of_its_jobs(tenants, chunk_of, never, monkeypatch):
    seen, put = {}, Fair.put

    def noted(self, tenant, urgency, task, weight=1.0, *place):
        seen[tenant.partition("/")[0]] = weight
        put(self, tenant, urgency, task, weight, *place)

    monkeypatch.setattr(Fair, "put", noted)
    for name in "ab":
        assert tenants[name].rows(chunk_of(None), never).good.all()
    assert seen == {"a": 3.0, "b": 1.0}


def test_uploads_under_way_together_have_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(quotas, "UPLOADS_AT_ONCE", 2)
    held, allowed = Quotas(tmp_path), grant(max_upload_bytes=10)
    first, second = (held.pieces(allowed, iter([b"x" * 9]), 100) for _ in range(2))
    assert next(first) == next(second) == b"x" * 9
    with pytest.raises(RefusedError, match="one after the other"):
        next(held.pieces(allowed, iter([b"x" * 9]), 100))
    assert list(first) == []
    assert next(held.pieces(allowed, iter([b"x" * 9]), 100))


def test_a_session_waits_for_its_turn_like_any_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(quotas, "_POLL_S", 0.01)
    held, few, waited = Quotas(tmp_path), grant(max_chunks=1), []
    first = held.stream(few, SCHEMA, iter(["first"]), lambda: False, 1)
    next(first)

    def waits():
        waited.append(True)
        if len(waited) == 3:
            first.close()

    def gives_up():
        raise UnreachableError

    with held.session(few, waits):
        assert len(waited) == 3
        with pytest.raises(UnreachableError), held.session(few, gives_up):
            pass
    with held.session(few, gives_up):  # who gave up has left nothing behind
        pass
