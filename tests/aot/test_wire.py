"""The reader of protocol buffers, against an encoder written for the test."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipejax.aot.wire import Message, WireError

INT64 = st.integers(-(2**63), 2**63 - 1)


def varint(value):
    value &= 2**64 - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


@given(st.integers(1, 1000), INT64)
def test_numbers(number, value):
    assert Message(field(number, value)).integer(number) == value


@given(st.lists(INT64))
def test_repeated_numbers_packed_or_not(values):
    packed = field(3, b"".join(map(varint, values)))
    loose = b"".join(field(3, value) for value in values)
    assert Message(packed).integers(3) == Message(loose).integers(3) == tuple(values)


@given(st.lists(st.text()))
def test_nested_messages(texts):
    data = b"".join(field(7, field(2, text.encode())) for text in texts)
    assert [part.text(2) for part in Message(data).messages(7)] == texts


def test_absent_fields_have_defaults():
    message = Message(b"")
    assert (message.integer(1), message.integer(1, -1), message.text(2), message.integers(3)) == (0, -1, "", ())
    assert 1 not in message


def test_fixed_width_numbers_are_skipped():
    assert Message(varint(1 << 3 | 5) + b"\0" * 4 + varint(2 << 3 | 1) + b"\0" * 8 + field(3, 9)).integer(3) == 9


@pytest.mark.parametrize("data", [b"\x0a\x05ab", b"\x08\xff", b"\x0b", b"\x09\x00", b"\x80" * 11], ids=repr)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(WireError):
        Message(data)


def test_a_field_of_another_kind_is_refused():
    with pytest.raises(WireError, match="bytes where a number"):
        Message(field(1, b"text")).integer(1)
    with pytest.raises(WireError, match="number where bytes"):
        Message(field(1, 5)).text(1)
