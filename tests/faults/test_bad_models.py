"""Models and plans that can't be carried out: refused before the first step, with the way out."""

import json

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.core.plan import Plan
from headwater.errors import CaptureError, ConfigError, ImpureError, ModelError, PlanError, TransformError

PLAN = json.loads(Plan().dumps())


def start(model, pictures, **options):
    from headwater.data.transforms import Resize, ToFloat

    return hw.near(model, pictures, transforms=[Resize((32, 32)), ToFloat()], nodes="inline", **options)


class Moody(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


def test_a_model_that_cannot_be_captured_says_why(pictures):
    with pytest.raises(CaptureError):
        start(nn.Sequential(Moody(), nn.Conv2d(3, 3, 1)), pictures)


def test_frozen_batch_norm_in_training_mode_names_the_module_and_the_fix(bare_model, pictures):
    for parameter in bare_model[0].parameters():
        parameter.requires_grad_(False)
    bare_model.train()
    with pytest.raises(ImpureError, match=r"0\.1.*hw\.freeze"):
        start(bare_model, pictures)


def test_a_cut_after_trainable_layers_is_refused(bare_model, pictures):
    with pytest.raises(ImpureError, match="is trainable"):
        start(bare_model, pictures, cut="0")


def test_a_cut_that_is_not_there_names_close_ones(model, pictures):
    with pytest.raises(ModelError, match=r"no cut is named 'layer9'.*headwater cuts"):
        start(model, pictures, cut="layer9")


def test_a_plan_edited_into_nonsense_lists_every_fault(model, pictures, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLAN, "codec": "zip", "node_batch": -1, "prefetch": "many", "speed": 9,
                                "stages": {**PLAN["stages"], "decode": "moon"}}))  # fmt: skip
    with pytest.raises(PlanError) as caught:
        start(model, pictures, plan=path)
    for fault in ("prefetch is 'many'", "speed is not a field"):
        assert fault in str(caught.value)
    path.write_text(json.dumps({**PLAN, "codec": "zip", "node_batch": -1,
                                "stages": {**PLAN["stages"], "decode": "moon"}}))  # fmt: skip
    with pytest.raises(PlanError) as caught:
        start(model, pictures, plan=path)
    assert len(caught.value.faults) >= 3


def test_a_plan_for_another_model_is_refused(model, pictures):
    with pytest.raises(PlanError, match="was the plan made for another model"):
        start(model, pictures, plan=Plan(**dict.fromkeys(("read", "decode", "augment", "prefix"), "storage"), cut=1,
                                         cut_name="elsewhere"))  # fmt: skip


def test_a_missing_plan_file_is_named(model, pictures, tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        start(model, pictures, plan=tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nodes": "grpc://x:1"}, "list of addresses"),
        ({"nodes": []}, "list of addresses"),
        ({"nodes": ["http://x"]}, "looks like grpc://host:8815"),
        ({"on_bad_sample": "ignore"}, "on_bad_sample"),
        ({"rank": 3, "world": 2}, "rank 3"),
        ({"rank": 3}, "together"),
        ({"plan": Plan(), "codec": "fp16"}, "either a plan"),
        ({"batch_size": 0}, "batch"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(options, text, model, pictures):
    from headwater.data.transforms import Resize, ToFloat

    with pytest.raises(ConfigError, match=text):
        hw.near(model, pictures, transforms=[Resize((32, 32)), ToFloat()], **{"nodes": "inline", **options})


def test_transforms_that_leave_pictures_of_different_sizes_are_refused(model, pictures):
    from headwater.data.transforms import ToFloat

    with pytest.raises(TransformError, match="CenterCrop"):
        hw.near(model, pictures, transforms=[ToFloat()], nodes="inline")
    assert torch.is_grad_enabled()


def test_a_plan_with_a_cut_is_refused_where_transforms_stay_on_the_trainer(model, pictures):
    """They would be left out: the rows have passed the prefix when they arrive."""
    from torchvision import transforms as theirs

    from headwater.core.plan import near_plan

    steps = theirs.Compose([theirs.Resize((32, 32)), theirs.ToTensor(), theirs.RandomErasing()])
    with pytest.warns(UserWarning, match="RandomErasing"):
        job = hw.near(model, pictures, transforms=steps, nodes="inline")
    plan = near_plan(next(cut for cut in job.cuts if cut.legal and cut.index))
    with pytest.warns(UserWarning, match="RandomErasing"), pytest.raises(ConfigError, match="stay on the trainer"):
        hw.near(model, pictures, transforms=steps, nodes="inline", plan=plan)


def test_threads_for_a_node_that_is_not_ours_to_start_are_refused(model, pictures):
    with pytest.raises(ConfigError, match=r"node_threads .*--threads"):
        start(model, pictures, node_threads=2)
