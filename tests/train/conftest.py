"""Jobs of these tests measure their machines for a moment only."""

import pytest


@pytest.fixture(autouse=True)
def brief(moments: None) -> None:
    """All of them."""
