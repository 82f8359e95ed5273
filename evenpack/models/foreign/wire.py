"""Numbers and messages in the encoding of protocol buffers, as far as TensorFlow's checkpoints need it."""

from collections import defaultdict
from collections.abc import Iterable
from io import BytesIO


def take(stream: BytesIO, count: int) -> bytes:
    """Returns the next `count` bytes. Raises: ValueError if there are fewer."""
    data = stream.read(count)
    if len(data) < count:
        raise ValueError("it ends in the middle of an entry")
    return data


def take_varint(stream: BytesIO) -> int:
    """Returns an unsigned number of 7 bits a byte, the lowest first. Raises: ValueError if it does not end."""
    value = shift = 0
    while True:
        (byte,) = take(stream, 1)
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value


class Message:
    """The fields of one message, by their numbers in its `.proto`. Raises: ValueError for bytes that are none."""

    def __init__(self, data: bytes) -> None:
        self._numbers: dict[int, int] = {}
        self._messages: defaultdict[int, list[bytes]] = defaultdict(list)
        stream = BytesIO(data)
        while stream.tell() < len(data):
            field, kind = divmod(take_varint(stream), 8)
            match kind:
                case 0:
                    self._numbers[field] = take_varint(stream)
                case 1 | 5:
                    self._numbers[field] = int.from_bytes(take(stream, 8 if kind == 1 else 4), "little")
                case 2:
                    self._messages[field].append(take(stream, take_varint(stream)))
                case _:
                    raise ValueError(f"field {field} has the unknown type {kind}")

    def number(self, field: int) -> int:
        """Returns a field of a number; 0, the encoding's default, if it is not there."""
        return self._numbers.get(field, 0)

    def messages(self, field: int) -> Iterable["Message"]:
        """Yields a field of messages, none of which need be there."""
        return map(Message, self._messages[field])
