"""DDP with its gradients added up by the aggregator: Gloo's curve, the same bits on all, and on when something dies."""

import json

import pytest
from tests.reduce.processes import results


@pytest.fixture
def ranks(workers, tmp_path):
    def begin(what, world, **about):
        return workers("training.py", [{"what": what, "rank": rank, "world": world, "init": str(tmp_path / "init"),
                                        **about} for rank in range(world)])  # fmt: skip

    return begin


def near(one, other, relative):
    """As far as the shorter one goes."""
    return all(abs(a - b) <= relative * abs(b) for a, b in zip(one["losses"], other["losses"], strict=False))


def test_twenty_steps_have_gloos_curve_and_the_same_bits_on_all_workers_and_in_two_runs(ranks, start):
    found = results(ranks("curves", 3, switch=start().address))
    for each in found:
        assert near(each["switch"], each["gloo"], 1e-5)
        assert near(each["switch64"], each["gloo64"], 1e-10)
        assert near(each["integers"], each["gloo"], 1e-4)
        assert near(each["fp16"], each["gloo"], 1e-2)
        assert each["switch"]["digest"] == each["again"]["digest"], "two runs, the other one by packets"
        assert each["switch"]["stats"]["by_switch"] > 30, "more than one bucket in most steps"
        assert each["switch"]["stats"]["by_all_reduce"] == 0
        for name in ("half", "bf16"):
            assert each[name]["losses"][-1] < 3
    for name in found[0]:
        assert len({each[name]["digest"] for each in found}) == 1, f"{name}: all workers have the same bits"


def test_a_run_goes_on_when_the_aggregator_is_killed_uses_it_again_and_stops_when_a_worker_is_killed(ranks, start):
    aggregator = start()
    processes = ranks("faults", 3, switch=aggregator.address, pid=aggregator.process.pid)
    assert processes[0].stdout.readline() == "lost\n"
    aggregator.process.wait()
    again = start(listen=aggregator.address)
    found = [json.loads(each.stdout.read().splitlines()[-1]) for each in processes]
    for each in found:
        assert each["before"]["lost"] == each["before"]["by_all_reduce"] == 0
        assert each["after"]["lost"] == 1, "the step in which it was killed was finished without it"
        assert each["stats"]["by_all_reduce"] > 0
        assert each["stats"]["by_switch"] >= each["before"]["by_switch"] + 6, "it is used again"
        assert each["off"] <= 1e-5, "the same training as with Gloo all along"
    assert len({each["digest"] for each in found}) == 1
    for survivor in found[:2]:
        assert "WorkerGoneError" in survivor["error"]
        assert "a worker is gone" in survivor["error"]
    assert [each.wait(60) for each in processes] == [0, 0, -9]
    again.stop()
