"""Which of NCCL's settings `attach` makes; the decision alone, since there is no GPU here."""

from headwater.reduce.nccl import choose


def test_one_node_asks_for_nvlink_switches():
    made = choose({}, 8, 8)
    assert made.settings == {"NCCL_NVLS_ENABLE": "1"}
    assert "NVLink" in made.said


def test_several_nodes_ask_for_sharp_as_well():
    assert choose({}, 16, 8).settings == {"NCCL_NVLS_ENABLE": "1", "NCCL_COLLNET_ENABLE": "1"}
    assert choose({}, 4, 1).settings == {"NCCL_COLLNET_ENABLE": "1"}


def test_what_the_user_has_set_stays_and_is_said():
    made = choose({"NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "1"}, 16, 8)
    assert made.settings == {}
    assert "NCCL_NVLS_ENABLE=0 is set, and stays" in made.said


def test_an_algorithm_that_rules_switches_out_is_pointed_at():
    assert "unset it" in choose({"NCCL_ALGO": "Ring,Tree"}, 8, 8).said
    assert "unset it" not in choose({"NCCL_ALGO": "NVLS,Ring"}, 8, 8).said


def test_one_worker_has_nothing_to_add_up():
    assert choose({}, 1, 1).settings == {}
