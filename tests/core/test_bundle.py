"""Named arrays as one of each type: what comes out is what went in, whoever had what."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headwater.core.bundle import bundle, unbundle
from headwater.core.spec import TensorSpec
from headwater.errors import DamagedError

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
SPECS = st.lists(st.tuples(SHAPES, st.sampled_from(["float32", "float64"])), min_size=1, max_size=5)


@given(SPECS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_sum_of_bundles_has_the_bits_of_sums_of_what_is_there(specs, num_nodes, random):
    """-0.0 included; what nobody has is not in it."""
    forms = {f"w{place}": TensorSpec(f"w{place}", shape, dtype) for place, (shape, dtype) in enumerate(specs)}
    drawn, values = np.random.default_rng(random.randrange(2**32)), [-0.0, 0.0, 1.5, -2e-30, 1e30]
    parts = [
        {name: np.asarray(drawn.choice(values, spec.shape), spec.dtype)
         for name, spec in forms.items() if random.random() < 0.6}
        for _ in range(num_nodes)
    ]  # fmt: skip
    total = bundle(parts[0], forms)
    for part in parts[1:]:
        for dtype, whole in bundle(part, forms).items():
            total[dtype] = total[dtype] + whole
    wanted = {}
    for part in parts:
        for name, each in part.items():
            wanted[name] = wanted[name] + each if name in wanted else each
    found = unbundle(total, forms)
    assert set(found) == set(wanted)
    for name, each in wanted.items():
        assert found[name].shape == each.shape
        assert found[name].tobytes() == each.tobytes()


@pytest.mark.parametrize("whole", [
    {},
    {"float32": np.zeros(3, np.float32), "float64": np.zeros(3)},
    {"float32": np.zeros(2, np.float32)},
    {"float32": np.zeros(3)},
    {"float32": np.zeros((3, 1), np.float32)},
], ids=str)  # fmt: skip
def test_a_sum_of_another_form_is_refused(whole):
    with pytest.raises(DamagedError):
        unbundle(whole, {"w": TensorSpec("w", (2,), "float32")})
