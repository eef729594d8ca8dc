"""Where a table is trained: what a step costs on nodes and with a copy here, and that a copy is made only where it
helps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.embedding_cost import HERE, NODES, STEPS, PartCosts, Rates, TableCosts, fastest, loads
from headwater.core.travel import Shape

SHAPE = Shape(num_bags=1000, num_ids=10_000, num_distinct=6_000, vector_bytes=512)


def costs(link=1e8, node=1.0, num_nodes=1, copy_bytes=0, fits=True, cold=0.0, disk_s=0.0):
    """Cores here take 1 µs for an id and for a vector; those of a node `node` times as long."""
    share = Shape(1000, 10_000 // num_nodes, 6_000 // num_nodes, 512)
    part = PartCosts(share, Rates(node * 1e-6, node * 1e-6), disk_s, 1e-4, cold, (link, link))
    return TableCosts(SHAPE, (part,) * num_nodes, Rates(1e-6, 1e-6), (num_nodes * link,) * 2, 1e-4, copy_bytes, fits)


def best(found, ways=("pooled", "vectors")):
    return fastest(found, ways)[0]


def test_a_table_that_fits_is_kept_here_where_links_are_slow():
    assert best(costs(link=1e7)).place == HERE


def test_a_table_that_does_not_fit_stays_on_its_nodes():
    assert best(costs(link=1e3, fits=False)).place == NODES


def test_a_copy_that_takes_longer_to_fetch_than_it_will_save_is_not_made():
    found = costs(link=1e7)
    gained_s = loads(found, "pooled").step_s - loads(found, HERE).step_s
    much = int(gained_s * STEPS * 1e7)
    assert best(costs(link=1e7, copy_bytes=much // 10)).place == HERE
    assert best(costs(link=1e7, copy_bytes=much)).place == NODES


def test_many_fast_nodes_on_a_fast_link_do_more_than_a_copy():
    assert best(costs(link=1e10, node=0.1, num_nodes=8)).place == NODES


def test_long_bags_are_pooled_on_nodes_and_short_ones_cross_as_vectors():
    assert best(costs(fits=False)).way == "pooled"
    few = Shape(num_bags=1000, num_ids=1000, num_distinct=20, vector_bytes=512)
    part = PartCosts(few, Rates(1e-6, 1e-6), 0.0, 0.0, 0.0, (1e7, 1e7))
    assert best(TableCosts(few, (part,), Rates(1e-6, 1e-6), (1e7, 1e7), 1e-4, 0, False)).way == "vectors"


def test_only_ways_that_are_left_open_are_considered():
    assert [each.way for each in fastest(costs(), ("vectors",)) if each.place == NODES] == ["vectors"]


def test_what_a_step_waits_for_is_in_its_price():
    """Ids and gradients up, sums down, at the link's pace; cores, cold vectors and the disk of the slowest node."""
    found = loads(costs(link=1e6, node=2.0, cold=50, disk_s=0.003), "pooled")
    assert found.up_s == pytest.approx((1000 * 512 + 11_000 * 4) / 1e6)
    assert found.down_s == pytest.approx(1000 * 512 / 1e6)
    assert found.nodes_s == pytest.approx(2 * 16_000e-6 + 50 * 1e-4)
    assert found.disk_s == 0.003
    assert found.largest == "the link"
    assert loads(costs(), HERE).step_s == pytest.approx(16_000e-6)


@given(st.floats(1e4, 1e10), st.floats(0.1, 100), st.integers(1, 8), st.integers(0, 10**9))
def test_the_choice_is_never_much_slower_than_any_other(link, node, num_nodes, copy_bytes):
    found = fastest(costs(link, node, num_nodes, copy_bytes))
    assert found[0].step_s <= 1.1 * min(each.step_s for each in found) + 1e-12
    assert {each.way for each in found} == {"pooled", "vectors", HERE}
