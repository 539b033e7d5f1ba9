"""Checks of an address before the server is built, so that a wrong one is refused in a sentence,
which blames the host or the port.
"""

from __future__ import annotations

import errno
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from app.server.guard import WILDCARD_HOSTS
from engine.errors import RamstreamError

_INSTEAD = "leave --host out to listen on 127.0.0.1"
_NUMBERS = re.compile(r"[\d.]+|[\da-fA-F:.%]*:[^/]*")
"""Form of a text that is meant as an IP address, and not as a name."""


@dataclass(frozen=True)
class Address:
    """Host and port on which the server listens, and any certificate."""

    host: str = "127.0.0.1"
    port: int = 7860
    tls: tuple[Path, Path] | None = None
    """Files of a certificate (with its chain) and of its key, for serving over https."""

    proxies: tuple[str, ...] = ()
    """Addresses or networks of the proxies that pass requests on to the server."""

    @property
    def url(self) -> str:
        """URL under which a browser on this machine reaches the server."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{self._shown_host}:{self.port}/"

    @property
    def _shown_host(self) -> str:
        if self.host in WILDCARD_HOSTS:
            return "127.0.0.1"
        is_ipv6 = ":" in self.host
        return f"[{self.host}]" if is_ipv6 else self.host


def plain_host(host: str) -> str:
    """Returns a host as a person wrote it, without the brackets of an IPv6 address in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def refuse_unusable(address: Address) -> None:
    """Raises RamstreamError, which blames the host or the port, if the server could not listen
    there.
    """
    host = address.host
    if not host.strip():
        raise RamstreamError(f"--host: no host is given; {_INSTEAD}.")
    try:
        found = socket.getaddrinfo(
            host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError, ValueError):
        raise RamstreamError(f"--host {_quoted(host)}: {_why_unknown(host)}") from None
    # A name may stand for several addresses, such as localhost for one of IPv4 and one of IPv6. The
    # server listens on all of them.
    for family, _, _, _, place in found:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # The server sets this as well, so that a port is free as soon as its last server
                # has ended.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(place)
        except OSError as error:
            raise RamstreamError(_why_unusable(address, error)) from None


def _why_unusable(address: Address, error: OSError) -> str:
    port = address.port
    if error.errno == errno.EADDRINUSE:
        return f"--port {port}: another program uses it already; choose another port."
    if error.errno == errno.EACCES:
        return f"--port {port}: this user may not use it; choose one from 1024 on."
    return f"--host {_quoted(address.host)}: this is no address of this machine; {_INSTEAD}."


def _why_unknown(host: str) -> str:
    """Returns why a host has no address."""
    name, _, port = host.rpartition(":")
    if "/" in host:
        return f"give the address alone, without http:// or a path; {_INSTEAD}."
    if port.isdecimal() and name and ":" not in name:
        return f"a port is given by --port {port}, not with the host; {_INSTEAD}."
    if _NUMBERS.fullmatch(host):
        return f"this is no IP address; {_INSTEAD}."
    return f"no machine of this name is known here; {_INSTEAD}."


def _quoted(host: str) -> str:
    """Returns a host for a sentence: unchanged, or with its control characters in codes."""
    shown = host if host.isprintable() else repr(host)
    return shown if len(shown) <= 300 else f"{shown[:297]}..."
