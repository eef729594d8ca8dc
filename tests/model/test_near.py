from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headwater.core.cut import find_cut
from headwater.errors import ImpureError, ModelError
from headwater.model import near as near_module
from headwater.model.capture import Captured, capture
from headwater.model.cuts import cuts
from headwater.model.freeze import freeze
from headwater.model.near import NearModel, Rows
from headwater.model.split import prefix_module


@pytest.fixture
def captured(small: nn.Module, images: Tensor) -> Captured:
    return capture(freeze(small, until="block"), (images,))


@pytest.fixture
def rows(captured: Captured, images: Tensor) -> Rows:
    cut = find_cut(cuts(captured), "relu")
    return Rows(prefix_module(captured, cut)(images), cut.index)


@pytest.fixture
def num_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []

    def counted(model: nn.Module, example: tuple[Tensor, ...]) -> Captured:
        calls.append(1)
        return capture(model, example)

    monkeypatch.setattr(near_module, "capture", counted)
    return calls


def run(model: nn.Module, x: Tensor | Rows, prepare: Callable[[nn.Module], object]) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and state after one forward with a fixed seed."""
    prepare(model)
    torch.manual_seed(3)
    output = model(x)
    return output.detach(), {name.removeprefix("original."): value for name, value in model.state_dict().items()}


def only_block_bn_in_eval(model: nn.Module) -> None:
    model.train()
    getattr(model, "original", model).block[1].eval()


@pytest.mark.parametrize("prepare", [nn.Module.train, nn.Module.eval, only_block_bn_in_eval])
def test_modes_behave_as_the_originals(captured: Captured, rows: Rows, images: Tensor, prepare) -> None:
    twin = copy.deepcopy(captured.model)
    expected, expected_state = run(twin, images, prepare)
    output, state = run(NearModel(captured), rows, prepare)
    assert torch.allclose(output, expected, atol=1e-6)
    assert state.keys() == expected_state.keys()
    assert all(torch.allclose(state[name], expected_state[name]) for name in state)


def test_switching_modes_back_and_forth_captures_each_once(captured: Captured, rows: Rows, num_captures) -> None:
    near = NearModel(captured)
    for _ in range(3):
        near.train()(rows)
        near.eval()(rows)
    assert len(num_captures) == 1  # eval; train is what it was made from


def test_plain_inputs_run_the_original(captured: Captured, images: Tensor) -> None:
    near = NearModel(captured).eval()
    assert torch.equal(near(images), captured.model(images))


def test_the_model_has_no_parameter_twice_and_its_keys_are_unchanged(captured: Captured, rows: Rows) -> None:
    keys = set(captured.model.state_dict())
    near = NearModel(captured)
    near(rows)
    assert set(captured.model.state_dict()) == keys
    assert set(near.state_dict()) == {f"original.{key}" for key in keys}
    assert len(list(near.parameters())) == len(list(captured.model.parameters()))


def test_a_replaced_buffer_or_parameter_is_followed_without_a_new_capture(
    captured: Captured, rows: Rows, images: Tensor, num_captures
) -> None:
    model, near = captured.model, NearModel(captured)
    near.train()(rows)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    near(rows).sum().backward()
    assert model.fc.weight.grad is not None
    assert model.block[1].num_batches_tracked == 2
    assert not num_captures


def test_a_replaced_module_is_captured_anew(captured: Captured, rows: Rows, images: Tensor) -> None:
    near = NearModel(captured)
    near.eval()(rows)
    captured.model.fc = nn.Linear(4, 2)
    assert torch.allclose(near.eval()(rows), captured.model(images), atol=1e-6)


@pytest.mark.parametrize("assign", [False, True])
def test_other_weights_in_front_of_the_cut_are_noticed(captured: Captured, rows: Rows, assign: bool) -> None:
    near, state = NearModel(captured), copy.deepcopy(captured.model.state_dict())
    captured.model.load_state_dict(state)
    near(rows)
    state["conv1.weight"] = state["conv1.weight"] + 1
    captured.model.load_state_dict(state, assign=assign)
    with pytest.raises(ModelError, match=r"conv1\.weight is in front of the cut and has changed"):
        near(rows)


def test_thawing_in_front_of_the_cut_is_noticed(captured: Captured, rows: Rows) -> None:
    near = NearModel(captured)
    near(rows)
    captured.model.conv1.weight.requires_grad_(True)
    with pytest.raises(ImpureError, match=r"conv1\.weight became trainable"):
        near(rows)


def test_training_mode_in_front_of_the_cut_is_an_error_that_names_the_module(small: nn.Module, images: Tensor) -> None:
    for name in ("scale", "conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias"):
        small.get_parameter(name).requires_grad_(False)
    captured = capture(small.eval(), (images,))
    cut = find_cut(cuts(captured), "relu")
    near = NearModel(captured).train()
    with pytest.raises(ImpureError, match="bn1 is in training mode"):
        near(Rows(prefix_module(captured, cut)(images), cut.index))


class Skips(nn.Module):
    """In training mode it does something else in front of the cut, and needs more behind it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2 if self.training and self.where == "front" else x + 2
        z = y.tanh()
        return z + y if self.training and self.where == "behind" else z * 2


@pytest.mark.parametrize(("where", "cut", "complaint"), [("front", 1, "computes"), ("behind", 2, "also needs")])
def test_a_cut_must_mean_the_same_place_in_every_mode(where: str, cut: int, complaint: str) -> None:
    near = NearModel(capture(Skips(where).eval(), (torch.randn(3, 2),))).train()
    with pytest.raises(ModelError, match=complaint):
        near(Rows((torch.randn(3, 2),), cut))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_a_near_model_can_be_copied_and_pickled(captured: Captured, rows: Rows, again) -> None:
    near = NearModel(captured).eval()
    expected = near(rows)
    twin = again(near)
    assert torch.equal(twin(rows), expected)
    assert twin.original.fc.weight is not near.original.fc.weight
    twin(rows).sum().backward()
    assert near.original.fc.weight.grad is None


def test_the_model_can_be_copied_after_rows_ran(captured: Captured, rows: Rows, images: Tensor) -> None:
    NearModel(captured)(rows)
    assert torch.equal(copy.deepcopy(captured.model).eval()(images), captured.model.eval()(images))


def test_rows_that_do_not_fit_are_refused(captured: Captured, rows: Rows, images: Tensor) -> None:
    near = NearModel(captured)
    with pytest.raises(ModelError, match="relu came as float16"):
        near(Rows((rows.tensors[0].half(),), rows.cut))
    with pytest.raises(ModelError, match="2 tensors, the suffix takes 1"):
        near(Rows(rows.tensors * 2, rows.cut))
    with pytest.raises(ModelError, match="cuts 0 to 12"):
        near(Rows(rows.tensors, 99))
    with pytest.raises(ModelError, match="pass them alone"):
        near(rows, images)


def test_rows_look_like_a_batch(rows: Rows) -> None:
    rows = Rows(rows.tensors, rows.cut, torch.arange(4))
    moved = rows.to("cpu", non_blocking=True)
    assert len(moved) == moved.size(0) == moved.shape[0] == 4
    assert moved.device == torch.device("cpu")
    assert torch.equal(moved.samples, torch.arange(4))
    assert moved.size() == (4, 4, 8, 8)
    assert rows.to("meta").device.type == "meta"


def test_ddp_trains_the_near_model(captured: Captured, rows: Rows, tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        near = nn.parallel.DistributedDataParallel(NearModel(captured))
        for _ in range(2):
            near(rows).sum().backward()
        assert captured.model.fc.weight.grad is not None
        assert captured.model.block[1].num_batches_tracked == 2
        del near  # before its group: the other way round, torch may wait for a thread that waits for the interpreter
    finally:
        torch.distributed.destroy_process_group()


def test_autocast_reaches_the_suffix(captured: Captured, rows: Rows) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert NearModel(captured).eval()(rows).dtype == torch.bfloat16


def test_one_row_in_front_of_a_training_batch_norm_is_refused_as_by_the_original() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    near = NearModel(capture(model, (torch.randn(4, 3),)))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        near(torch.randn(1, 3))
    with pytest.raises(ModelError, match="1 is in training mode and a batch of one row"):
        near(Rows((torch.randn(1, 3),), 0))
    assert near.eval()(Rows((torch.randn(1, 3),), 0)).shape == (1, 4)


def test_rows_refuse_another_element_type_and_keep_their_ids(rows: Rows) -> None:
    with pytest.raises(ModelError, match=r"can't become torch\.float16.*torch\.autocast"):
        rows.to(torch.float16)  # type: ignore[arg-type]


def test_a_compiled_model_trains_and_evaluates_as_the_plain_one(captured: Captured, rows: Rows) -> None:
    """The first rows come through torch.compile: the capture must not see its tensors."""
    near = NearModel(captured)
    compiled = torch.compile(near, backend="eager")
    compiled.train()
    compiled(rows).sum().backward()
    assert all(p.grad is not None for p in captured.model.parameters() if p.requires_grad)
    compiled.eval()
    assert torch.equal(compiled(rows), near(rows))


def test_rows_can_be_taken_apart_for_micro_batches():
    rows = Rows((torch.arange(12.0).reshape(4, 3),), 1, torch.arange(4))
    assert rows[1:3].samples.tolist() == [1, 2]
    assert torch.equal(rows[[3, 0]].tensors[0], rows.tensors[0][[3, 0]])
    assert rows.dtype is torch.float32
    with pytest.raises(ModelError, match=r"rows\[2:3\]"):
        rows[2]
