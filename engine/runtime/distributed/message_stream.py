"""A `Connection` carries messages over a stream between two processes.

A message is preceded by its length. Where the stream is open to others than the two accounts, as it
is between nodes, both ends have a key, and each message is followed by a code that only whoever has
the key can make, of the message and of its number: nobody on the way can change, add, repeat or
leave out one. Nothing is decoded before its code is checked.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
from dataclasses import dataclass

from engine.runtime.distributed.codec import MOST_BYTES, MessageError, decode, encode
from engine.runtime.distributed.messages import Message

_LENGTH = struct.Struct(">Q")
_NUMBER = struct.Struct(">Q")
_CODE = "sha256"
CODE_BYTES = 32
_TOGETHER = 1 << 16
"""Most bytes of a message that is sent with its length at once."""
_FIRST_BYTES = 1 << 20
"""Memory for a message grows from this with what has arrived, whatever its length claims."""


@dataclass
class Keys:
    """The keys of the two directions, and how many messages have passed."""

    to_send: bytes
    to_receive: bytes
    sent: int = 0
    received: int = 0

    def code_of_next(self, length: bytes, content: bytes | bytearray) -> bytes:
        """Returns the code of the next message that is sent."""
        self.sent += 1
        return code(self.to_send, _NUMBER.pack(self.sent), length, content)

    def check_next(self, length: bytes, content: bytes | bytearray, found: bytes) -> None:
        """Raises MessageError where the next message that has come is not the other side's."""
        self.received += 1
        own = code(self.to_receive, _NUMBER.pack(self.received), length, content)
        if not hmac.compare_digest(own, found):
            raise MessageError("It is not from the other side, or was changed on the way.")


def code(key: bytes, *parts: bytes | bytearray) -> bytes:
    """Returns the code of these bytes, which nobody can make who does not have the key."""
    made = hmac.new(key, digestmod=_CODE)
    for part in parts:
        made.update(part)
    return made.digest()


class Connection:
    """One end of a connection. It owns `stream`. keys: those of both sides, where others could
    reach the stream. One thread may send while another one receives.
    """

    def __init__(self, stream: socket.socket, keys: Keys | None = None):
        stream.setblocking(True)
        self._stream = stream
        self._keys = keys
        self._ready = select.poll()
        self._ready.register(stream, select.POLLIN)

    def send(self, message: Message) -> None:
        """Raises OSError where the other side has ended, and MessageError for a message that is too
        long.
        """
        content = encode(message)
        length = _LENGTH.pack(len(content))
        after = b"" if self._keys is None else self._keys.code_of_next(length, content)
        if len(content) <= _TOGETHER:
            self._stream.sendall(length + content + after)
            return
        for part in (length, content, after):
            self._stream.sendall(part)

    def receive(self, most: int = MOST_BYTES) -> Message:
        """Returns the next message. most: bytes that it may have. Raises EOFError where the
        other side has ended, also within a message, and MessageError for what is no message.
        """
        header = self._read(_LENGTH.size)
        (length,) = _LENGTH.unpack(header)
        if length > most:
            raise MessageError(f"It claims to have {length} bytes, and {most} are the most.")
        content = self._read(length)
        if self._keys is not None:
            self._keys.check_next(bytes(header), content, bytes(self._read(CODE_BYTES)))
        return decode(content)

    def poll(self, seconds: float = 0.0) -> bool:
        """Returns whether something comes, or the other side ends, within `seconds` seconds."""
        return bool(self._ready.poll(seconds * 1000))

    def cut(self) -> None:
        """Ends the stream for both sides. Any thread may call this. Raises OSError where it has
        ended.
        """
        self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of the stream. It may be called twice."""
        self._stream.close()

    def _read(self, size: int) -> bytearray:
        found = bytearray(min(size, _FIRST_BYTES))
        at = 0
        while at < size:
            if at == len(found):
                found.extend(bytes(min(size - at, at)))
            with memoryview(found) as place:
                came = self._stream.recv_into(place[at:])
            if not came:
                raise EOFError
            at += came
        return found
