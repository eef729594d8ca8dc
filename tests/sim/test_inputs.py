"""From files: layers, recorded stages, sweeps; all faults of all files at once."""

import json

import pytest

from headwater.core.trace import Span, perfetto
from headwater.errors import ConfigError
from headwater.sim.comparing import compare
from headwater.sim.inputs import read_inputs
from headwater.sim.sweep import parse_sweeps, play_all

RIG = """
format = "headwater-rig"
version = 1
[job]
num_samples = 640
[[nodes]]
count = 2
link = { down_bytes_per_s = 1.25e8, up_bytes_per_s = 1.25e8, latency_s = 0.0002 }
[[trainers]]
[store]
link = { down_bytes_per_s = 1.25e8, up_bytes_per_s = 1.25e8 }
"""
DATA = """
[data]
sample_bytes = 110000
pixel_bytes = 150528
costs = { node_decode_s = 0.004, trainer_decode_s = 0.004 }
"""
LAYERS = """layer,forward_s,backward_s,bytes_out,weight_bytes,kind,flops
one,0.004,0,800000,1000,conv,1e9
two,0.004,0,4000,1000,conv,1e9
head,0.0001,0.0002,40,4000,linear,1e6
"""


@pytest.fixture
def files(sim, tmp_path):
    """A plan, a rig, a profile and layers, as files."""
    (tmp_path / "plan.json").write_text(sim.near(5).dumps())
    (tmp_path / "rig.toml").write_text(RIG)
    (tmp_path / "profile.json").write_text(sim.PROFILE.dumps())
    (tmp_path / "layers.csv").write_text(LAYERS)
    return tmp_path


def read(files, **more):
    paths = {name: files / value for name, value in more.items()}
    return read_inputs(files / "plan.json", files / "rig.toml", **paths)


def test_a_profile_in_a_file_is_all_it_takes(sim, files):
    found = read(files, profile="profile.json")
    assert found.cuts == sim.CUTS


def test_layers_are_cuts_and_costs(sim, files):
    (files / "rig.toml").write_text(RIG + DATA)
    (files / "plan.json").write_text(sim.replace(sim.near(2), cut_name="two").dumps())
    found = read(files, layers="layers.csv")
    assert [(cut.name, cut.legal) for cut in found.cuts] == [
        ("input", True), ("one", True), ("two", True), ("head", False)]  # fmt: skip
    assert found.profile.node.prefix_s["fp32"] == pytest.approx((0, 0.004, 0.008, 0.0081))
    assert found.profile.trainer.suffix_s == pytest.approx((0.0083, 0.0043, 0.0003, 0))


def test_with_a_datasheet_seconds_follow_from_operations_and_bytes(sim, files):
    chip = "accelerator = { flops_per_s = { conv = 1e11, other = 1e10 }, memory_bytes_per_s = 1e8 }\n"
    (files / "rig.toml").write_text(RIG.replace("count = 2\n", "count = 2\n" + chip) + DATA)
    (files / "plan.json").write_text(sim.replace(sim.near(2), cut_name="two").dumps())
    prefix_s = read(files, layers="layers.csv").profile.node.prefix_s["fp32"]
    assert prefix_s[1] == pytest.approx(2 * 800000 / 1e8, rel=1e-3)  # its bytes take longer than its operations
    assert prefix_s[2] - prefix_s[1] == pytest.approx(1e9 / 1e11)


def test_every_fault_of_every_file_is_told_at_once(files):
    (files / "plan.json").write_text("{}")
    (files / "rig.toml").write_text(RIG.replace("640", "0"))
    (files / "layers.csv").write_text(LAYERS.replace("800000", "many").replace("0.0002", "-1"))
    with pytest.raises(ConfigError) as caught:
        read(files, layers="layers.csv")
    for word in ("plan:", "num_samples", "many", "-1"):
        assert word in str(caught.value)


def test_a_plan_for_another_model_does_not_fit(sim, files):
    (files / "plan.json").write_text(sim.replace(sim.near(5), cut=9).dumps())
    with pytest.raises(ConfigError, match="cut 9 is not among"):
        read(files, profile="profile.json")


def test_a_profile_without_cuts_says_what_to_do(sim, files):
    (files / "profile.json").write_text(sim.replace(sim.PROFILE, cuts=()).dumps())
    with pytest.raises(ConfigError, match="headwater profile -o"):
        read(files, profile="profile.json")


def test_a_live_trace_says_how_long_stages_take(sim, files):
    spans = [
        Span("grpc://store", "compute", "decode", 0.0, 0.02),
        Span("grpc://store", "compute", "augment", 1.0, 0.01),
    ]
    (files / "run.json").write_text(perfetto([*spans, Span("trainer", "loop", "step", 0.0, 0.5)]))
    found = read(files, profile="profile.json", stages="run.json")
    assert found.profile.node.decode_s == pytest.approx(0.03)


def test_sweeps_double_or_go_in_steps_or_take_what_is_listed():
    assert parse_sweeps(["nodes=1..10", "link=10,100", "cut=1..5:2"]) == {
        "nodes": (1, 2, 4, 8, 10), "link": (10, 100), "cut": (1, 3, 5)}  # fmt: skip
    assert list(parse_sweeps(["nodes=1..2 link=5"])) == ["nodes", "link"]
    with pytest.raises(ConfigError, match=r"(?s)luck.*nodes=3\.\.1"):
        parse_sweeps(["luck=1..2", "nodes=3..1"])


def test_a_sweep_plays_every_point(sim, files):
    found = sim.replace(read(files, profile="profile.json"), sweeps=parse_sweeps(["nodes=1..4", "link=1,100"]))
    swept = play_all(found)
    rates = {point: outcome.samples_per_s for point, outcome in swept.points}
    assert len(rates) == 6
    assert rates[4, 100] > 1.5 * rates[1, 100]


def test_traces_and_outcomes_are_compared_with_their_own_kind(sim, files):
    for name, cores in (("a", 1.0), ("b", 2.0)):
        outcome = sim.play(sim.near(5), sim.rig(1000, node={"cores": cores}), trace=True)
        (files / f"{name}.json").write_text(outcome.dumps())
        (files / f"{name}-trace.json").write_text(perfetto(outcome.spans, outcome.places))
    lines = {line.what: line for line in compare(files / "a.json", files / "b.json")}
    assert lines["seconds"].ratio == pytest.approx(0.5, rel=0.1)
    traced = {line.what: line for line in compare(files / "a-trace.json", files / "b-trace.json")}
    assert traced["seconds"].ratio == pytest.approx(0.5, rel=0.1)
    assert traced["nodes: infer, times"].ratio == 1.0
    with pytest.raises(ConfigError, match="two of a kind"):
        compare(files / "a.json", files / "b-trace.json")


def test_the_command_writes_what_it_says(sim, files, capsys):
    from headwater.cli import typer_app

    arguments = ["simulate", str(files / "plan.json"), "--rig", str(files / "rig.toml"), "--json"]
    for option, name in (("--profile", "profile.json"), ("--trace", "t.json"), ("-o", "o.json")):
        arguments += [option, str(files / name)]
    typer_app(arguments, standalone_mode=False)
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert said["estimated"] is True
    assert said == json.loads((files / "o.json").read_text())
    assert json.loads((files / "t.json").read_text())["traceEvents"]


def test_a_job_file_gives_its_batch_its_epochs_and_its_watts(sim, files, capsys):
    from headwater.cli import typer_app

    (files / "job.toml").write_text(
        "[model]\nname = 'timm:resnet18'\n[data]\nurl = 'file:///tmp'\ntransforms = 'a:b'\n"
        "[train]\nepochs = 2\nbatch_size = 64\n[power]\nnode_idle_w = 5.0\nnode_busy_w = 10.0\n"
    )
    arguments = ["simulate", str(files / "plan.json"), "--rig", str(files / "rig.toml"), "--json"]
    for option, name in (("--profile", "profile.json"), ("--job", "job.toml")):
        arguments += [option, str(files / name)]
    typer_app(arguments, standalone_mode=False)
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert said["num_samples"] == 2 * 640
    assert said["energy_j"]["node"] > 0


def test_a_picture_of_a_sweep(sim, files, capsys):
    from headwater.cli import typer_app

    pytest.importorskip("matplotlib")
    arguments = [
        "simulate",
        str(files / "plan.json"),
        "--rig",
        str(files / "rig.toml"),
        "--json",
        "--sweep",
        "nodes=1..2",
    ]
    for option, name in (("--profile", "profile.json"), ("--picture", "s.png")):
        arguments += [option, str(files / name)]
    typer_app(arguments, standalone_mode=False)
    assert (files / "s.png").read_bytes().startswith(b"\x89PNG")
    assert [each["nodes"] for each in json.loads(capsys.readouterr().out.strip().splitlines()[-1])] == [1, 2]
