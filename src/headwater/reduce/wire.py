"""A UDP socket that moves many packets by one call. Owns `Wire`; the kernel's options are set here alone.

On Linux a buffer of up to 64 KB goes to the kernel whole and is cut into packets there (UDP_SEGMENT), as late as the
network device allows; packets that come in a row arrive as one buffer (UDP_GRO). Elsewhere, or where a device refuses,
packets go one at a time.
"""

from __future__ import annotations

import errno
import logging
import socket
import struct

from headwater.reduce.packets import Layout, Packets

_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104  # linux/udp.h; Python 3.11 has no names for them
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE = 33, 32
_ANCILLARY = socket.CMSG_SPACE(4)
RECEIVE_BYTES = 4 << 20  # of a socket's buffer, where the system gives so much
SEND_BYTES = 1 << 20  # holds a window, so that a worker need not wake up to keep its link busy
_GONE = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_FULL = (errno.EAGAIN, errno.ENOBUFS)

log = logging.getLogger(__name__)


class Wire:
    """One end of a flow: packets to one peer and from it alone. It never blocks."""

    def __init__(self, sock: socket.socket, layout: Layout) -> None:
        self.sock = sock
        sock.setblocking(False)
        self._packet_bytes = layout.packet_bytes
        self.num_lost_sends = 0  # the peer was not there
        self.receive_bytes = _enlarge(sock, socket.SO_RCVBUF, _SO_RCVBUFFORCE, RECEIVE_BYTES)
        _enlarge(sock, socket.SO_SNDBUF, _SO_SNDBUFFORCE, SEND_BYTES)
        self._many = _set(sock, _UDP_SEGMENT, layout.packet_bytes)
        _set(sock, _UDP_GRO, 1)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, memory: memoryview | bytes) -> bool:
        """Packets, laid end to end; False if the kernel has no room, and then none or some were sent."""
        try:
            if self._many or len(memory) <= self._packet_bytes:
                self.sock.send(memory)
            else:
                for start in range(0, len(memory), self._packet_bytes):
                    self.sock.send(memory[start : start + self._packet_bytes])
        except OSError as error:
            if error.errno in _FULL:
                return False
            if error.errno in _GONE:  # as good as lost on the way
                self.num_lost_sends += 1
                return True
            if self._many and error.errno in (errno.EINVAL, errno.EIO, errno.EMSGSIZE, errno.EOPNOTSUPP):
                log.warning("this network device takes no buffers of many packets (%s); sending one at a time", error)
                self._many = False
                _set(self.sock, _UDP_SEGMENT, 0)
                return self.send(memory)
            raise
        return True

    def receive(self, packets: Packets) -> tuple[int, int]:
        """Bytes that came, and the size of each packet in them but the last; (0, 0): nothing is there."""
        try:
            num_bytes, ancillary, flags, _ = self.sock.recvmsg_into([packets.memory], _ANCILLARY)
        except OSError as error:
            if error.errno in _FULL or error.errno in _GONE:
                return 0, 0
            raise
        if flags & socket.MSG_TRUNC:
            return -1, 0  # longer than any of ours
        for _, kind, said in ancillary:
            if kind == _UDP_GRO:
                return num_bytes, struct.unpack("i", said[:4])[0]
        return num_bytes, num_bytes

    def close(self) -> None:
        self.sock.close()


def open_wire(local: tuple[str, int], peer: tuple[str, int], layout: Layout, *, shared: bool = False) -> Wire:
    """A wire from `local` to `peer`. With `shared`, others may have the same local port for other peers."""
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0))
    try:
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(local)
        sock.connect(peer)
        return Wire(sock, layout)
    except BaseException:
        sock.close()
        raise


def _set(sock: socket.socket, option: int, value: int) -> bool:
    try:
        sock.setsockopt(_SOL_UDP, option, value)
    except OSError:
        return False
    return True


def _enlarge(sock: socket.socket, option: int, force: int, wanted: int) -> int:
    """What the system gives: more than it gives everybody only to whoever may administer the network."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, force, wanted)
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, option, wanted)
    return sock.getsockopt(socket.SOL_SOCKET, option)
