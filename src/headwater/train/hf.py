"""The transformers Trainer's way to a loader, and the loader's place in that Trainer's checkpoints.

Owns `dataloader_of` and `LoaderState`. Resuming, that Trainer throws as many batches away as it had before; they would
all be made once more for that. Here they are empty ones, and the loader begins behind them. May import transformers,
which nothing else of this package does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from headwater.errors import ConfigError
from headwater.train.loader import Loader


class _Batches(IterableDataset[Any]):
    """A loader's batches; before them, once, those that the Trainer throws away."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.num_thrown_away = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        empty, self.num_thrown_away = repeat(None, self.num_thrown_away), 0
        yield from empty
        yield from self.loader


def dataloader_of(loader: Loader) -> DataLoader[Any]:
    """What `Trainer.get_train_dataloader` returns: `loader`, which batches and prefetches by itself."""
    return DataLoader(_Batches(loader), batch_size=None, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


class LoaderState(TrainerCallback, ExportableState):
    """Keeps the loader's state in `trainer_state.json`, and gives it back to the loader when a run is resumed.

    The Trainer restores a callback's state only with TrainingArguments(restore_callback_states_from_checkpoint=True).
    """

    def __init__(self) -> None:
        self.loader_state: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"loader_state": self.loader_state}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        batches = _batches_of(kwargs)
        if args.ignore_data_skip or not args.restore_callback_states_from_checkpoint:
            raise ConfigError("LoaderState needs TrainingArguments(restore_callback_states_from_checkpoint=True), and "
                              "ignore_data_skip left at False: the loader goes on by itself")  # fmt: skip
        if self.loader_state is None:
            if state.global_step:
                raise ConfigError(f"the checkpoint of step {state.global_step} has no place of a loader: it was saved "
                                  "without LoaderState; start from step 0")  # fmt: skip
            return
        batches.loader.load_state_dict(self.loader_state)
        each = args.gradient_accumulation_steps
        batches.num_thrown_away = state.global_step % max(1, -(-len(batches) // each)) * each

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.loader_state = _batches_of(kwargs).loader.state_dict()


def _batches_of(given: dict[str, Any]) -> _Batches:
    batches = getattr(given.get("train_dataloader"), "dataset", None)
    if not isinstance(batches, _Batches):
        raise ConfigError("LoaderState is for a Trainer whose get_train_dataloader returns dataloader_of(job.loader); "
                          f"this one returns {type(given.get('train_dataloader')).__name__}")  # fmt: skip
    return batches
