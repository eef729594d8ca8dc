"""Several trainers under torchrun, each with its part of every step; a checkpoint serves any number of them.

torchrun --nproc-per-node 2 examples/ddp.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import headwater as hw
from pictures import TRANSFORMS, small_model, write_digits


def train(data: Path, out: Path, nodes: list[str] | None = None, stop_after: int | None = None) -> list[float]:
    """Two epochs, with a checkpoint in `out` every three steps; goes on from the one that is there."""
    model, checkpoint, step, losses = small_model(), out / "last.pt", 0, []
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    # near() finds out by itself which of how many trainers this is.
    with hw.near(model, data, nodes=nodes, transforms=TRANSFORMS, batch_size=5, plan=None) as job:
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            job.loader.load_state_dict(saved["loader"])
            step = saved["step"]
        ddp = DistributedDataParallel(job.model)
        for _ in range(job.loader.epoch, 2):
            for x, y in job.loader:
                loss = cross_entropy(ddp(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                step += 1
                if step % 3 == 0:
                    if dist.get_rank() == 0:  # the loader's state is the same on all
                        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                                    "loader": job.loader.state_dict(), "step": step}, checkpoint)  # fmt: skip
                    dist.barrier()
                if step == stop_after:
                    return losses
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    output, folder = Path("examples-out/ddp"), Path(sys.argv[1] if sys.argv[1:] else "examples-out/digits")
    output.mkdir(parents=True, exist_ok=True)
    if not sys.argv[1:] and dist.get_rank() == 0:
        write_digits(folder)
    dist.barrier()
    done = train(folder, output)
    print(f"trainer {dist.get_rank()}: {len(done)} steps")
    dist.destroy_process_group()
