from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

from headwater.core.cut import Cut, find_cut, legal_cuts
from headwater.errors import ModelError
from headwater.model.capture import Captured, capture
from headwater.model.cuts import cuts
from headwater.model.freeze import freeze
from headwater.model.split import prefix_module, suffix_module


def crossed(captured: Captured, cut: Cut, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What arrives on the trainer: copies, whatever shared memory before."""
    return tuple(tensor.clone() for tensor in prefix_module(captured, cut)(*inputs))


def test_every_legal_cut_gives_the_models_output(small: nn.Module, images: Tensor) -> None:
    captured = capture(freeze(small), (images,))
    for cut in legal_cuts(cuts(captured)):
        assert torch.equal(suffix_module(captured, cut)(*crossed(captured, cut, images)), small(images)), cut.name


def test_the_suffix_has_the_models_own_parameters_and_only_those_it_needs(small: nn.Module, images: Tensor) -> None:
    captured = capture(freeze(small, until="fc"), (images,))
    suffix = suffix_module(captured, find_cut(cuts(captured), "drop"))
    assert {name: id(parameter) for name, parameter in suffix.named_parameters()} == {
        "fc.weight": id(small.fc.weight),
        "fc.bias": id(small.fc.bias),
    }


@pytest.mark.parametrize("name", ["bn1", "block.1", "/add"])
def test_an_in_place_relu_behind_the_cut_leaves_the_rows_alone(small: nn.Module, images: Tensor, name: str) -> None:
    captured = capture(freeze(small), (images,))
    cut = find_cut(cuts(captured), name)
    rows = crossed(captured, cut, images)
    before = [tensor.clone() for tensor in rows]
    suffix_module(captured, cut)(*rows)
    assert all(map(torch.equal, rows, before))


class Overwrites(nn.Module):
    """The input itself, a view and a table filled from data are all changed in place."""

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        x.mul_(2)
        table = torch.zeros(x.shape[0], 4)
        table[:, :2] = x[:, :2]
        y = x + 1
        view = y.view(x.shape[0], 2, 2)
        y.relu_()
        return {"sum": view.sum((1, 2)) + table.sum(1), "none": None}


def test_memory_that_is_shared_and_changed_in_place_is_never_torn() -> None:
    x = torch.randn(5, 4)
    captured = capture(Overwrites(), (x[:3],))
    found = cuts(captured)
    assert any("share memory" in cut.why_not for cut in found)
    expected = Overwrites()(x.clone())["sum"]
    for cut in legal_cuts(found):
        given = x.clone()
        output = suffix_module(captured, cut)(*crossed(captured, cut, given))
        assert torch.equal(output["sum"], expected), cut.name
        assert output["none"] is None
        assert torch.equal(given, x)


def test_an_illegal_cut_does_not_divide_the_model() -> None:
    captured = capture(Overwrites(), (torch.randn(3, 4),))
    torn = next(cut for cut in cuts(captured) if "share memory" in cut.why_not)
    with pytest.raises(ModelError, match="share memory"):
        suffix_module(captured, torn)


Pair = namedtuple("Pair", ["low", "high"])


class Twins(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Pair:
        return Pair(x - y, [x + y, {"rows": x.shape[0]}])


def test_several_inputs_and_a_nested_output_keep_their_structure() -> None:
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    captured = capture(Twins(), (x, y))
    for cut in legal_cuts(cuts(captured)):
        low, (high, sizes) = suffix_module(captured, cut)(*crossed(captured, cut, x, y))
        assert torch.equal(low, x - y)
        assert torch.equal(high, x + y)
        assert sizes == {"rows": 3}


def test_code_under_no_grad_stays_under_no_grad() -> None:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x + 1)
            with torch.no_grad():
                z = y * 3
            return y + z

    model, x = Stops(), torch.randn(3, 2)
    captured = capture(model, (x,))
    suffix_module(captured, cuts(captured)[1])(x + 1).sum().backward()
    near, model.fc.weight.grad = model.fc.weight.grad, None
    model(x).sum().backward()
    assert torch.allclose(near, model.fc.weight.grad)


def test_a_prefix_counts_no_batch_for_the_batch_norm_behind_it(small: nn.Module, images: Tensor) -> None:
    captured = capture(freeze(small, until="block.1"), (images,))
    prefix_module(captured, find_cut(cuts(captured), "block.0"))(images)
    assert small.block[1].num_batches_tracked == 0
