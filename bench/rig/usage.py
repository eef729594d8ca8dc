"""What a host has used, measured by the kernel. Owns `Usage`."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Usage:
    """Counters of one host since the rig came up.

    Memory is what counts against the limit: processes and the page cache of files they touched. `resident_bytes` is
    processes alone. Link bytes have headers; the kernel may move several packets as one, and then counts one header.
    """

    cpu_s: float
    memory_bytes: int
    max_memory_bytes: int
    resident_bytes: int
    num_memory_kills: int
    received_bytes: int
    sent_bytes: int

    def since(self, earlier: Usage) -> Usage:
        """The same with counters counted from `earlier`; memory stays as it is."""
        return replace(
            self,
            cpu_s=self.cpu_s - earlier.cpu_s,
            num_memory_kills=self.num_memory_kills - earlier.num_memory_kills,
            received_bytes=self.received_bytes - earlier.received_bytes,
            sent_bytes=self.sent_bytes - earlier.sent_bytes,
        )
