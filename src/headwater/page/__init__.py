"""The page to look at: its files, which a node and `headwater ui` serve, and the rules a browser keeps for it.

Owns `static` and `HEADERS`. The files are written by hand and need nothing from elsewhere: no build, no CDN. All that
they show comes as JSON from where they came from, and becomes text nodes alone. May import the standard library alone.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
STATUS, RUN = "/status.json", "/run.json"  # what the page asks for: again and again, and when a run has changed
HEADERS = (
    ("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
     "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
     "require-trusted-types-for 'script'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)  # fmt: skip


@cache
def static() -> dict[str, tuple[bytes, str]]:
    """Content and kind of each file, by the path it is asked for with."""
    folder = files("headwater.page") / "static"
    return {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
