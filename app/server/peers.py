"""Which account of this machine has opened a connection over loopback.

The kernel reports the account of every socket: over netlink (sock_diag(7)), which finds one by its
addresses, and in `/proc/net/tcp` and `/proc/net/tcp6`, of which a reading takes 5 to 10 ms since it
walks all of the kernel's table. The tables are for systems without the first. The row of the
client's side is looked up once for each connection, and is believed only if all of these hold:

- The socket is open: it has an inode, and its state is that of a connection. A socket that was
  closed may be listed with root as its account. One that only begins to connect may be another
  one, to which the port of a closed one was given.
- All rows of these two addresses name one account.
- The account is one of this user namespace: the kernel lists all others under one number.

Root's programs are nobody in particular: forwarders of containers and of some SSH servers run as
root and speak for others. Only a server of root itself takes them for its owner's.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from starlette.types import Scope

from engine.machine.readings import is_wsl

Place: TypeAlias = tuple[str, int]
Row: TypeAlias = tuple[int, int]
"""Account and inode of a socket."""
Find: TypeAlias = Callable[[Place, Place], set[Row]]
"""The open sockets at the first place that are connected to the second."""
IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

PEER_KEY = "ramstream.peer"
"""Key of the scope's `state` under which a connection leaves its peer."""
PROC = Path("/proc")
READINGS = 2
"""Number of times a table is read: rows may move meanwhile, so an open socket may be missed once.
"""
ALL_ACCOUNTS = 2**32 - 1
"""Number of accounts in a row by which the user namespace of the machine is known."""
_OPEN_STATES = frozenset({1, 4, 5})
"""Connected, and connected with nothing more to send (ESTABLISHED, FIN_WAIT1 and FIN_WAIT2)."""


class Account(enum.Enum):
    """Whose program is at the other end of a connection."""

    OWNER = "owner"
    """Account that runs the server."""
    ANOTHER = "another"
    """Another account of this machine."""
    UNKNOWN = "unknown"
    """Unknown: the connection comes from elsewhere, from a forwarder of root, from another user
    namespace, or was closed; or the system does not show it.
    """


class Peer:
    """Other end of one connection."""

    def __init__(self, client: Place | None, server: tuple[str, int | None] | None):
        self._client, self._server = client, server
        self._account: Account | None = None

    @property
    def account(self) -> Account:
        """Whose program this is. It is looked up when it is first asked for."""
        if self._account is None:
            self._account = Account.UNKNOWN
            if self._client is not None and self._server is not None:
                host, port = self._server
                if port is not None:  # a Unix socket has none
                    self._account = account_of(self._client, (host, port))
        return self._account


def peer_account(scope: Scope) -> Account:
    """Returns whose program has sent a request, as far as its connection shows it."""
    peer = scope.get("state", {}).get(PEER_KEY)
    return peer.account if isinstance(peer, Peer) else Account.UNKNOWN


def account_of(
    client: Place, server: Place, find: Find | None = None, proc: Path = PROC
) -> Account:
    """Returns whose socket is at `client`, connected to that of this process at `server`.

    `find` looks for rows, by default in the way that works here.
    """
    if not _is_loopback(client[0]):
        return Account.UNKNOWN
    find = find or _way_that_works()
    rows: set[Row] = set()
    for _ in range(READINGS):
        rows = find(client, server)
        if rows:
            break
    accounts = {account for account, _ in rows}
    if len(accounts) != 1:
        return Account.UNKNOWN
    (account,) = accounts
    if _may_be_any(account, proc):
        return Account.UNKNOWN
    if account == os.geteuid():
        # A socket that is closed between two reads of its row has an inode and the account 0. It
        # has no inode when it is looked up again.
        if account == 0 and find(client, server) != rows:
            return Account.UNKNOWN
        return Account.OWNER
    return Account.UNKNOWN if account == 0 else Account.ANOTHER


def own_programs_are_known() -> bool:
    """Returns whether a browser that is opened from here will be known as the owner's.

    Under WSL the browser is one of Windows, whose connections a program of root passes on.
    """
    if is_wsl():
        return False
    return _knows_own(_way_that_works())


@functools.cache
def _way_that_works() -> Find:
    """Returns how sockets are found: netlink may be closed to a container, or lack TCP."""
    return ask_kernel if _knows_own(ask_kernel) else read_tables


def _knows_own(find: Find) -> bool:
    """Returns whether a connection of this process to itself is known as its own."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as listening:
        place = listening.getsockname()
        with socket.create_connection(place, timeout=1) as line:
            return account_of(line.getsockname(), place, find) is Account.OWNER
    return False


# ---------------------------------------------------------------------- netlink

_HEADER = struct.Struct("=IHHII")
"""Head of a message: its length, type, flags, number and sender (struct nlmsghdr)."""
_ASKED = struct.Struct("=BBBxI")
_ENDS = struct.Struct("!HH16s16s")
_ANY_SOCKET = b"\0" * 4 + b"\xff" * 8
"""Any interface, with any cookie."""
_ANSWER = struct.Struct("=BBxx36s12x12xII")
"""Family, state, both ends, account and inode (struct inet_diag_msg)."""
_BY_FAMILY, _REQUEST = 20, 1
_NETLINK_SOCK_DIAG = 4


def ask_kernel(client: Place, server: Place) -> set[Row]:
    """Finds the socket over netlink."""
    near, far = _plain(client[0]), _plain(server[0])
    if near.version != far.version:
        return set()
    family = socket.AF_INET if near.version == 4 else socket.AF_INET6
    ends = _ENDS.pack(client[1], server[1], near.packed, far.packed)
    body = _ASKED.pack(family, socket.IPPROTO_TCP, 0, 2**32 - 1) + ends + _ANY_SOCKET
    message = _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 1, 0) + body
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as line:
            line.settimeout(1)
            line.sendto(message, (0, 0))
            answer, (sender, _) = line.recvfrom(4096)
    except OSError:
        return set()
    if sender != 0:  # that is the kernel
        return set()
    if len(answer) < _HEADER.size + _ANSWER.size or _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return set()
    family, state, ends, account, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    # Where there is no such connection, the kernel names a socket that waits for one.
    if _ends(family, ends) != ((near, client[1]), (far, server[1])):
        return set()
    return {(account, inode)} if state in _OPEN_STATES and inode != 0 else set()


def _ends(family: int, ends: bytes) -> tuple[tuple[IP, int], tuple[IP, int]]:
    """Returns both ends of a connection, of which IPv4 within IPv6 counts as IPv4."""
    near_port, far_port, near, far = _ENDS.unpack(ends)
    size = 4 if family == socket.AF_INET else 16
    return (_unmapped(near[:size]), near_port), (_unmapped(far[:size]), far_port)


# ---------------------------------------------------------------------- the tables


def read_tables(client: Place, server: Place, proc: Path = PROC) -> set[Row]:
    """Finds the socket in the kernel's tables."""
    found: set[Row] = set()
    for table, near, far in _searched(client, server):
        pattern = re.compile(
            rb": %b %b ([0-9A-F]{2}) \S+ \S+ \S+ +([0-9]{1,10}) +[0-9]+ +([0-9]{1,20}) "
            % (near, far)
        )
        try:
            rows = (proc / "net" / table).read_bytes()
        except OSError:
            continue
        for state, account, inode in pattern.findall(rows):
            if int(state, 16) in _OPEN_STATES and int(inode) != 0:
                found.add((int(account), int(inode)))
    return found


def _searched(client: Place, server: Place) -> Iterator[tuple[str, bytes, bytes]]:
    """Yields where the row of a connection can be: a table, and both ends as it writes them.

    A program may use a socket of IPv6 for a connection of IPv4.
    """
    near, far = _plain(client[0]), _plain(server[0])
    if near.version != far.version:
        return
    if near.version == 4:
        yield "tcp", _written(near.packed, client[1]), _written(far.packed, server[1])
    first = b"\0" * 10 + b"\xff" * 2 if near.version == 4 else b""
    yield (
        "tcp6",
        _written(first + near.packed, client[1]),
        _written(first + far.packed, server[1]),
    )


def _written(packed: bytes, port: int) -> bytes:
    """Returns an end of a connection as the kernel writes it: words of 32 bits in the byte order of
    the machine, then the port.
    """
    groups = (packed[at : at + 4] for at in range(0, len(packed), 4))
    address = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in groups)
    return f"{address}:{port:04X}".encode("ascii")


def _plain(text: str) -> IP:
    """Returns an address of a socket; IPv4 within IPv6 counts as IPv4."""
    return _unmapped(ipaddress.ip_address(text.partition("%")[0]).packed)


def _unmapped(packed: bytes) -> IP:
    address = ipaddress.ip_address(packed)
    return getattr(address, "ipv4_mapped", None) or address


def _is_loopback(text: str) -> bool:
    try:
        return _plain(text).is_loopback
    except ValueError:
        return False


def _may_be_any(account: int, proc: Path) -> bool:
    """Returns whether the kernel writes this number for all accounts that have none here."""
    try:
        if account != int((proc / "sys/kernel/overflowuid").read_text()):
            return False
        ranges = [line.split() for line in (proc / "self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return False
    return ranges != [["0", "0", str(ALL_ACCOUNTS)]]
