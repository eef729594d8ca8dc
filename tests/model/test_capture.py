from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from headwater.errors import CaptureError
from headwater.model.capture import capture, modes_of


def test_the_graph_has_the_models_own_parameters_and_buffers(small: nn.Module, images: Tensor) -> None:
    graph = capture(small, (images,)).graph_module
    assert all(graph.get_parameter(name) is parameter for name, parameter in small.named_parameters())
    assert all(graph.get_buffer(name) is buffer for name, buffer in small.named_buffers())


def test_capturing_leaves_modes_buffers_and_random_numbers_alone(small: nn.Module, images: Tensor) -> None:
    small.block.eval()
    modes, state, draw = modes_of(small), torch.get_rng_state(), small.bn1.running_mean.clone()
    captured = capture(small, (images,))
    assert modes_of(small) == modes == captured.modes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(small.bn1.running_mean, draw)


def test_running_statistics_of_the_graph_reach_the_model(small: nn.Module, images: Tensor) -> None:
    capture(small, (images,)).graph_module(images)
    assert small.bn1.num_batches_tracked == 1
    assert small.bn1.running_mean.abs().sum() > 0


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_one_capture_serves_every_batch_size(small: nn.Module, images: Tensor, rows: int) -> None:
    small.eval()
    graph = capture(small, (images[:rows],)).graph_module
    assert torch.allclose(graph(torch.cat([images, images])), small(torch.cat([images, images])), atol=1e-6)


def test_capture_works_amid_inference_mode(small: nn.Module, images: Tensor) -> None:
    with torch.inference_mode():
        captured = capture(small, (images,))
    assert captured.inputs[0].shape == (3, 8, 8)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return x * 2


def test_an_unexportable_model_is_an_error_with_a_way_out(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CaptureError) as caught:
            capture(Branches(), (torch.randn(2, 3),))
    message = str(caught.value)
    assert "Branches" in message
    assert "if x.sum() > 0" in message
    assert "way out" in message
    assert len(message.splitlines()) < 12
    assert capfd.readouterr() == ("", "")


def test_a_fixed_batch_size_is_an_error() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(4, -1) if x.shape[0] == 4 else x

    with pytest.raises(CaptureError, match="batch"):
        capture(Fixed(), (torch.randn(4, 3),))


@pytest.mark.parametrize(
    "example", [(), (torch.tensor(1.0),), (torch.ones(2, 1), torch.ones(3, 1)), (torch.ones(0, 3),)]
)
def test_an_example_without_a_common_batch_is_refused(small: nn.Module, example: tuple[Tensor, ...]) -> None:
    with pytest.raises(CaptureError, match="Small"):
        capture(small, example)


def test_a_large_example_is_not_held(small: nn.Module) -> None:
    assert capture(small, (torch.randn(64, 3, 8, 8),)).example[0].shape == (4, 3, 8, 8)
