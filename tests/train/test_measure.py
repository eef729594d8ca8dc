"""A job is measured once, in one pass, without a trace in the model; the planner's plan then trains as any other."""

import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import headwater as hw
from headwater.core.cut import legal_cuts
from headwater.core.loads import JobSize
from headwater.core.plan import near_plan
from headwater.core.profile import NodeCosts, Profile, profile_faults
from headwater.core.search import search
from headwater.data.layouts import list_samples
from headwater.data.transforms import CenterCrop, Normalize, Resize, ToFloat, Transforms
from headwater.errors import NodeError, PlanError, StoreError, UnreachableError
from headwater.model.capture import capture
from headwater.model.cuts import cuts
from headwater.model.places import kernel_places, place_seconds, time_places
from headwater.model.ship import ship
from headwater.node.engine import Engine
from headwater.progress import Progress
from headwater.train import measure as measure_module
from headwater.train import reads, speeds, steps
from headwater.train.client import NodeClient
from headwater.train.measure import measure
from headwater.train.own import OwnNode

ENGINE_HERE = measure_module._engine_here
TRANSFORMS = Transforms([Resize(36), CenterCrop(32), ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)])


def network():
    torch.manual_seed(0)
    body = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)]
    return hw.freeze(nn.Sequential(nn.Sequential(*body), nn.Sequential(*head)), until="1.2")


@pytest.fixture(scope="module")
def node(pictures, start_node_once):
    return start_node_once(pictures)


@pytest.fixture
def job(pictures, node):
    model = network()
    captured = capture(model, (torch.zeros(2, 3, 32, 32),))
    client = NodeClient(node.address)
    yield captured, cuts(captured), list_samples(str(pictures)), client
    client.close()


def measured(job, **changes):
    captured, all_cuts, samples, client = job
    options = {"batch_size": 8, "seed": 0, "progress": Progress(), **changes}
    return measure(captured, all_cuts, TRANSFORMS, samples, [client], **options)


def test_every_legal_cut_gets_its_costs_in_one_pass(job, monkeypatch):
    monkeypatch.setattr(measure_module, "MOMENT_S", 60.0)  # and in two moments
    found = measured(job)
    _, all_cuts, samples, _ = job
    assert profile_faults(found.profile, all_cuts) == []
    prefix = found.profile.node.prefix_s["fp32"]
    legal = [cut.index for cut in legal_cuts(all_cuts)]
    assert prefix[0] == 0
    assert all(prefix[a] <= prefix[b] for a, b in pairwise(legal))
    assert prefix[legal[-1]] > 0
    pixels = found.profile.sizes.input_row_bytes
    assert found.profile.node.row_bytes[legal[-1]] >= pixels + all_cuts[legal[-1]].row_bytes  # both are there at once
    assert found.profile.trainer.suffix_s[0] > found.profile.trainer.suffix_s[legal[-1]] > 0
    assert found.profile.sizes.sample_bytes == pytest.approx(samples.sizes.mean())
    assert found.rig.links[0].down_bytes_per_s > 1e6


@pytest.fixture
def steady_reads(monkeypatch):
    """Reads of some tenths of a millisecond are never the same twice; here they count as that."""
    monkeypatch.setattr(speeds, "TINY_S", 1.0)
    monkeypatch.setattr(speeds, "TINY_WAIT_S", 1.0)


def test_a_profile_is_measured_once_and_read_again(job, steady_reads, monkeypatch):
    first = measured(job).profile
    monkeypatch.setattr(measure_module, "_profile", lambda *args: pytest.fail("measured again"))
    assert measured(job).profile == first
    assert Profile.loads(first.dumps()) == first


def test_measuring_leaves_the_model_as_it_was(job):
    captured = job[0]
    captured.model.train()
    before = copy.deepcopy(captured.model.state_dict())
    measured(job)
    after = captured.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(each.grad is None for each in captured.model.parameters())
    assert captured.model.training


def test_the_planner_can_use_what_was_measured(job):
    found = measured(job)
    ranking = search(job[1], found.profile, found.rig, JobSize(50, 8))
    assert ranking.best.samples_per_s > 0
    assert ranking.explain()


def test_a_node_that_vanishes_while_it_is_measured_is_a_plain_error(pictures, start_node, monkeypatch):
    node, probe = start_node(pictures), NodeClient.probe
    monkeypatch.setattr(NodeClient, "probe", lambda self, chunk: node.kill() or probe(self, chunk))
    monkeypatch.setattr(measure_module, "_load", lambda *args: None)
    with pytest.raises(UnreachableError, match="does not answer"):
        hw.near(network(), pictures, transforms=TRANSFORMS, nodes=[node.address], plan="auto")


def test_kernels_are_traced_back_to_places_and_nothing_is_lost(job):
    captured, all_cuts, _, _ = job
    deepest = legal_cuts(all_cuts)[-1]
    places = kernel_places(captured, ship(captured, deepest).path)
    assert set(places.values()) <= set(range(deepest.index))
    kernels = [(name, 1.0) for name in places] + [("a name that nobody knows", 2.0)]
    assert sum(place_seconds(kernels, places, deepest.index)) == pytest.approx(len(places) + 2.0)
    assert len(time_places(captured, captured.example, deepest.index)) == deepest.index


def test_a_convolution_costs_where_it_is_and_not_where_what_it_is_joined_with_ends(tmp_path):
    """A cut between the two has the convolution in front of it."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64),
                         nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())  # fmt: skip
    model = hw.freeze(nn.Sequential(body, nn.Flatten(), nn.Linear(64 * 32 * 32, 3)).eval(), until="2")
    captured = capture(model, (torch.zeros(2, 3, 32, 32),))
    found = {name: cut for cut in cuts(captured) for name in (cut.name, *cut.also)}
    deepest = found["0.6"]
    shipped = ship(captured, deepest)
    engine = Engine(shipped.path.read_bytes(), shipped.names_at(deepest), profile=str(tmp_path / "run"))
    kernels = engine.kernels(np.zeros((4, 3, 32, 32), np.float32))
    seconds = place_seconds(kernels, kernel_places(captured, shipped.path), deepest.index)
    taken = {name: seconds[found[name].index - 1] for name in ("0.2", "0.3", "0.4", "0.5", "0.6")}
    assert min(taken["0.2"], taken["0.5"]) > max(taken["0.3"], taken["0.4"], taken["0.6"]), (taken, kernels)


def test_an_automatic_plan_trains_and_says_why(pictures, node):
    model = network()
    with hw.near(model, pictures, transforms=TRANSFORMS, nodes=[node.address], plan="auto") as job:
        assert sum(len(y) for _, y in job.loader) == 50
        assert job.ranking is not None
        assert "limits" in job.ranking.explain()


def test_inline_there_is_nothing_to_measure_and_the_fewest_bytes_cross(pictures):
    with hw.near(network(), pictures, transforms=TRANSFORMS, nodes="inline") as job:
        assert job.ranking is None
        assert job.plan.cut_name == "1.1"


def test_what_is_larger_than_a_node_takes_is_not_offered(pictures, start_node):
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 4, 3, stride=4), nn.Flatten(), nn.Linear(256, 2048), nn.ReLU()]  # the third: 2.1 MB
    model = hw.freeze(nn.Sequential(*body, nn.Linear(2048, 3)), until="4")
    node = start_node(pictures, options=("--max-upload", "2MB"))
    with hw.near(model, pictures, transforms=TRANSFORMS, nodes=[node.address], batch_size=4) as job:
        offered = [cut.name for cut in job.measured.offered]
        assert "1" in offered
        assert "2" not in offered
        assert len(list(job.loader)) == len(job.loader)


@pytest.mark.parametrize(("rate", "rel"), [(250_000.0, 1e-3), (2_500_000.0, 0.1), (25_000_000.0, 0.05)])
@pytest.mark.parametrize("seed", range(5))
def test_the_way_to_the_store_is_as_fast_as_what_reads_under_way_share(seed, rate, rel, monkeypatch):
    """What has come of reads that end later must not be counted twice."""
    monkeypatch.setattr(reads, "FETCH_AT_LEAST_S", 1.0)
    rng = np.random.default_rng(seed)
    now, last_start = 0.0, 0.0
    left = dict(enumerate(rng.lognormal(10, 0.5, reads.NUM_READERS)))
    sizes, done = dict(left), []
    while left:
        first = min(left, key=left.__getitem__)
        step = left[first]
        now += step * len(left) / rate
        left = {number: size - step for number, size in left.items() if number != first}
        done.append((now, int(sizes[first])))
        thin = len(done) >= reads.ENOUGH_READS and now > reads.FETCH_S
        if not thin and not (len(sizes) > reads.NUM_SAMPLES and now > reads.FETCH_AT_LEAST_S):
            last_start = now
            left[len(sizes)] = sizes[len(sizes)] = rng.lognormal(10, 0.5)
    assert reads.rate_of(done, last_start) == pytest.approx(rate, rel=rel)


def test_during_a_run_this_machine_is_measured_against_its_profile(pictures, monkeypatch):
    with hw.near(network(), pictures, transforms=TRANSFORMS, batch_size=4) as job:
        again = speeds.measure_here(job.samples, TRANSFORMS, job.measured.profile, 0)
        assert again[0].down_bytes_per_s > 0
        assert 1 / measure_module.MAX_DRIFT <= again[1] <= measure_module.MAX_DRIFT
        half = job.measured.profile.trainer.decode_s * 2
        monkeypatch.setattr(speeds, "decode_s", lambda *arguments: half)
        assert speeds.measure_here(job.samples, TRANSFORMS, job.measured.profile, 0)[1] == pytest.approx(0.5)
        monkeypatch.setattr(speeds, "fetch", lambda samples: None)
        assert speeds.measure_here(job.samples, TRANSFORMS, job.measured.profile, 0) == (None, None)


@pytest.mark.parametrize(
    ("taken_s", "expected"), [([5, 0.4, 0.2, 0.2], 0.2), ([9, 0.3, 0.3, 0.3], 0.3), ([9, 60, 1], 60)]
)
def test_a_run_that_still_fetches_memory_does_not_count_and_a_long_one_is_not_repeated(taken_s, expected):
    runs = iter(taken_s)
    now = [0.0]

    def work():
        now[0] += next(runs)

    assert steps.cpu_s(work, 0.5, lambda: now[0]) == pytest.approx(expected)


def test_a_step_too_long_to_time_whole_is_told_apart_from_its_rows(monkeypatch):
    """Weights that are read and gradients that are written cost the same for four rows and for thirty-two."""
    step_s, row_s = 0.3, 0.05
    found, rows = steps.row_s(lambda work, at_least_s: work(), lambda rows: step_s + rows * row_s, 32)
    assert rows < 32
    assert found == pytest.approx(step_s / 32 + row_s)


@pytest.mark.parametrize("batch", [1, 3, 8, 32])
def test_a_fast_step_is_timed_with_the_whole_batch(batch):
    found, rows = steps.row_s(lambda work, at_least_s: work(), lambda rows: 1e-3 + rows * 1e-4, batch)
    assert rows == batch
    assert found == pytest.approx(1e-3 / batch + 1e-4)


def test_a_slow_model_is_measured_with_few_rows(job, monkeypatch):
    monkeypatch.setattr(steps, "PASS_S", 1e-9)
    monkeypatch.setattr(measure_module, "ASK_S", 1e-9)
    found = measured(job, batch_size=32, again=True)
    assert profile_faults(found.profile, job[1]) == []
    assert found.profile.trainer.suffix_s[0] > 0


def test_a_machine_that_is_no_longer_the_same_is_measured_again(job, steady_reads):
    first = measured(job)
    (path,) = (each for each in measure_module._cache().glob("*.json") if each.read_text() == first.profile.dumps())
    kept = Profile.loads(path.read_text())
    slow = replace(kept, trainer=replace(kept.trainer, decode_s=kept.trainer.decode_s * 50))
    path.write_text(slow.dumps())
    again = measured(job)
    assert again.profile.measured_at > first.profile.measured_at
    assert again.profile.trainer.decode_s < slow.trainer.decode_s / 5
    with pytest.warns(UserWarning, match="measure again"):
        assert measured(job, given=slow).profile.measured_at == slow.measured_at


def test_a_read_that_fails_now_and_then_is_no_reason_to_believe_there_is_no_way(pictures, monkeypatch):
    samples, calls = list_samples(str(pictures)), []
    read_sample = reads.read_sample

    def read(store, ref):
        calls.append(ref)
        if len(calls) % 10 == 5:
            raise StoreError("503")
        return read_sample(store, ref)

    monkeypatch.setattr(reads, "read_sample", read)
    assert reads.fetch(samples).bytes_per_s > 0
    calls[:] = [None] * 4  # the very first fails
    assert reads.fetch(samples) is None


def test_memory_power_and_what_is_left_to_send_are_known(job):
    found = measured(job, power={"node": (2.0, 6.0), "trainer": (50.0, 90.0)})
    assert found.profile.trainer.base_bytes > 1e7
    assert found.rig.trainer.memory_bytes > found.profile.trainer.base_bytes
    assert all(each is not None for each in found.profile.trainer.suffix_row_bytes[: len(found.offered)])
    best = search(job[1], found.profile, found.rig, JobSize(50, 8)).best
    assert set(best.energy_j) == {found.rig.nodes[0].name, "trainer"}
    assert all(joules > 0 for joules in best.energy_j.values())
    assert found.missing == ()  # it was sent to be measured
    assert found.setup_s == 0
    assert replace(found, missing=(found.rig.nodes[0].name,)).setup_s == pytest.approx(
        found.shipped.num_bytes / found.rig.links[0].up_bytes_per_s
    )


@pytest.mark.parametrize(("told", "world", "here"), [("4", 4, 4), ("4", 8, 4), ("8", 2, 2), ("", 4, 1), ("x", 4, 1)])
def test_trainers_on_one_machine_share_its_cores(told, world, here, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert measure_module.trainers_here(world) == here


@pytest.fixture
def own_engine(monkeypatch):
    """An engine is measured here, too, unlike in other tests."""
    monkeypatch.setattr(measure_module, "_engine_here", ENGINE_HERE)


@pytest.mark.usefixtures("own_engine")
def test_an_engine_is_measured_here_once_and_its_node_is_handed_over(job, pictures):
    start = partial(OwnNode, pictures.as_uri(), 1)
    first = measured(job, start_own=start, again=True)
    assert first.own is not None
    try:
        assert 0.1 < first.profile.trainer.engine_ratio < 10  # the same machine
        assert first.own.hello()["busy"]["num_rows"] == 0  # a probe is a process of its own
    finally:
        first.own.close()
    again = measured(job, start_own=start)
    assert again.own is None
    assert again.profile.trainer.engine_ratio == first.profile.trainer.engine_ratio


@pytest.mark.usefixtures("own_engine")
def test_a_profile_without_it_gets_it_and_a_node_that_cant_be_started_is_no_reason_to_stop(job, pictures, caplog):
    assert measured(job, again=True).profile.trainer.engine_ratio is None

    def broken():
        raise NodeError("no")

    assert measured(job, start_own=broken).own is None
    assert "taken from decoding" in caplog.text
    found = measured(job, start_own=partial(OwnNode, pictures.as_uri(), 1))
    assert found.own is not None
    found.own.close()
    assert found.profile.trainer.engine_ratio is not None


def test_a_profile_is_of_what_learns_behind_the_cuts(job):
    captured, all_cuts, samples, client = job

    def key():
        return measure_module._key(captured, all_cuts, TRANSFORMS, samples, [client.hello()], 8, "fp32", reads=True)

    first = key()
    captured.model[1][2].bias.requires_grad_(False)
    assert key().model != first.model
    captured.model[1][2].bias.requires_grad_(True)
    assert key() == first


def test_reads_that_cost_something_else_by_now_are_priced_as_they_are():
    node = NodeCosts(6e-3, 4e-3, {"fp32": (0.0,)}, read_wait_s=20e-3, lone_read_s=2e-3)

    def changed(*looks, speed=1.0):
        return speeds.reads_now(node, [{"read_s": cpu_s, "read_wait_s": wait_s} for cpu_s, wait_s in looks], speed)

    assert changed((2.5e-3, 25e-3)) == {}
    assert changed((9e-3, 0.5), (4e-3, 0.2)) == pytest.approx({"read_wait_s": 0.2, "lone_read_s": 4e-3, "read_s": 8e-3})
    assert changed((4e-3, 20e-3), speed=0.5) == {}, "a slower node is no slower store"
    assert changed((2e-3, 1e-6)) == {"read_wait_s": 1e-6}
    quick = replace(node, read_wait_s=1e-4, lone_read_s=1e-5)
    assert speeds.reads_now(quick, [{"read_s": 9e-5, "read_wait_s": 2e-3}], 1.0) == {}, "as good as nothing"


def test_a_kept_profile_is_used_with_what_the_store_takes_now(job):
    path = measure_module._path(measured(job).profile.key)
    kept = Profile.loads(path.read_text())
    path.write_text(replace(kept, node=replace(kept.node, read_wait_s=100.0)).dumps())
    try:
        found = measured(job).profile
        assert found.measured_at == kept.measured_at
        assert found.node.read_wait_s < 50
    finally:
        path.write_text(kept.dumps())


def test_a_pinned_plan_that_does_not_fit_is_refused_where_a_profile_is_kept(pictures, node, monkeypatch):
    def start(**options):
        return hw.near(network(), pictures, transforms=TRANSFORMS, nodes=[node.address], batch_size=8, **options)

    with start() as job:
        plan = near_plan(next(cut for cut in job.cuts if cut.name == "0.3"))
        base_bytes = job.measured.profile.trainer.base_bytes
    start(plan=plan).close()
    monkeypatch.setattr(measure_module, "memory_bytes", lambda: base_bytes // 2)
    for pins in ({"plan": plan}, {"cut": "0.3"}):
        with pytest.raises(PlanError, match=r"needs .* on trainer \(has"):
            start(**pins)
    monkeypatch.setattr(measure_module, "_kept", lambda key, cuts: None)
    start(plan=plan).close()
