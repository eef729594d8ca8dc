"""One worker that adds up arrays: `python adding.py JSON`; prints digests of its sums and how far off they are."""

import hashlib
import json
import sys
from functools import partial

import numpy as np
from bench.lossy import LossyWire

from headwater.reduce import Reducer
from headwater.reduce.wire import Wire


def array(seed, rank, number, size, dtype):
    drawn = np.random.default_rng([seed, rank, number])
    return (drawn.standard_normal(size) * 100).astype(dtype)


def main(switch, rank, num_workers, arrays, seed=0, fault=None, integers=False, times=1, **options):
    make_wire = partial(LossyWire, seed=1000 * seed + rank, **fault) if fault else Wire
    digests, errors = [], []
    with Reducer(switch, rank=rank, num_workers=num_workers, make_wire=make_wire, **options) as reducer:
        for number, (size, dtype) in enumerate(arrays):
            found = reducer.all_reduce(array(seed, rank, number, size, dtype), integers=integers)
            parts = [array(seed, each, number, size, dtype).astype(np.float64) for each in range(num_workers)] * times
            scale = np.sum(np.abs(parts), axis=0).max(initial=1e-9)
            errors.append(float(np.abs(found - np.sum(parts, axis=0)).max(initial=0) / scale))
            digests.append(hashlib.sha256(found.tobytes()).hexdigest())
        wire = reducer.stream.wire
        print(
            json.dumps(
                {
                    "digests": digests,
                    "errors": errors,
                    "counts": dict(reducer.counts),
                    "lost": getattr(wire, "num_lost", 0),
                    "doubled": getattr(wire, "num_doubled", 0),
                }
            )
        )


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
