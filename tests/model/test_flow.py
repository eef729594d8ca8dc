from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwater.model.capture import capture
from headwater.model.flow import Flow, flow, is_random, op_name


def flow_of(model: nn.Module, *inputs: Tensor) -> Flow:
    return flow(capture(model, inputs))


class Mixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(3)
        mask[1:] = 1
        table = torch.zeros(x.shape[0], 3)
        table[:, 0] = x[:, 0]
        return table + x * mask


def test_only_what_depends_on_the_values_of_the_inputs_is_a_place() -> None:
    names = [op_name(place) for place in flow_of(Mixed(), torch.randn(4, 3)).places]
    assert names.count("zeros") == 1  # the table takes data in, the mask does not
    assert names[-2:] == ["mul", "add"]


def test_values_are_alive_until_their_last_use() -> None:
    whole = flow_of(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(4, 3))
    assert [[node.name for node in whole.alive(index)] for index in range(3)] == [["input_1"], ["linear"], ["tanh"]]


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)


def test_an_operator_is_random_only_when_it_draws() -> None:
    x = torch.randn(2, 4, 8)
    for training in (True, False):
        (attention,) = flow_of(Attends().train(training), x).places
        (dropout,) = flow_of(nn.Dropout(0.5).train(training), x).places
        assert is_random(attention) is is_random(dropout) is training


def test_dropout_of_nothing_draws_nothing() -> None:
    (dropout,) = flow_of(nn.Dropout(0.0).train(), torch.randn(2, 4)).places
    assert not is_random(dropout)
