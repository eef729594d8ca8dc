"""What a node counts, and that the documentation names all of it."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headwater.errors import ConfigError, RefusedError, UnreachableError
from headwater.node.calls import ANYONE, Asked, Calls, tenant_of
from headwater.node.metrics import METRICS, metrics_text

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture
def scrape(node):
    """{(name, label values): value} of everything at /metrics."""

    def look():
        families = text_string_to_metric_families(metrics_text(node.hello(), node.calls, 0))
        return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}

    return look


def test_every_metric_is_documented_with_its_labels_and_every_documented_one_is_there():
    rows = re.findall(r"^\| `((?:headwater|process)_\w+)` \| ([\w, ]*?) *\|", DOCS.read_text(), re.MULTILINE)
    documented = {name: tuple(filter(None, labels.split(", "))) for name, labels in rows}
    assert documented == {metric.name: metric.labels for metric in METRICS}


def test_names_elsewhere_in_the_documentation_are_real_ones():
    mentioned = set(re.findall(r"\b(?:headwater|process)_[a-z_]+\b", DOCS.read_text()))
    assert mentioned <= {metric.name for metric in METRICS}


def test_after_some_work_every_metric_has_a_value(node, client, upload, build, chunk_of, never, scrape):
    client.rows(chunk_of(upload(build.model())), never)
    with pytest.raises(ConfigError):
        client._act("no such action")
    found = scrape()
    assert {name for name, *_ in found} == {metric.name for metric in METRICS}


def test_rows_bytes_and_requests_are_counted_by_tenant(client, chunk_of, never, scrape):
    chunk = chunk_of()
    reply = client.rows(chunk, never)
    found = scrape()
    assert found["headwater_rows_sent_total", ANYONE] == len(chunk.samples)
    assert 0 < found["headwater_row_bytes_sent_total", ANYONE] <= reply.num_bytes
    assert found["headwater_requests_total", ANYONE, "rows", "done"] == 1
    assert found["headwater_requests_under_way", ANYONE, "rows"] == 0
    assert found["headwater_group_rows", ANYONE] == chunk.extraction.node_batch
    assert found[("headwater_chunks_waiting",)] == 0


def test_a_bad_sample_is_counted(client, chunk_of, never, scrape):
    chunk = chunk_of()
    bad = replace(chunk.samples[0], length=7)  # cut short
    client.rows(replace(chunk, samples=(bad, *chunk.samples[1:])), never)
    assert scrape()["headwater_bad_samples_total", ANYONE] == 1


def test_an_error_is_counted_by_kind_and_logged_once_without_a_traceback(client, chunk_of, never, scrape, caplog):
    chunk = chunk_of()
    elsewhere = replace(chunk, extraction=replace(chunk.extraction, url="file:///etc"))
    with pytest.raises(RefusedError):
        client.rows(elsewhere, never)
    found = scrape()
    assert found["headwater_errors_total", ANYONE, "RefusedError"] == 1
    assert found["headwater_requests_total", ANYONE, "rows", "failed"] == 1
    (record,) = [each for each in caplog.records if each.name == "headwater.node.calls"]
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert "is not below what this node serves" in record.getMessage()
    assert record.fields == {"request": "rows", "tenant": ANYONE, "job": "job", "epoch": 0, "chunk": 0,
                             "error": "RefusedError"}  # fmt: skip


def test_a_request_that_makes_no_sense_is_counted_as_unreadable(raw, scrape):
    import pyarrow.flight as flight

    with pytest.raises(flight.FlightServerError):
        raw.do_get(flight.Ticket(b"{")).read_all()
    assert scrape()["headwater_requests_total", ANYONE, "unreadable", "failed"] == 1


def test_what_nobody_foresaw_is_logged_with_its_traceback(node, client, chunk_of, never, scrape, caplog, monkeypatch):
    monkeypatch.setattr(node, "_store", lambda url: 1 / 0)
    with pytest.raises(Exception, match="unexpected ZeroDivisionError"):
        client.rows(chunk_of(), never)
    assert scrape()["headwater_errors_total", ANYONE, "unexpected"] == 1
    (record,) = [each for each in caplog.records if each.name == "headwater.node.calls"]
    assert record.levelname == "ERROR"
    assert record.exc_info[0] is ZeroDivisionError


def test_a_stranger_can_not_fill_the_log(caplog):
    calls = Calls()

    def fail():
        with calls.watched(Asked("rows")):
            raise ConfigError("nonsense")

    for _ in range(500):
        with pytest.raises(ConfigError):
            fail()
    assert 50 <= len(caplog.records) < 100
    assert ("errors", (ANYONE, "ConfigError"), 500) in calls.items()


def test_a_trainer_that_goes_away_is_no_error(caplog):
    calls = Calls()
    rows = calls.stream(Asked("listing"), iter(range(3)))
    next(rows)
    rows.close()
    assert ("requests", (ANYONE, "listing", "abandoned"), 1) in calls.items()
    assert not caplog.records


def test_a_node_that_drains_takes_nothing_new_and_says_when_it_may_end(caplog):
    calls, ends = Calls(drain_s=100.0), []
    calls.changed = lambda: ends.append(calls.look()[0])
    rows = calls.stream(Asked("listing"), iter(range(2)))
    next(rows)
    with caplog.at_level(logging.INFO):
        calls.told_to_stop()
    assert "draining: nothing new is taken, 1 under way may take 100 s" in caplog.text
    assert 0 < calls.look()[1] <= 100
    with pytest.raises(UnreachableError, match="takes nothing new"):
        list(calls.stream(Asked("listing"), iter(range(2))))
    assert ("requests", (ANYONE, "listing", "refused"), 1) in calls.items()
    assert list(rows) == [1]
    assert ends == ["everything under way was finished"]


def test_a_call_is_its_tokens_tenants_and_otherwise_anyones():
    class Context:
        def __init__(self, **middleware):
            self.get_middleware = middleware.get

    class Visit:
        class grant:  # noqa: N801
            tenant = "photos-team"

    assert tenant_of(Context()) == ANYONE
    assert tenant_of(Context(access=Visit)) == "photos-team"
