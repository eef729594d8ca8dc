"""Puts a folder into the rig's store. `python -m bench.rig.upload FOLDER BUCKET PREFIX` is what runs in the host."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from obstore.store import S3Store

if TYPE_CHECKING:
    from bench.rig.store import Store
    from bench.rig.up import RigUp

from bench.rig.python import python


def upload(up: RigUp, store: Store, folder: Path, place: str) -> None:
    """Every file below `folder` as an object below `place` ("bucket/prefix")."""
    up.run(store.host, python("bench.rig.upload", str(folder), *place.split("/", 1)), env=store.env)


def main() -> None:
    folder, bucket, prefix = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    store = S3Store(bucket, config={"endpoint": os.environ["AWS_ENDPOINT_URL"], "virtual_hosted_style_request": False},
                    client_options={"allow_http": True})  # fmt: skip

    def put(path: Path) -> None:
        store.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    put(files[0])  # alone: it makes the bucket
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, files))


if __name__ == "__main__":
    main()
