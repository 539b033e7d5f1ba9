"""The sender of a request: the address, and whether that is this machine itself.

Headers on the origin of a request (`X-Forwarded-For` and its like) count only if it comes from a
proxy that the user has named. From all others these headers are removed, so that neither our code
nor Gradio's can believe them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from starlette.types import Scope

from engine.errors import RamstreamError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

CLIENT_KEY = "ramstream.client"
FORWARDED_FOR, FORWARDED_PROTO = b"x-forwarded-for", b"x-forwarded-proto"
_CLAIMS = (b"x-forwarded-", b"forwarded", b"x-real-ip", b"x-gradio-")
"""Beginnings of headers on where a request comes from, or where Gradio is."""
DEFAULT_PORTS = {"http": 80, "https": 443}
IPV6_PREFIX = 64
"""Bits of the IPv6 addresses that one line of a home or an office has to itself."""


@dataclass(frozen=True)
class Client:
    """Sender of a request, as far as its connection and a named proxy show."""

    address: str
    """IP address, or an empty text where there is none."""
    is_here: bool = False
    """Whether the request was sent on this machine. It is never so while a proxy on this machine is
    named.
    """
    is_proxied: bool = False
    """Whether a named proxy has passed the request on."""
    scheme: str = "http"
    """Scheme that the browser uses: http or https."""

    @property
    def group(self) -> str:
        """Address for counting: who has one IPv6 address has billions beside it."""
        address = _address(self.address)
        if not isinstance(address, ipaddress.IPv6Address):
            return self.address
        return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))


class Proxies:
    """Proxies that the user has named. Without any, no such header is believed."""

    def __init__(self, networks: Sequence[Network] = ()):
        self._networks = tuple(networks)
        self._one_is_here = any(network[0].is_loopback for network in self._networks)

    @classmethod
    def named(cls, texts: Iterable[str]) -> Proxies:
        """Returns the proxies with these addresses or networks. Raises RamstreamError for a text
        that is neither.
        """
        networks = []
        for text in texts:
            try:
                networks.append(ipaddress.ip_network(text, strict=False))
            except ValueError:
                raise RamstreamError(
                    f"--proxy {text}: this is no IP address; name the address from which the proxy "
                    "connects, such as 127.0.0.1, or its network, such as 10.0.0.0/8."
                ) from None
        return cls(networks)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def include(self, address: Address) -> bool:
        """Returns whether an address is that of a named proxy."""
        return any(address in network for network in self._networks)

    def client(self, scope: Scope) -> Client:
        """Returns the client of a request."""
        peer = _address(_host(scope.get("client")))
        scheme = scope.get("scheme", "http")
        if peer is None:
            return Client("", scheme=scheme)
        hops = _items(scope, FORWARDED_FOR)
        if hops and self.include(peer):
            schemes = _items(scope, FORWARDED_PROTO)
            if schemes and schemes[-1].lower() in DEFAULT_PORTS:
                scheme = schemes[-1].lower()
            return Client(str(self._outermost(hops, peer)), is_proxied=True, scheme=scheme)
        is_here = peer.is_loopback or peer == _address(_host(scope.get("server")))
        return Client(str(peer), is_here and not self._one_is_here, scheme=scheme)

    def _outermost(self, hops: list[str], peer: Address) -> Address:
        """Returns the rightmost hop that no named proxy is: each proxy adds, at the right, the
        address that connected to it, and whatever stands further left may be invented.
        """
        last = peer
        for hop in reversed(hops):
            address = _address(_without_port(hop))
            if address is None:
                break
            last = address
            if not self.include(address):
                break
        return last

    def seen(self, scope: Scope) -> Scope:
        """Returns a scope whose client is the one found, without headers that claim another."""
        client = self.client(scope)
        headers = [
            (name, value)
            for name, value in scope.get("headers", [])
            if not name.lower().startswith(_CLAIMS)
        ]
        port = (scope.get("client") or ("", 0))[1]
        return {
            **scope,
            "headers": headers,
            "client": (client.address, port) if client.address else None,
            "scheme": client.scheme,
            CLIENT_KEY: client,
        }


def client_of(scope: Scope) -> Client:
    """Returns the client that the guard has found, or without a guard that of the connection."""
    client = scope.get(CLIENT_KEY)
    return client if isinstance(client, Client) else Proxies().client(scope)


def port_of(scope: Scope) -> int:
    """Returns the port of the address under which the browser has reached the app."""
    default = DEFAULT_PORTS.get(client_of(scope).scheme, 80)
    hosts = header_values(scope, b"host")
    try:
        return urlsplit(f"//{hosts[0].decode('latin-1')}").port or default
    except (IndexError, ValueError):
        return default


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """Returns the values of all headers of this name, which is in lower case."""
    return [value for key, value in scope.get("headers", []) if key.lower() == name]


def _items(scope: Scope, name: bytes) -> list[str]:
    """Returns the items of a header that is a list, from all its lines."""
    lines = header_values(scope, name)
    return [item.strip() for line in lines for item in line.decode("latin-1").split(",")]


def _host(place: Any) -> str:
    return str(place[0]) if place else ""


def _address(text: str) -> Address | None:
    """Returns the address that a text is; IPv4 within IPv6 counts as IPv4."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _without_port(hop: str) -> str:
    """Returns the address of a hop, which some proxies write with a port."""
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop
