"""A training job in a host of the rig, driven step by step. Owns nothing but its loop."""

import time
from itertools import islice

import torch
from bench import models
from torch.nn.functional import cross_entropy

import headwater as hw

BATCH = 16


class Training:
    def __init__(self, url, address):
        models.keep_blocks()
        torch.set_num_threads(1)
        self.url, self.address = url, address
        self.job = None

    def __call__(self, what, **arguments):
        return getattr(self, what)(**arguments)

    def begin(self):
        """Plan for the links as they are, and start an epoch."""
        self.close()
        model, transforms = models.build("mobilenet", 100)
        self.job = hw.near(model, self.url, transforms=transforms, nodes=[self.address], batch_size=BATCH, seed=7)
        self.optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)
        self.batches = iter(self.job.loader)
        return self.about()

    def about(self):
        plan = self.job.plan
        return {"uses_storage": plan.uses_storage, "cut": plan.cut, "share": plan.host_share,
                "what": self.job.describe(), "switches": [list(each.why) for each in self.job.switches]}  # fmt: skip

    def steps(self, num_steps):
        """Losses of the next steps, fewer at the end of the epoch."""
        losses = []
        for x, y in islice(self.batches, num_steps):
            loss = cross_entropy(self.job.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def rate(self, num_steps):
        """Rows a second over some steps of a new epoch, without its start."""
        self.batches = iter(self.job.loader)
        self.steps(8)
        start = time.perf_counter()
        taken = len(self.steps(num_steps))
        self.batches.close()
        return taken * BATCH / (time.perf_counter() - start)

    def close(self):
        if self.job is not None:
            self.job.close()
            self.job = None
