"""Who is counted for a wrong password, and for how long."""

from __future__ import annotations

import pytest

from app.server.attempts import FORGOTTEN_SECONDS, WRONG_OF_ALL, WRONG_OF_ONE, Attempts
from app.server.clients import Client

HERE = Client("127.0.0.1", is_here=True)
AWAY = Client("192.0.2.1")


def wrong(attempts, client, times, now=0.0):
    for _ in range(times):
        attempts.was_wrong(client, now)


def test_guesses_at_the_machine_itself_lock_out_nobody():
    attempts = Attempts()
    wrong(attempts, HERE, 10 * WRONG_OF_ALL)
    assert not attempts.are_too_many(HERE, 1) and not attempts.are_too_many(AWAY, 1)


def test_guesses_from_elsewhere_never_lock_out_who_is_here():
    attempts = Attempts()
    for number in range(30):
        wrong(attempts, Client(f"192.0.2.{number}"), WRONG_OF_ONE)
    assert attempts.are_too_many(Client("198.51.100.1"), 1)
    assert not attempts.are_too_many(HERE, 1)


def test_an_address_is_listened_to_again_after_a_minute():
    attempts = Attempts()
    wrong(attempts, AWAY, WRONG_OF_ONE)
    assert attempts.are_too_many(AWAY, FORGOTTEN_SECONDS - 0.1)
    assert not attempts.are_too_many(AWAY, FORGOTTEN_SECONDS)


@pytest.mark.parametrize(
    ("other", "is_counted"), [("2001:db8::ffff", True), ("2001:db8:0:1::1", False)]
)
def test_addresses_of_one_line_share_their_limit(other, is_counted):
    attempts = Attempts()
    wrong(attempts, Client("2001:db8::1"), WRONG_OF_ONE)
    assert attempts.are_too_many(Client(other), 1) is is_counted
