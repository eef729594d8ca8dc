from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headwater.core.cut import Cut, find_cut, legal_cuts, smallest_cut
from headwater.core.spec import TensorSpec
from headwater.errors import ImpureError, ModelError
from headwater.model.capture import capture
from headwater.model.cuts import cuts
from headwater.model.freeze import freeze


def cuts_of(model: nn.Module, *inputs: Tensor) -> tuple[Cut, ...]:
    return cuts(capture(model, inputs))


def test_cuts_are_numbered_in_order_and_have_unique_names(small: nn.Module, images: Tensor) -> None:
    found = cuts_of(freeze(small), images)
    assert [cut.index for cut in found] == list(range(len(found)))
    assert len({cut.name for cut in found}) == len(found)
    assert found[0].name == "input"
    assert found[0].boundary == (TensorSpec("x", (3, 8, 8), "float32"),)


def test_a_cut_is_named_after_the_outermost_module_that_ends_there(small: nn.Module, images: Tensor) -> None:
    found = cuts_of(freeze(small), images)
    assert [cut.name for cut in found] == [
        *("input", "/mul", "conv1", "bn1", "relu", "block.0", "block.1"),
        *("block", "/add", "relu@1", "/mean", "drop", "fc"),
    ]
    assert find_cut(found, "block.2") is find_cut(found, "block")


def test_several_tensors_cross_inside_a_residual(small: nn.Module, images: Tensor) -> None:
    cut = find_cut(cuts_of(freeze(small), images), "block.0")
    assert [spec.name for spec in cut.boundary] == ["relu", "block.0"]
    assert cut.row_bytes == 2 * 4 * 8 * 8 * 4


def test_prefix_weights_are_counted(small: nn.Module, images: Tensor) -> None:
    cut = find_cut(cuts_of(freeze(small), images), "bn1")
    assert cut.prefix_params == 1 + 4 * 3 * 9 + 4 + 4 + 4
    assert cut.prefix_bytes == (cut.prefix_params + 4 + 4) * 4  # and the running mean and variance


def test_the_smallest_cut_is_the_latest_of_the_fewest_bytes(small: nn.Module, images: Tensor) -> None:
    assert smallest_cut(cuts_of(freeze(small, until="fc"), images)).name == "drop"


def test_a_cut_after_a_trainable_layer_names_the_parameter_and_the_fix(small: nn.Module, images: Tensor) -> None:
    found = cuts_of(freeze(small, until="block"), images)
    with pytest.raises(ImpureError, match=r"block\.0\.weight is trainable: call hw\.freeze.*legal cut.*'relu'"):
        find_cut(found, "block")


def test_batch_norm_in_training_mode_names_the_module_and_the_fix(small: nn.Module, images: Tensor) -> None:
    found = cuts_of(small.requires_grad_(False), images)
    assert find_cut(found, "conv1").legal
    with pytest.raises(ImpureError, match=r"bn1 is in training mode: call hw\.freeze\(.*\) or bn1\.eval\(\)"):
        find_cut(found, "block")


def test_dropout_in_training_mode_is_impure(small: nn.Module, images: Tensor) -> None:
    freeze(small).drop.train()
    with pytest.raises(ImpureError, match="drop is in training mode"):
        find_cut(cuts_of_as_is(small, images), "fc")


def cuts_of_as_is(model: nn.Module, images: Tensor) -> tuple[Cut, ...]:
    """Without the hook that would put a frozen module back into eval mode."""
    model._forward_pre_hooks.clear()
    return cuts_of(model, images)


def test_batch_norm_without_running_statistics_is_impure_in_eval_mode_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).requires_grad_(False).eval()
    assert "statistics of its batch" in cuts_of(model, torch.randn(4, 3))[1].why_not


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.seen.add_(1)
        return y + self.seen


def test_a_prefix_that_changes_a_buffer_is_impure() -> None:
    found = cuts_of(Counts().eval(), torch.randn(4, 3))
    assert [cut.legal for cut in found] == [True, True, False]
    assert "changes its own buffers" in found[2].why_not


class Folds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        windows = x.reshape(x.shape[0] * 2, -1) + 1
        return windows.reshape(x.shape[0], -1).t().contiguous().t()


def test_the_batch_must_lead_every_tensor_that_crosses() -> None:
    found = cuts_of(Folds(), torch.randn(4, 6))
    assert [cut.legal for cut in found] == [True, False, False, True, False, False, True]
    assert "leading dimension is not the batch" in found[1].why_not


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2 + torch.rand(x.shape[0], 1)) * 3


def test_random_numbers_in_eval_mode_are_impure() -> None:
    found = cuts_of(Noise().eval(), torch.randn(4, 3))
    assert [cut.legal for cut in found] == [True, True, False, False]
    assert "draws random numbers (rand)" in found[2].why_not


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.place = nn.Embedding(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.ones(ids.shape[0], ids.shape[1], 1)
        return (self.embed(ids) + self.place(torch.arange(ids.shape[1]))) * mask


def test_constants_position_ids_and_masks_never_cross() -> None:
    found = cuts_of(Positions().requires_grad_(False), torch.randint(0, 10, (3, 6)))
    assert [len(cut.boundary) for cut in found] == [1] * 4
    assert all(cut.legal for cut in found)


def test_an_unknown_cut_is_answered_with_close_names(small: nn.Module, images: Tensor) -> None:
    found = cuts_of(freeze(small), images)
    with pytest.raises(ModelError, match=r"'blocks'; close names: block"):
        find_cut(found, "blocks")
    with pytest.raises(ModelError, match=f"0 to {len(found) - 1}"):
        find_cut(found, len(found))


def test_a_trainable_model_may_still_be_cut_at_its_input(small: nn.Module, images: Tensor) -> None:
    assert [cut.name for cut in legal_cuts(cuts_of(small, images))] == ["input"]


def test_rows_of_bfloat16_are_no_cut_for_no_array_can_hold_them(images: Tensor) -> None:
    class Rounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.bfloat16).float()

    found = cuts_of(Rounded(), images)
    assert [cut.boundary[0].dtype for cut in found if cut.legal] == ["float32", "float32"]
    assert "bfloat16, which can't be sent" in found[1].why_not
