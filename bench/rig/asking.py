"""Waits until a store takes objects: `python -m bench.rig.asking`, in a host that reaches it."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

from obstore.exceptions import BaseError
from obstore.store import S3Store

from bench.rig.store import UP_WITHIN_S


def ask() -> bool:
    """Write an object until that works; whether it did. The S3 door opens before there is room behind it."""
    store = S3Store(
        "rig-is-up", config={"endpoint": os.environ["AWS_ENDPOINT_URL"], "virtual_hosted_style_request": False},
        client_options={"allow_http": True, "timeout": timedelta(seconds=5)}, retry_config={"max_retries": 0},
    )  # fmt: skip
    deadline = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < deadline:
        try:
            store.put("yes", b"yes")
        except BaseError:
            time.sleep(0.1)
        else:
            return True
    return False


if __name__ == "__main__":
    sys.exit(0 if ask() else 1)
