"""Who owes an answer in a step, and since when nothing has come: a node that lives and gets nothing done.

Owns `Owed`. Signs of life say that a process is there, not that it goes on: a disk that hangs holds up the thread that
works for ever, while others of the node answer. Times go in, decisions come out.

What holds (tests/core/test_owed.py): who owes nothing is never late, however long it is silent; who owes is told of
once in each `patience_s`, and given up after `GIVE_UP_TIMES` of them.
"""

from __future__ import annotations

from dataclasses import dataclass

GIVE_UP_TIMES = 10  # of patience


@dataclass(frozen=True)
class Late:
    """Nothing has come of it for so long: say so."""

    node: int
    silent_s: float


@dataclass(frozen=True)
class GivenUp:
    """The same, and it is not waited for any more."""

    node: int
    silent_s: float


@dataclass
class _Account:
    num: int = 0  # answers that are due
    is_held: bool = False  # it waits for others in the middle of one
    since: float = 0.0
    told: float = 0.0


class Owed:
    """The nodes of one step."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._accounts: dict[int, _Account] = {}

    def asked(self, node: int, now: float) -> None:
        """One more answer is due."""
        account = self._of(node)
        if not account.num:
            account.since = account.told = now
        account.num += 1

    def answered(self, node: int) -> None:
        """One less."""
        account = self._of(node)
        account.num = max(0, account.num - 1)

    def holds(self, node: int) -> None:
        """It has said what it had to say, and can't go on before others have."""
        self._of(node).is_held = True

    def goes_on(self, node: int, now: float) -> None:
        """They have."""
        account = self._of(node)
        account.is_held, account.since, account.told = False, now, now

    def heard(self, node: int, when: float) -> None:
        """Something other than a sign of life came from it then, or went to it."""
        account = self._of(node)
        if when > account.since:
            account.since = account.told = when

    def overdue(self, now: float) -> list[Late | GivenUp]:
        """What is to be done about those that have been silent for too long."""
        found: list[Late | GivenUp] = []
        for node, account in sorted(self._accounts.items()):
            if not account.num or account.is_held:
                continue
            silent_s = now - account.since
            if silent_s > GIVE_UP_TIMES * self._patience_s:
                found.append(GivenUp(node, silent_s))
            elif now - account.told > self._patience_s:
                account.told = now
                found.append(Late(node, silent_s))
        return found

    def _of(self, node: int) -> _Account:
        return self._accounts.setdefault(node, _Account())
