"""The transformers Trainer: two lines of a subclass say where batches come from, a callback keeps the place in its
checkpoints.

    python examples/hf_trainer.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

import headwater as hw
from headwater.train.hf import LoaderState, dataloader_of
from pictures import TRANSFORMS, small_model, write_digits


class NearTrainer(Trainer):
    def __init__(self, job: hw.Job, **options: Any) -> None:
        super().__init__(job.model, **options)
        self.job, self.losses = job, []
        self.add_callback(LoaderState())

    def get_train_dataloader(self) -> Any:
        return dataloader_of(self.job.loader)

    def compute_loss(self, model: torch.nn.Module, inputs: Any, **kwargs: Any) -> torch.Tensor:
        x, y = inputs
        loss = cross_entropy(model(x), y)
        self.losses.append(loss.item())
        return loss


class StopAfter(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def train(data: Path, out: Path, nodes: list[str] | None = None, stop_after: int | None = None) -> list[float]:
    """Two epochs, with a checkpoint in `out` every three steps; goes on from the one that is there."""
    arguments = TrainingArguments(
        str(out), num_train_epochs=2, save_steps=3, save_total_limit=1, learning_rate=1e-2, use_cpu=True,
        restore_callback_states_from_checkpoint=True,  # among them the loader's place
        report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    with hw.near(small_model(), data, nodes=nodes, transforms=TRANSFORMS, batch_size=10, plan=None) as job:
        trainer = NearTrainer(job, args=arguments, callbacks=[StopAfter(stop_after)])
        trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")))
    return trainer.losses


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else write_digits(Path("examples-out/digits"))
    done = train(folder, Path("examples-out/hf"))
    print(f"{len(done)} steps; the last loss is {done[-1]:.4f}" if done else "all done before")
