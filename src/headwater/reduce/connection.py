"""One end of a connection that carries a job's blocks (the lane `tcp`). Owns `Connection` and a block's header.

A block travels as 16 bytes of header and its values:

    word    8 bytes   as in a packet (reduce.packets): block · one piece of one · kind, mean, format
    length  8 bytes   of the values

Up they come in the order of their numbers, down as well, each once: TCP sees to what is lost. Who may have a connection
was settled before its first block (reduce.joining).
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import sys
import termios

from headwater.errors import ConfigError

BLOCK_HEAD = struct.Struct("<QQ")
RECORD_BYTES = 44_816  # that the kernel hands to the device at once; with headers, what a link of 100 Mbit/s lets pass
BLOCK_BYTES = 179_200  # of values: four records, with the header
MOST_PLACES = 1024  # that the kernel fills by one call (IOV_MAX of Linux)
SEND_BYTES = 4 << 20  # of a socket's buffer, for whoever may administer the network; others get what the kernel adapts
GONE_EVENTS = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
_SO_SNDBUFFORCE = 32  # asm-generic/socket.h; Python has no name for it


class Connection:
    """Blocks to one peer and from it. It never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_cut = False  # the peer is gone; why is said on the other connection
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # the other connection finds out whose machine went away
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, SEND_BYTES)
        self._wakes_at = 1
        self._said = bytearray(4)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, parts: list[memoryview]) -> bool:
        """A block, or its rest, in records; whether the kernel took it all. What it did not take stays in `parts`.

        The kernel doesn't join records: each goes to the device whole, and is cut into frames there, as late as the
        device allows.
        """
        while parts:
            first = parts[0]
            if len(parts) == 1:
                record = [first[:RECORD_BYTES]]
            else:
                record = [first[:RECORD_BYTES], parts[1][: max(0, RECORD_BYTES - len(first))]]
            try:
                taken = self.sock.sendmsg(record, [], socket.MSG_EOR)
            except BlockingIOError:
                return False
            except OSError:
                self.is_cut = True
                return False
            while parts and taken >= len(parts[0]):
                taken -= len(parts.pop(0))
            if taken:
                parts[0] = parts[0][taken:]
        return True

    def receive(self, places: list[memoryview]) -> int:
        """Fill these, one behind the other, as far as there is something; how much there was."""
        try:
            num_bytes: int = self.sock.recvmsg_into(places)[0]
        except BlockingIOError:
            return 0
        except OSError:
            num_bytes = 0
        if num_bytes == 0:
            self.is_cut = True
        return num_bytes

    @property
    def num_waiting(self) -> int:
        """Bytes that have come."""
        fcntl.ioctl(self.sock, termios.FIONREAD, self._said)
        return int.from_bytes(self._said, sys.byteorder)

    def make_room(self, num_bytes: int) -> int:
        """Have the kernel hold so much that has come; how much of it may be waited for. SO_RCVBUF would do it, too, but
        forbid the kernel to find out by itself what fits the link."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
        self._wakes_at = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        if self._wakes_at < BLOCK_HEAD.size + BLOCK_BYTES:
            raise ConfigError(f"the kernel holds {self._wakes_at:,} bytes of a TCP connection, less than a block; set "
                              "the sysctl net.ipv4.tcp_rmem to '4096 131072 6291456', or use lane=\"udp\"")  # fmt: skip
        return self._wakes_at

    def wake_at(self, num_bytes: int) -> None:
        """It can be read once so much is there: a thread that is woken for one block finds its caches cold."""
        if num_bytes != self._wakes_at:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes

    def close(self) -> None:
        self.sock.close()
