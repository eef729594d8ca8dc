"""What is being done, where there is a terminal and where there is none."""

import logging

from headwater.progress import Progress


def test_without_a_terminal_it_goes_to_the_log(caplog):
    caplog.set_level(logging.INFO)
    with Progress().step("listing the folder") as tick:
        tick(3)
    first, last = [record.getMessage() for record in caplog.records if record.name == "headwater.progress"]
    assert first == "listing the folder …"
    assert last.startswith("listing the folder: ")
