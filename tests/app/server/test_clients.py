"""Where a request comes from, as its connection and a named proxy tell."""

from __future__ import annotations

import pytest

import launch
from app.server.clients import Proxies, port_of


def scope(peer, forwarded=(), server="192.0.2.1", **more):
    headers = [(b"x-forwarded-for", each.encode()) for each in forwarded]
    return {
        "client": (peer, 1) if peer else None,
        "server": (server, 7860),
        "headers": headers,
        **more,
    }


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "192.0.2.1"])
def test_at_the_machine_itself_is_who_comes_from_its_own_addresses(peer):
    assert Proxies().client(scope(peer)).is_here
    assert Proxies.named(["10.0.0.1"]).client(scope(peer, ["1.2.3.4"])).is_here
    assert not Proxies.named(["127.0.0.0/8"]).client(scope(peer)).is_here


@pytest.mark.parametrize("peer", ["192.0.2.2", "10.0.0.1", "fe80::1%eth0", "", "no address"])
def test_all_others_are_elsewhere(peer):
    assert not Proxies().client(scope(peer)).is_here


@pytest.mark.parametrize(
    ("forwarded", "address"),
    [
        (["1.2.3.4"], "1.2.3.4"),
        (["9.9.9.9, 1.2.3.4"], "1.2.3.4"),
        (["9.9.9.9", "1.2.3.4"], "1.2.3.4"),
        (["1.2.3.4, 10.0.0.8, 10.0.0.9"], "1.2.3.4"),
        (["10.0.0.7, 10.0.0.8"], "10.0.0.7"),
        (["1.2.3.4:5678"], "1.2.3.4"),
        (["[2001:db8::7]:5678"], "2001:db8::7"),
        (["::ffff:1.2.3.4"], "1.2.3.4"),
        (["1.2.3.4, unknown"], "10.0.0.1"),
        (["1.2.3.4, unknown, 10.0.0.8"], "10.0.0.8"),
        ([""], "10.0.0.1"),
        ([], "10.0.0.1"),
    ],
)
def test_the_client_of_a_proxy_is_the_rightmost_hop_that_is_none(forwarded, address):
    client = Proxies.named(["10.0.0.0/8"]).client(scope("10.0.0.1", forwarded))
    assert (client.address, client.is_here) == (address, False)
    assert Proxies().client(scope("10.0.0.1", forwarded)).address == "10.0.0.1"


def test_one_line_of_ipv6_counts_as_one_address():
    groups = [
        Proxies().client(scope(peer)).group
        for peer in ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1", "1.2.3.4", "1.2.3.5")
    ]
    assert groups[0] == groups[1] and len(set(groups)) == 4


@pytest.mark.parametrize(
    ("host", "scheme", "port"),
    [
        (b"127.0.0.1:7860", "http", 7860),
        (b"[::1]:81", "http", 81),
        (b"ram.example.org", "http", 80),
        (b"ram.example.org", "https", 443),
        (b"x:99999999", "http", 80),
        (b"[", "http", 80),
    ],
)
def test_the_port_is_that_of_the_host(host, scheme, port):
    assert port_of(
        scope("1.2.3.4", headers=[], scheme=scheme) | {"headers": [(b"host", host)]}
    ) == (port)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--proxy", "nginx"], "--proxy nginx: this is no IP address"),
        (["--proxy", "10.0.0.1/99"], "--proxy 10.0.0.1/99: this is no IP address"),
        (["--proxy", "127.0.0.1"], "--proxy: other machines reach the app through a proxy"),
    ],
)
def test_a_proxy_that_cannot_be_is_told_before_the_server_starts(
    tmp_path, monkeypatch, capsys, arguments, text
):
    monkeypatch.delenv("RAMSTREAM_LOGIN", raising=False)
    assert launch.main([*arguments, "--no-browser", "--runs-dir", str(tmp_path / "runs")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"ramstream: {text}") and printed.count("\n") == 1
    assert not (tmp_path / "runs").exists()
