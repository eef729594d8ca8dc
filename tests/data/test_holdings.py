"""What nodes hold together: replicas are one sample, and different things under one name are an error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.holdings import unite
from headwater.data.samples import Packed, Samples
from headwater.errors import ConfigError, DataError


def listing(names, node="", classes=("a", "b"), size=7):
    """Samples named "class/number"."""
    return Samples.build("file:///x", classes, keys=[f"{each}.jpg" for each in names], sizes=[size] * len(names),
                         etags=[f"{node}-{each}" for each in names],
                         labels=[classes.index(each[0]) for each in names])  # fmt: skip


held = st.sets(st.builds("{}/{}".format, st.sampled_from("ab"), st.integers(0, 20)), min_size=1)


@given(held, held, held)
def test_every_sample_is_held_by_those_who_listed_it(one, two, three):
    parts = {"one": one, "two": two, "three": three}
    holdings = unite({node: listing(sorted(names), node) for node, names in parts.items()})
    samples = holdings.samples
    whole = listing(sorted(one | two | three))
    assert samples.fingerprint == whole.fingerprint, "the order is that of one folder with everything in it"
    for number, key in enumerate(samples.keys.to_pylist()):
        name = key.removesuffix(".jpg")
        holders = {node for node, names in parts.items() if name in names}
        assert holdings.holders[holdings.groups[number]] == holders
        for node in holders:
            (ref,) = holdings.refs(node, [number])
            assert (ref.id, ref.key, ref.etag) == (number, key, f"{node}-{name}")
    assert holdings.is_split == (not one == two == three)


def test_classes_that_only_some_nodes_have_are_united_by_name():
    holdings = unite({"one": listing(["a/1"], classes=("a",)), "two": listing(["b/1"], classes=("b",))})
    assert holdings.samples.classes == ("a", "b")
    assert holdings.samples.labels.tolist() == [0, 1]


def test_numbers_stay_what_they_are_where_one_node_has_fewer_of_them():
    many, few = (tuple(map(str, range(count))) for count in (11, 5))
    one, two = (
        Samples.build("file:///x", names, keys=[f"{where}-{name}" for name in names], sizes=[1] * len(names),
                      etags=[""] * len(names), labels=range(len(names)))
        for where, names in (("a", many), ("b", few))
    )  # fmt: skip
    united = unite({"one": one, "two": two}).samples
    assert united.classes == many
    assert [int(key.partition("-")[2]) for key in united.keys.to_pylist()] == united.labels.tolist()


def test_different_things_under_one_name_are_refused():
    with pytest.raises(DataError, match=r"a/1.jpg has 7 bytes on one and 8 bytes on two"):
        unite({"one": listing(["a/1"]), "two": listing(["a/1"], size=8)})


def test_a_file_that_is_listed_twice_stays_twice():
    twice = Samples.build("file:///x", ("a", "b"), keys=["x", "x"], sizes=[1, 1], etags=["", ""], labels=[0, 1])
    holdings = unite({"one": twice, "two": twice})
    assert len(holdings.samples) == 2
    assert not holdings.is_split
    assert np.array_equal(np.sort(holdings.rows["one"]), [0, 1])


def packed(offsets, node="", steps="[]"):
    """A packed set of samples that lie at these places, one class each."""
    return Samples.build("file:///x", [str(each) for each in range(len(offsets))],
                         keys=[f"shards/{shard}.hws" for shard, _ in offsets], offsets=[at for _, at in offsets],
                         lengths=[64] * len(offsets), sizes=[64] * len(offsets), etags=[node] * len(offsets),
                         labels=range(len(offsets)), packed=Packed("source", steps))  # fmt: skip


def test_copies_of_a_packed_set_are_replicas():
    places = [(0, 0), (0, 64), (1, 0)]
    holdings = unite({"one": packed(places, "1 77"), "two": packed(places, "2 77")})
    assert not holdings.is_split
    assert [ref.etag for ref in holdings.refs("two", range(3))] == ["2 77"] * 3
    assert holdings.samples.packed == Packed("source", "[]")


def test_a_packed_set_in_other_shards_is_refused_and_not_mixed():
    """A place in a shard of the one set is another picture in the other."""
    with pytest.raises(ConfigError, match=r"one and two have the same samples packed differently .*--shard-size.*copy"):
        unite({"one": packed([(0, 0), (0, 64), (1, 0)]), "two": packed([(0, 0), (1, 0), (1, 64)])})
    with pytest.raises(ConfigError, match=r"packed with other pixels \(the first in shards/0\.hws.*copy the folder"):
        unite({"one": packed([(0, 0)], "e1 123"), "two": packed([(0, 0)], "e2 124")})
    with pytest.raises(ConfigError, match="packed sets of different sources"):
        unite({"one": packed([(0, 0)]), "two": packed([(0, 0)], steps="[1]")})
