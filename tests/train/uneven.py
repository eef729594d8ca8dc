"""One trainer of several, as torchrun starts it: an epoch with gradients averaged. Owns nothing but its loop.

`torchrun … uneven.py DATA NODE OUT PRONGS`: writes the batches it had, and what it then knows, to OUT/RANK.json.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import headwater as hw
from headwater.core.plan import near_plan
from headwater.core.prongs import ORDERED
from headwater.data.transforms import Resize, ToFloat


def main(data, node, out, prongs):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 1001))
    job = hw.near(model, data, transforms=[Resize((4, 4)), ToFloat()], nodes=[node], batch_size=64, seed=3, plan=None)
    rank = torch.distributed.get_rank()
    if prongs != ORDERED:  # each has measured rates of its own, and they go through one order all the same
        job.adopt(near_plan(job.cuts[0], host_share=(0.25, 0.75)[rank], prongs=prongs))
    near = DistributedDataParallel(job.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = []
    for x, y in job.loader:
        loss = cross_entropy(near(x), y)  # the gradients' average waits for the other trainer in every step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batches.append(y.tolist())
    said = {"batches": batches, "weights": model[1].weight.sum().item(), "state": job.loader.state_dict()}
    Path(out, f"{rank}.json").write_text(json.dumps(said))
    job.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
