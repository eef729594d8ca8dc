from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from headwater.errors import ModelError
from headwater.model.freeze import freeze, keep_frozen


def trainable(model: nn.Module) -> set[str]:
    return {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_everything_registered_before_until_is_frozen_root_parameters_too(small: nn.Module) -> None:
    assert trainable(freeze(small, until="block")) == {"block", "fc"}
    assert not small.bn1.training
    assert small.block.training


def test_until_may_name_a_parameter(small: nn.Module) -> None:
    freeze(small, until="block.1.bias")
    assert not small.block[1].weight.requires_grad
    assert small.block[1].bias.requires_grad


def test_until_inside_a_container_leaves_the_container_open(small: nn.Module) -> None:
    freeze(small, until="block.1")
    assert not small.block[0].training
    assert small.block.training
    assert small.block[1].training


def test_without_until_everything_is_frozen(small: nn.Module) -> None:
    assert trainable(freeze(small)) == set()
    assert not any(module.training for module in small.modules())


def test_frozen_modules_stay_in_eval_mode_after_train(small: nn.Module, images: Tensor) -> None:
    freeze(small, until="block").train()
    before = small.bn1.running_mean.clone()
    small(images)
    assert torch.equal(small.bn1.running_mean, before)
    assert small.block[1].num_batches_tracked == 1


def test_keep_frozen_works_on_demand(small: nn.Module) -> None:
    freeze(small, until="block").train()
    assert small.bn1.training
    keep_frozen(small)
    assert not small.bn1.training
    assert small.block.training


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_a_frozen_model_survives_copy_and_pickle(small: nn.Module, images: Tensor, again) -> None:
    twin = again(freeze(small, until="block")).train()
    twin(images)
    assert not twin.bn1.training


def test_freezing_twice_registers_one_hook(small: nn.Module) -> None:
    freeze(freeze(small, until="block"), until="block")
    assert len(small._forward_pre_hooks) == 1


def test_an_earlier_until_thaws_what_freeze_froze_and_nothing_else(small: nn.Module) -> None:
    small.block[0].weight.requires_grad_(False)
    freeze(small, until="fc")
    freeze(small, until="block")
    assert small.block[1].training
    assert small.block[1].weight.requires_grad
    assert not small.block[0].weight.requires_grad


def test_an_unknown_name_is_answered_with_close_ones(small: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"'blok'.*close names: block"):
        freeze(small, until="blok")
