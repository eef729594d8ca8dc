"""What tiers took, of processes that come and go."""

from types import SimpleNamespace

import pytest

from headwater.errors import UnreachableError
from headwater.train import usage
from headwater.train.usage import Meter


class Process:
    """A node that says what it was told to say; None: it does not answer."""

    name = "store-0"

    def __init__(self, *cpu_s):
        self.cpu_s = list(cpu_s)

    def hello(self):
        if (now_s := self.cpu_s.pop(0)) is None:
            raise UnreachableError("away")
        return {"cpu_s": now_s, "cores": 1.0, "resident_bytes": 1 << 20}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A second passes from one look to the next; this process takes no CPU."""
    now = iter(range(1000))
    clocks = SimpleNamespace(perf_counter=lambda: float(next(now)), process_time=lambda: 0.0)
    monkeypatch.setattr(usage, "time", clocks)


def test_the_node_beside_the_trainer_may_start_anew_or_miss_a_question():
    own = Process(5.0, 7.0, None, 10.0, 1.0)
    meter = Meter(list, lambda: [own])
    taken = [meter.lap()["trainer"].cpu_s for _ in range(4)]
    assert taken == [2.0, 0.0, 3.0, 1.0]


def test_one_that_is_started_later_counts_as_a_whole():
    beside = []
    meter = Meter(list, lambda: beside)
    beside.append(Process(4.0))
    assert meter.lap()["trainer"].cpu_s == 4.0


def test_a_node_that_did_not_answer_is_told_of_as_a_whole_when_it_does_again():
    node = Process(100.0, None, 103.0, 2.0)
    meter = Meter(lambda: [node], list)
    laps = [meter.lap() for _ in range(3)]
    assert [set(lap) for lap in laps] == [{"trainer"}, {"trainer", "store-0"}, {"trainer", "store-0"}]
    assert [lap["store-0"].cpu_s for lap in laps[1:]] == [3.0, 2.0]


def test_trainers_on_one_machine_share_what_it_draws_when_idle():
    power = {"trainer": (8.0, 10.0)}
    alone, shared = (Meter(list, list, power, trainers).lap()["trainer"].modelled_j for trainers in (1, 4))
    assert alone == 4 * shared > 0


def test_watts_of_an_accelerator_that_no_run_can_use_are_said_once():
    meter = Meter(list, list, {"accelerator": (10.0, 300.0)})
    with pytest.warns(UserWarning, match="how long it is busy is not measured"):
        meter.lap()
    meter.lap()
