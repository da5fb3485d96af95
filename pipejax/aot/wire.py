"""The protocol buffers wire format, read without generated code.

XLA hands its programs over as serialised `HloModuleProto`s, and no Python package ships the classes for them. Field
numbers of a published message never change, so a reader of the wire format and a few numbers are all it takes.

Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator


class WireError(ValueError):
    """Bytes that are no protocol buffer."""


class Message:
    """One message: values by field number, in the order in which they were written."""

    __slots__ = ("_fields",)

    def __init__(self, data: bytes | memoryview) -> None:
        self._fields: dict[int, list[int | memoryview]] = {}
        for number, value in _fields(memoryview(data)):
            self._fields.setdefault(number, []).append(value)

    def integer(self, number: int, default: int = 0) -> int:
        """An int64, bool or enum; the last one written counts."""
        values = self._fields.get(number)
        if not values:
            return default
        value = values[-1]
        if not isinstance(value, int):
            raise WireError(f"field {number} holds bytes where a number was expected")
        return value - (1 << 64) if value >= 1 << 63 else value

    def integers(self, number: int) -> tuple[int, ...]:
        """A repeated int64, packed or not."""
        found: list[int] = []
        for value in self._fields.get(number, ()):
            if isinstance(value, int):
                found.append(value)
                continue
            position = 0
            while position < len(value):
                item, position = _varint(value, position)
                found.append(item)
        return tuple(item - (1 << 64) if item >= 1 << 63 else item for item in found)

    def raw(self, number: int) -> bytes:
        """A bytes field; empty where absent."""
        values = self._fields.get(number)
        if not values:
            return b""
        value = values[-1]
        if isinstance(value, int):
            raise WireError(f"field {number} holds a number where bytes were expected")
        return bytes(value)

    def text(self, number: int) -> str:
        """A string field; empty where absent."""
        return self.raw(number).decode("utf-8", errors="replace")

    def message(self, number: int) -> Message:
        """A message; empty where absent."""
        return Message(self.raw(number))

    def messages(self, number: int) -> Iterator[Message]:
        """A repeated message."""
        for value in self._fields.get(number, ()):
            if isinstance(value, int):
                raise WireError(f"field {number} holds a number where a message was expected")
            yield Message(value)

    def __contains__(self, number: int) -> bool:
        return number in self._fields


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise WireError("a number runs past the end of its message")
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        value: int | memoryview
        if kind == 0:
            value, position = _varint(data, position)
        elif kind == 1:
            value, position = _fixed(data, position, 8)
        elif kind == 5:
            value, position = _fixed(data, position, 4)
        elif kind == 2:
            length, position = _varint(data, position)
            if position + length > len(data):
                raise WireError(f"field {number} runs past the end of its message")
            value, position = data[position : position + length], position + length
        else:
            raise WireError(f"wire type {kind} of field {number} is not one that proto3 writes")
        yield number, value


def _fixed(data: memoryview, position: int, size: int) -> tuple[int, int]:
    if position + size > len(data):
        raise WireError("a number runs past the end of its message")
    return struct.unpack("<Q" if size == 8 else "<I", data[position : position + size])[0], position + size
