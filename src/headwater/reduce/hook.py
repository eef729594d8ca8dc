"""Gradients of DistributedDataParallel, added up in the network. Owns `attach` and `Attached`; needs torch.

    model = torch.nn.parallel.DistributedDataParallel(model)
    hw.reduce.attach(model, switch="10.0.0.5:8816", key=…)      # on every worker, before the first backward

DDP hands over each bucket of gradients as soon as backward has made it. The bucket goes to a thread of its own, so
backward goes on meanwhile, and comes back as the mean over all workers, the same bits on each.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headwater.core.sums import BF16, FP16, FP32, FP64, SCALED, Format
from headwater.errors import AggregatorGoneError, ConfigError, HeadwaterError
from headwater.reduce.carrier import Bucket, Carrier
from headwater.reduce.compression import ErrorFeedback
from headwater.reduce.control import address, key_bytes
from headwater.reduce.fallback import Fallback
from headwater.reduce.joining import TCP, Joined, Ticket, join
from headwater.reduce.nccl import choose
from headwater.reduce.reducer import JOIN_S, TIMEOUT_S, checked_lane

NUMBERS = ("same", "fp16", "integers")
_FORMATS = {torch.float32: FP32, torch.float64: FP64, torch.float16: FP16, torch.bfloat16: BF16}

log = logging.getLogger(__name__)


class Attached:
    """What `attach` has set up. `said` tells it in words."""

    def __init__(self, said: str, carrier: Carrier | None = None, feedback: ErrorFeedback | None = None) -> None:
        self.said = said
        self._carrier, self._feedback = carrier, feedback
        self._numbers = "same"
        self._group: Any = None

    @property
    def is_in_network(self) -> bool:
        """Do sums come from the aggregator, as things stand?"""
        return self._carrier is not None and self._carrier.is_by_switch

    @property
    def stats(self) -> dict[str, int]:
        """Buckets by the aggregator and by the ordinary all-reduce, how often the aggregator was lost, and packets that
        were dropped, by why."""
        if self._carrier is None:
            return {}
        carrier = self._carrier
        return {"by_switch": carrier.num_by_switch, "by_all_reduce": carrier.num_by_group, "lost": carrier.num_settled,
                **carrier.counts}  # fmt: skip

    def detach(self) -> None:
        """Finish what is under way and leave the job; later buckets go by the ordinary all-reduce. On every worker."""
        if self._carrier is not None:
            self._carrier.close()
            self._carrier = None

    def _add_up(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        carrier = self._carrier
        if carrier is None:
            gradients.div_(dist.get_world_size(self._group))
            dist.all_reduce(gradients, group=self._group)
            made.set_result(gradients)
            return made
        number = _FORMATS.get(gradients.dtype)
        if number is None or gradients.device.type != "cpu":
            raise ConfigError(f"gradients of {gradients.dtype} on {gradients.device} can't be added up so; "
                              "float32, float64, float16 and bfloat16 on the CPU can")  # fmt: skip
        prepare = self._prepare(bucket.index(), gradients)

        def finished(error: BaseException | None) -> None:
            made.set_result(error or gradients)  # type: ignore[arg-type]  # `_value` raises an error

        carrier.put(Bucket(_as_array(gradients), self._wire_number(number), finished, prepare))
        return made.then(_value)

    def _wire_number(self, number: Format) -> Format:
        if number is FP32 and self._numbers == "fp16":
            return FP16
        return SCALED if number is FP32 and self._numbers == "integers" else number

    def _prepare(self, index: int, gradients: torch.Tensor) -> Callable[[], None] | None:
        feedback = self._feedback
        if feedback is None or gradients.dtype != torch.float32:
            return None
        return lambda: feedback.round(index, gradients)


def attach(
    model: DistributedDataParallel,
    *,
    switch: str,
    key: str | None = None,
    job: str = "default",
    lane: str = TCP,
    numbers: str = "same",
    rack: tuple[int, int] | None = None,
    timeout_s: float = TIMEOUT_S,
    join_s: float = JOIN_S,
) -> Attached:
    """Have a model's gradients added up by the aggregator at `switch`. On every worker, before the first backward.

    Returns what was set up. ConfigError for arguments that make no sense; AggregatorGoneError, JoinRefusedError or
    WorkerGoneError, on all workers, if not all of them can join.

    model       the DistributedDataParallel whose gradients are added up
    switch      HOST:PORT of the aggregator
    key         the job's, by default that in HEADWATER_REDUCE_KEY
    job         its name, where an aggregator serves several with one key
    lane        how blocks travel: "tcp", or "udp" as a switch would take them
    numbers     what travels of fp32 gradients: "same"; "fp16", with what rounding loses kept for the next step; or
                "integers", as a switch adds
    rack        this worker's place behind a leaf: (its rank there, how many there are)
    timeout_s   how long to wait for another worker within a step
    join_s      how long to wait until all have joined

    Should the aggregator go away, the ordinary all-reduce takes over within a step, and it is used again when it is
    back. If a worker goes, all others get an error within `timeout_s`. With the `nccl` backend sums stay NCCL's own,
    in the fabric's switches where it has them.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"attach takes a DistributedDataParallel model; this is a {type(model).__name__}. Wrap it: "
                          "model = DistributedDataParallel(model)")  # fmt: skip
    if numbers not in NUMBERS:
        raise ConfigError(f"numbers is {numbers!r}; it must be one of {', '.join(NUMBERS)}")
    group: Any = model.process_group
    ranks = dist.get_process_group_ranks(group)
    if dist.get_backend(group) == "nccl":
        return _attach_nccl(model, ranks)
    where, secret = address(switch, "switch"), key_bytes(key)
    fallback = Fallback(ranks, timeout_s)
    session = bytes(fallback.spread(np.frombuffer(secrets.token_bytes(16), np.uint8).copy(), 0)).hex()
    place, num_workers = rack or (fallback.rank, fallback.num_workers)
    ticket = Ticket(job, session, place, num_workers, key=secret, lane=checked_lane(lane))
    joined = _join_together(where, ticket, fallback, join_s)
    carrier = Carrier(switch, where, ticket, joined, fallback, timeout_s)
    made = Attached(f"gradients of {num_workers} workers are added up by the aggregator at {switch}", carrier,
                    ErrorFeedback() if numbers == "fp16" else None)  # fmt: skip
    made._numbers, made._group = numbers, group
    # Not the method itself: DDP takes annotations only as objects, and ours are texts.
    model.register_comm_hook(made, lambda state, bucket: state._add_up(bucket))
    log.info("%s", made.said)
    atexit.register(_leave, weakref.ref(carrier))
    return made


def _join_together(where: tuple[str, int], ticket: Ticket, fallback: Fallback, join_s: float) -> Joined:
    """All join, or all get an error."""
    error: HeadwaterError | None = None
    joined: Joined | None = None
    try:
        joined = join(where, ticket, join_s)
    except HeadwaterError as found:
        error = found
    said = [each[0] for each in fallback.gather([int(joined is not None)])]
    if all(said) and joined is not None:
        return joined
    if joined is not None:
        joined.close("done")
    raise error or AggregatorGoneError(f"worker {said.index(0)} could not join {where[0]}:{where[1]}; "
                                       "its own error says why")  # fmt: skip


def _attach_nccl(model: DistributedDataParallel, ranks: list[int]) -> Attached:
    """NCCL adds up in the fabric's switches, where it has them. Settings act on groups that are made after them, so the
    gradients get one of their own."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    workers_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    choice = choose(os.environ, len(ranks), workers_per_node)
    os.environ.update(choice.settings)
    model.register_comm_hook(dist.new_group(ranks=ranks, backend="nccl"), allreduce_hook)
    said = f"sums stay NCCL's own: {choice.said}. No aggregator is used"
    log.info("%s", said)
    return Attached(said)


def _as_array(gradients: torch.Tensor) -> Any:
    """The same memory as an array; bf16 as its bits."""
    if gradients.dtype == torch.bfloat16:
        return gradients.view(torch.int16).numpy().view(np.uint16)
    return gradients.numpy()


def _value(done: torch.futures.Future[Any]) -> Any:
    """What a future holds; an error is raised. To DDP only a future whose callback raised has failed."""
    found = done.value()
    if isinstance(found, BaseException):
        raise found
    return found


def _leave(carrier: weakref.ref[Carrier]) -> None:
    """At the end of a process that did not detach: so that the others don't take it for dead."""
    if (found := carrier()) is not None:
        found.leave()
