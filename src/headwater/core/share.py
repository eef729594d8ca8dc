"""Which chunks the trainer makes by itself while nodes make the others.

Owns the rule. It is a function of a chunk's place and the plan's share alone, so order, live runs and simulated ones
agree on it, and both sides work ahead on the same order: batches are what they would be without it.
"""

from __future__ import annotations

import math

STEPS = 16
SHARES = tuple(step / STEPS for step in range(1, STEPS))  # that the planner tries: between two, little changes
BEGUN = 3  # chunks of its own that each side can have under way, or made, ahead of the loop
_TINY = 1e-9  # sums of shares are not exact


def is_own(chunk: int, share: float) -> bool:
    """Whether this chunk is the trainer's own: as many of the first n are as fit into n × share.

    The first of them comes last among those it is counted with, so that there is time to make it.
    """
    return math.floor((chunk + 1) * share + _TINY) > math.floor(chunk * share + _TINY)


def own_out(cores: float) -> int:
    """Chunks that the trainer's own node has at once: one for each core, and one that is read meanwhile."""
    return max(1, math.ceil(cores)) + 1


def more_ahead(share: float) -> int:
    """Chunks that must wait for their turn beyond the usual, so that the side with fewer of them never stands idle.

    No more than for the smallest share that the planner takes: rows take memory while they wait.
    """
    return math.ceil(BEGUN / max(min(share, 1 - share), SHARES[0])) if 0 < share < 1 else 0
