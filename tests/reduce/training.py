"""One worker of a DDP run: `python training.py JSON`. `what` names what it does; the last line it prints is JSON."""

import hashlib
import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headwater.reduce import attach

BUCKET_MB = 0.05  # several buckets of a small model
STEPS, FEW = 20, 5


def make(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 160), torch.nn.ReLU(), torch.nn.Linear(160, 160), torch.nn.ReLU(),
              torch.nn.Linear(160, 10)]  # fmt: skip
    model = torch.nn.Sequential(*layers).to(dtype)
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB), torch.optim.SGD(model.parameters(), lr=0.05)


def step(model, optimizer, number, rank, dtype=torch.float32):
    drawn = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(16, 64, generator=drawn).to(dtype)
    y = torch.randint(0, 10, (16,), generator=drawn)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def digest(model):
    body = b"".join(each.detach().view(torch.uint8).numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(body).hexdigest()


def train(rank, switch, name, dtype, steps=STEPS, **options):
    """The losses of a run, a digest of its parameters, and what carried its gradients."""
    model, optimizer = make(dtype)
    attached = attach(model, switch=switch, job=name, **options) if switch else None
    losses = [step(model, optimizer, number, rank, dtype) for number in range(steps)]
    stats = attached.stats if attached else {}
    if attached:
        attached.detach()
    return {"losses": losses, "digest": digest(model), "stats": stats}


def curves(rank, switch):
    wide, half, brain = torch.float64, torch.float16, torch.bfloat16
    return {
        "gloo": train(rank, None, "", torch.float32),
        "switch": train(rank, switch, "one", torch.float32),
        "again": train(rank, switch, "two", torch.float32, lane="udp"),
        "gloo64": train(rank, None, "", wide),
        "switch64": train(rank, switch, "wide", wide),
        "integers": train(rank, switch, "integers", torch.float32, FEW, numbers="integers"),
        "fp16": train(rank, switch, "fp16", torch.float32, FEW, numbers="fp16"),
        "half": train(rank, switch, "half", half, FEW),
        "bf16": train(rank, switch, "brain", brain, FEW),
    }


def faults(rank, switch, pid):
    """The aggregator is killed in the middle of a step and comes back; then a worker is killed."""
    model, optimizer = make()
    plain, plain_optimizer = make()
    attached = attach(model, switch=switch, timeout_s=20.0)
    victim = list(model.parameters())[2]
    wanted = []

    def in_the_middle(gradient):
        while wanted:
            os.kill(wanted.pop(), signal.SIGKILL)

    victim.register_hook(in_the_middle)

    def both(number):
        step(model, optimizer, number, rank)
        step(plain, plain_optimizer, number, rank)

    for number in range(3):
        both(number)
    before = attached.stats
    if rank == 0:
        wanted.append(pid)
    both(3)
    print("lost", flush=True)
    after, number, is_back = attached.stats, 4, torch.zeros(1)
    while not is_back and number < 5000:
        both(number)
        number += 1
        is_back[0] = attached.is_in_network
        dist.broadcast(is_back, src=0)
    for _ in range(3):
        both(number)
        number += 1
    said = {
        "before": before, "after": after, "stats": attached.stats, "digest": digest(model),
        "off": max(float((ours - theirs).abs().max()) for ours, theirs in
                   zip(model.parameters(), plain.parameters(), strict=True)),
    }  # fmt: skip
    if rank == 2:
        print(json.dumps(said), flush=True)
        wanted.append(os.getpid())
    try:
        step(model, optimizer, number, rank)
    except Exception as error:  # DDP makes a RuntimeError of what a future holds
        said["error"] = f"{type(error).__name__}: {error}"
    return said


def main(what, rank, world, init, **about):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=world)
    print(json.dumps(globals()[what](rank, **about)), flush=True)
    os._exit(0)  # a group of which a worker was killed has no orderly end


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
