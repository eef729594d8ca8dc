"""Counts by tenant, for no more tenants than a monitoring system can bear.

Owns `Tally`. Whoever is first gets a name of its own, up to `MAX_TENANTS`; all others share `OTHERS`. Jobs and chunks
are never names: there is no end to them.

What holds (tests/core/test_tally.py): names are bounded whatever is counted, and nothing that is counted is lost.
"""

from __future__ import annotations

MAX_TENANTS = 64
OTHERS = "(others)"


class Tally:
    """Amounts by name and labels; the first label is a tenant's name."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._tenants: set[str] = set()
        self._amounts: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, name: str, tenant: str, *labels: str, amount: float = 1) -> None:
        """`labels` are a few that the program knows in advance."""
        key = name, (self.known(tenant), *labels)
        self._amounts[key] = self._amounts.get(key, 0) + amount

    def put(self, name: str, tenant: str, *labels: str, amount: float) -> None:
        """The amount is this from now on."""
        self._amounts[name, (self.known(tenant), *labels)] = amount

    def known(self, tenant: str) -> str:
        """The name that this tenant is counted under."""
        if tenant not in self._tenants:
            if len(self._tenants) >= self._max_tenants:
                return OTHERS
            self._tenants.add(tenant)
        return tenant

    def items(self) -> list[tuple[str, tuple[str, ...], float]]:
        """(name, labels, amount), sorted."""
        return [(name, labels, amount) for (name, labels), amount in sorted(self._amounts.items())]
