"""Whether a URL stays below a root. Owns `is_below`."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit


def is_below(url: str, root: str) -> bool:
    """Is `url` the root or below it, by its text and, for folders, also after links were followed? Both are full."""
    if ".." in unquote(url).split("/"):
        return False
    if url != root and not url.startswith(root.rstrip("/") + "/"):
        return False
    if not root.startswith("file://"):
        return True
    path, top = (os.path.realpath(unquote(urlsplit(each).path)) for each in (url, root))
    return path == top or path.startswith(top.rstrip("/") + "/")
