from __future__ import annotations

import logging
import sys
import threading
import warnings

import pytest

from headwater.model.quiet import quiet


def test_this_threads_chatter_is_dropped_and_another_threads_words_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet():
        print("exporter")
        print("exporter", file=sys.stderr)
        warnings.warn("exporter", stacklevel=1)
        speaker = threading.Thread(target=print, args=("progress",))
        speaker.start()
        speaker.join()
    assert capsys.readouterr() == ("progress\n", "")


def test_only_the_exporters_loggers_fall_silent_and_only_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = logging.getLogger("onnxscript.some.part"), logging.getLogger("headwater.some.part")
    with quiet():
        theirs.warning("chatter")
        ours.warning("news")
    theirs.warning("later")
    assert [record.message for record in caplog.records] == ["news", "later"]
