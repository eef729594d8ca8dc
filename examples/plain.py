"""A plain PyTorch loop that may be stopped anywhere: started again, it goes on in the middle of the epoch.

python examples/plain.py [FOLDER]     FOLDER has one sub-folder of pictures for each class
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import headwater as hw
from pictures import TRANSFORMS, small_model, write_digits


def train(data: Path, out: Path, nodes: list[str] | None = None, stop_after: int | None = None) -> list[float]:
    """Two epochs, with a checkpoint in `out` every three steps; goes on from the one that is there."""
    model, checkpoint, step, losses = small_model(), out / "last.pt", 0, []
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    with hw.near(model, data, nodes=nodes, transforms=TRANSFORMS, batch_size=10, plan=None) as job:
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            job.loader.load_state_dict(saved["loader"])
            step = saved["step"]
        for _ in range(job.loader.epoch, 2):
            for x, y in job.loader:
                loss = cross_entropy(job.model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                step += 1
                if step % 3 == 0:
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                                "loader": job.loader.state_dict(), "step": step}, checkpoint)  # fmt: skip
                if step == stop_after:
                    return losses
    return losses


if __name__ == "__main__":
    output = Path("examples-out/plain")
    output.mkdir(parents=True, exist_ok=True)
    folder = Path(sys.argv[1]) if sys.argv[1:] else write_digits(Path("examples-out/digits"))
    done = train(folder, output)
    print(f"{len(done)} steps; the last loss is {done[-1]:.4f}" if done else "all done before")
