"""The site, built strictly: it loads nothing from elsewhere, and every page of the documents is there."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
from website.__main__ import build

NEEDED = ("sphinx", "myst_parser", "furo")


@pytest.mark.slow
@pytest.mark.skipif(any(find_spec(name) is None for name in NEEDED), reason="needs what make docs installs")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    site = tmp_path / "site"
    assert build(site) == 0
    pages = list(site.rglob("*.html"))
    assert {"index.html", "start.html", "api.html", "peers.html"} <= {page.name for page in pages}
    loaded = re.compile(r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=\"([^\"]+)\"|"
                        r"<link\b(?![^>]*rel=\"(?:canonical|author)\")[^>]*?\bhref=\"([^\"]+)\"")  # fmt: skip
    for page in pages:
        for match in loaded.finditer(page.read_text()):
            assert not re.match(r"(?:\w+:)?//", match[1] or match[2]), f"{page.name} loads {match[0]}"
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:\w+:)?//|@import\s+[\"'](?:\w+:)?//", path.read_text()), path.name
    assert (site / "searchindex.js").exists()
    assert 'id="near"' in (site / "api.html").read_text()
