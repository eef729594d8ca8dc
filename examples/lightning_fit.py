"""PyTorch Lightning: `job.loader` is the train loader, and Lightning's own checkpoints say where in the epoch it stood.

python examples/lightning_fit.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytorch_lightning as pl  # or: import lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy

import headwater as hw
from pictures import TRANSFORMS, small_model, write_digits


class Classifier(pl.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: tuple[hw.Rows, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = cross_entropy(self.model(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=1e-2)


def train(data: Path, out: Path, nodes: list[str] | None = None, stop_after: int | None = None) -> list[float]:
    """Two epochs, with a checkpoint in `out` every three steps; goes on from the one that is there."""
    saving = ModelCheckpoint(out, save_last=True, every_n_train_steps=3)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=2, max_steps=stop_after or -1, callbacks=[saving],
                         logger=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    with hw.near(small_model(), data, nodes=nodes, transforms=TRANSFORMS, batch_size=10, plan=None) as job:
        classifier = Classifier(job.model)
        trainer.fit(classifier, job.loader, ckpt_path="last" if (out / "last.ckpt").exists() else None)
    return classifier.losses


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else write_digits(Path("examples-out/digits"))
    done = train(folder, Path("examples-out/lightning"))
    print(f"{len(done)} steps; the last loss is {done[-1]:.4f}" if done else "all done before")
