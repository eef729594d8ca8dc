"""A wire that loses, doubles and reorders packets, by a seed. Owns `LossyWire`; tests and `bench reduce` use it.

The kernel here has no netem. So a worker's own end does it, in both directions: to what it sends, packet by packet, and
to what it receives, before anybody has looked at it.
"""

from __future__ import annotations

import random
import socket

from headwater.reduce.packets import Layout, Packets
from headwater.reduce.wire import Wire


class LossyWire(Wire):
    """Shares of packets, from 0 to 1, each way."""

    def __init__(
        self, sock: socket.socket, layout: Layout, *, loss: float, double: float, reorder: float, seed: int
    ) -> None:
        super().__init__(sock, layout)
        self._size = layout.packet_bytes
        self._loss, self._double, self._reorder = loss, double, reorder
        self._drawn = random.Random(seed)
        self.num_lost = self.num_doubled = self.num_reordered = 0
        self._held: bytes | None = None  # goes after the next one

    def send(self, memory: memoryview | bytes) -> bool:
        for start in range(0, len(memory), self._size):
            packet = bytes(memory[start : start + self._size])
            if self._drawn.random() < self._loss:
                self.num_lost += 1
                continue
            if self._held is None and self._drawn.random() < self._reorder:
                self._held, self.num_reordered = packet, self.num_reordered + 1
                continue
            times = 1 + (self._drawn.random() < self._double)
            self.num_doubled += times - 1
            for _ in range(times):
                super().send(packet)  # a full buffer of the kernel is a loss, too
            if self._held is not None:
                held, self._held = self._held, None
                super().send(held)
        return True

    def receive(self, packets: Packets) -> tuple[int, int]:
        num_bytes, size = super().receive(packets)
        if num_bytes <= 0:
            return num_bytes, size
        whole = bytes(packets.memory[:num_bytes])
        came = [whole[start : start + size] for start in range(0, num_bytes, size)]
        kept = [packet for packet in came if self._drawn.random() >= self._loss]
        self.num_lost += len(came) - len(kept)
        for place in range(len(kept) - 2):  # the last one may be shorter, and has to stay the last
            if self._drawn.random() < self._reorder:
                kept[place], kept[place + 1] = kept[place + 1], kept[place]
                self.num_reordered += 1
        joined = b"".join(kept)
        packets.memory[: len(joined)] = joined
        return len(joined), size if len(kept) > 1 else len(joined)
