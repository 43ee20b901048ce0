"""A `.json` file: an array of objects, or objects one after the other (a single one, or lines that are jsonl in truth).

The file is never held whole. A scan finds where each value ends, by counting brackets outside strings, and json decodes
the values one by one; what is wrong inside of one is a fault of that one alone.
"""

import re
from collections.abc import Iterator

from dataset.reading import limits
from dataset.reading.faults import Item
from dataset.reading.json_lines import BOM, item_of, text_of_line
from dataset.reading.line_reader import Stream

CHUNK_BYTES = 1 << 18
NOT_BLANK = re.compile(rb"[^ \t\r\n\v\f]")

# What the scan must look at: outside of strings brackets and the beginning of a string, within one its end and the
# backslash that takes the next byte's meaning away. All are ASCII, and no byte of a longer UTF-8 character is.
STRUCTURE = re.compile(rb'["\[\]{}]')
IN_STRING = re.compile(rb'["\\]')

# A number, true, false, null, or a word that is none of these.
END_OF_SCALAR = re.compile(rb"[,\[\]{}\s]")


def read_json(stream: Stream, text_field: str) -> Iterator[Item]:
    """(line where it begins, text or (kind, reason) of a fault) of each value; empty texts are left out."""
    values = _Values(stream)
    for line, raw, fault in values.all():
        if fault:
            yield line, fault
            continue
        item = item_of(line, raw, text_of_line, text_field)
        if item is not None:
            yield item


# How an array of any length is read in bounded memory. The walk holds one chunk of the file, and of the value that it
# stands in the parts that lie in earlier chunks:
#
#     ... {"text": "one"}, {"text": "tw | o"}, {"text": "three"}, ...         | a chunk ends
#                          ^ at, parts = []   parts = [b'{"text": "tw'], the scan goes on at b'o"}'
#
# `_value` cuts a value out at its closing bracket and knows nothing of what is inside; json decodes it afterwards. So a
# fault inside a value (a bad number, a missing colon) leaves the walk where it should be, and the next value is read as
# if nothing had been. Brackets that do not match within a value may move its end. The walk never stands still: a value
# takes at least one byte. What grows beyond the limit for a document is let go part by part, and told as one fault.
class _Values:
    """Walks over a stream. data[at:] is what was read and not yet used, line the line of data[at]."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.data = b""
        self.at = 0
        self.line = 1

    def all(self) -> Iterator[tuple[int, bytes, tuple[str, str] | None]]:
        """(line, bytes of a value, None), or (line, b"", fault)."""
        self._read_more()
        self.at = len(BOM) if self.data.startswith(BOM) else 0
        if self._next_byte() == b"[":
            self.at += 1
            yield from self._array()
        # Objects one after the other, or whatever follows an array.
        while self._next_byte():
            yield self._value()

    def _array(self) -> Iterator[tuple[int, bytes, tuple[str, str] | None]]:
        """The values up to the closing bracket."""
        if self._next_byte() == b"]":
            self.at += 1
            return
        while byte := self._next_byte():
            if byte in b",]":
                yield self.line, b"", ("not JSON", f"{byte.decode()} where a value of the array is expected")
            else:
                yield self._value()
                byte = self._next_byte()
            if byte and byte not in b",]":
                # Objects that follow each other without a comma are still told apart.
                yield self.line, b"", ("not JSON", "no comma between two values of the array")
                continue
            self.at += 1
            if byte == b"]":
                return
        yield self.line, b"", ("cut line", "the file ends before its JSON array does")

    def _next_byte(self) -> bytes:
        """What comes after blanks, not taken yet; b"" at the end."""
        while True:
            found = NOT_BLANK.search(self.data, self.at)
            end = found.start() if found else len(self.data)
            # Newlines are counted once, here and where a value is taken: `line` is always that of data[at].
            self.line += self.data.count(b"\n", self.at, end)
            self.at = end
            if found:
                return found.group()
            if not self._read_more():
                return b""

    def _read_more(self) -> bool:
        """Replaces what was used up."""
        self.data = self.stream.read(CHUNK_BYTES)
        self.at = 0
        return bool(self.data)

    def _value(self) -> tuple[int, bytes, tuple[str, str] | None]:
        """The value that begins at `at`, which it takes."""
        first_line = self.line
        parts: list[bytes] = []
        size = 0
        scan = _EndScan()
        while True:
            end = scan.find(self.data, self.at)
            part = self.data[self.at : len(self.data) if end is None else end]
            self.line += part.count(b"\n")
            size += len(part)
            if size > limits.MAX_DOCUMENT_BYTES:
                # The end must still be found, but nothing of the value is held.
                parts.clear()
            else:
                parts.append(part)
            if end is not None:
                self.at = end
                break
            if not self._read_more():
                break
        if size > limits.MAX_DOCUMENT_BYTES:
            return first_line, b"", limits.too_long("JSON value")
        return first_line, b"".join(parts), None


class _EndScan:
    """Finds the end of one value, chunk after chunk."""

    def __init__(self) -> None:
        self.started = False
        self.scalar = False
        self.depth = 0
        self.in_string = False
        # The last chunk ended with a backslash within a string.
        self.escaped = False

    def find(self, data: bytes, at: int) -> int | None:
        """Where in `data` the value ends, None if not within it. The value, or its next part, begins at `at`."""
        if not self.started:
            self.started = True
            self.scalar = data[at : at + 1] not in (b"{", b"[", b'"')
            if self.scalar:
                # At least one byte is taken, so that a stray bracket does not stop the walk.
                at += 1
        if self.scalar:
            found = END_OF_SCALAR.search(data, at)
            return found.start() if found else None
        if self.escaped:
            # The backslash stood at the very end of the chunk before; what it escapes is the first byte of this one.
            at += 1
            self.escaped = False
        return self._end_of_nested(data, at)

    def _end_of_nested(self, data: bytes, at: int) -> int | None:
        """Where an object, array or string ends that goes on at `at`, None if not within `data`."""
        while True:
            found = (IN_STRING if self.in_string else STRUCTURE).search(data, at)
            if found is None:
                return None
            at = found.end()
            mark = found.group()
            if mark == b"\\":
                self.escaped = at == len(data)
                at += 1
            elif mark == b'"':
                self.in_string = not self.in_string
            elif mark in b"[{":
                self.depth += 1
            else:
                self.depth -= 1
            # A string by itself ends with its quote, at depth 0.
            if self.depth <= 0 and not self.in_string:
                return at
