"""A store: can it be listed and read from here, and how long does that take."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from headwater.cli.checks import NOTE, OK, WRONG, Finding
from headwater.data.secrets import redact
from headwater.data.store import open_store
from headwater.errors import HeadwaterError

MAX_READ_BYTES = 64 << 20  # a larger object is not read whole
_NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL")


def check(url: str) -> Iterator[Finding]:
    """List the first page, read one object."""
    part = redact(url)
    if url.startswith("s3://"):
        given = [name for name in _NAMES if os.environ.get(name)]
        signed = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(given)
        yield Finding(
            part,
            "credentials",
            OK if signed else NOTE,
            f"set: {', '.join(given) or 'none'}",
            ""
            if signed
            else "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, unless this machine has a role; "
            "profiles in ~/.aws are not read",
        )
    try:
        store = open_store(url)
        begin = time.perf_counter()
        page = next((entries for entries in store.list() if entries), [])
        taken_s = time.perf_counter() - begin
        if not page:
            yield Finding(part, "list", WRONG, f"nothing is in it ({taken_s:.2f} s)", "check bucket and folder")
            return
        yield Finding(part, "list", OK, f"{len(page):,} entries in a first page after {taken_s:.2f} s")
        entry = next((each for each in page if 0 < each.size <= MAX_READ_BYTES), None)
        if entry is None:
            yield Finding(part, "read", NOTE, "no object of the first page is small enough to be read for a look")
            return
        begin = time.perf_counter()
        found = store.read_whole(entry.key)
        taken_s = time.perf_counter() - begin
        yield Finding(part, "read", OK, f"{entry.key}: {len(found):,} bytes in {1e3 * taken_s:.1f} ms")
    except HeadwaterError as error:
        yield Finding(part, "store", WRONG, redact(str(error)))
