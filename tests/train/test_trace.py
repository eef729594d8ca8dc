"""What was done when, on which tier; and what it took."""

import json
import time

import pytest
from tests.train.test_switching import outputs, start

import headwater as hw
from headwater.core.plan import near_plan
from headwater.train.own import PLACE


@pytest.fixture(scope="module")
def node(pictures, start_node_once):
    return start_node_once(pictures)


def test_a_timeline_has_every_stage_on_its_tier_and_in_the_time_of_the_run(pictures, node, tmp_path):
    begin = time.perf_counter()
    with start(pictures, [node.address], trace=True) as job:
        outputs(job)
        end = time.perf_counter()
        job.trace.write(tmp_path / "run.json")
        spans, busy = job.trace.spans, job.trace.busy_s()
    assert {"read", "decode", "augment", "infer", "send"} <= set(busy[node.address])
    assert set(busy["trainer"]) == {"wait", "finish", "step"}
    reads = [span for span in spans if span.name == "read"]
    assert len(reads) >= len(job.samples), "each sample was read for this run"
    assert all(begin - 1 < span.start_s and span.start_s + span.seconds < end + 1 for span in spans)
    found = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in found) == len(spans)


def test_where_nothing_moves_the_trainer_reads_and_decodes(pictures, node):
    with start(pictures, [node.address], trace=True, plan=hw.Plan()) as job:
        outputs(job)
        assert {"read", "decode", "augment", "wait", "finish", "step"} <= set(job.trace.busy_s()["trainer"])
        assert node.address not in job.trace.busy_s()


def test_the_nodes_own_timeline_is_not_sent_unless_it_is_asked_for(pictures, node):
    with start(pictures, [node.address]) as job:
        outputs(job)
        assert job.trace is None


def test_what_tiers_took_is_told_from_one_time_to_the_next(pictures, node):
    with start(pictures, [node.address], power={"node": (1.0, 3.0)}) as job:
        job.usage()
        outputs(job)
        taken = job.usage()
        assert set(taken) == {"trainer", node.address}
        assert all(each.cpu_s > 0 and each.resident_bytes > 1 << 20 for each in taken.values())
        assert taken["trainer"].modelled_j is None
        assert taken[node.address].modelled_j > 0


def test_the_work_of_the_node_beside_the_trainer_is_the_trainers(pictures, node):
    with start(pictures, [node.address], trace=True) as job:
        cut = next(cut for cut in job.cuts if cut.name == "0.3")
        job.adopt(near_plan(cut, chunk_rows=2, node_batch=2, host_share=0.5))
        before = job.usage()["trainer"].resident_bytes
        for thread in job._source._warm(job._source._carried):
            thread.join()
        outputs(job)
        assert set(job.usage()) == {"trainer", node.address}
        assert PLACE in job.trace.busy_s()
    assert before > 0
