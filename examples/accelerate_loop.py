"""Accelerate: the loader is registered for checkpointing, so save_state and load_state carry its place in the epoch.

python examples/accelerate_loop.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

import headwater as hw
from pictures import TRANSFORMS, small_model, write_digits


def train(data: Path, out: Path, nodes: list[str] | None = None, stop_after: int | None = None) -> list[float]:
    """Two epochs, with a checkpoint in `out` every three steps; goes on from the one that is there."""
    accelerator, losses, checkpoint = Accelerator(cpu=True), [], out / "last"
    with hw.near(small_model(), data, nodes=nodes, transforms=TRANSFORMS, batch_size=10, plan=None) as job:
        optimizer = torch.optim.Adam((p for p in job.model.parameters() if p.requires_grad), lr=1e-2)
        model, optimizer = accelerator.prepare(job.model, optimizer)
        accelerator.register_for_checkpointing(job.loader)  # in place of prepare: it deals among trainers by itself
        step = 0
        if checkpoint.exists():
            accelerator.load_state(checkpoint)
            step = 3 * int((checkpoint / "saves").read_text())
        for _ in range(job.loader.epoch, 2):
            for x, y in job.loader:
                loss = cross_entropy(model(x.to(accelerator.device)), y.to(accelerator.device))
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                losses.append(loss.item())
                step += 1
                if step % 3 == 0:
                    accelerator.save_state(checkpoint)
                    (checkpoint / "saves").write_text(str(step // 3))
                if step == stop_after:
                    return losses
    return losses


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else write_digits(Path("examples-out/digits"))
    done = train(folder, Path("examples-out/accelerate"))
    print(f"{len(done)} steps; the last loss is {done[-1]:.4f}" if done else "all done before")
