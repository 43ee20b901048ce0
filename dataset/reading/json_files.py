"""A `.json` file: an array of objects, or objects one after the other (a single one, or lines that are jsonl in truth).

The file is never held whole. Brackets outside strings are counted to find where each value ends, and json decodes the values
one by one: what is wrong inside of one is a fault of that one alone, and the next one is read as if nothing had been.
"""

import re
from collections.abc import Iterator

from common.errors import DataError
from dataset.reading import limits
from dataset.reading.faults import Item
from dataset.reading.json_lines import BOM, item_of, text_of_line
from dataset.reading.line_reader import Stream

CHUNK_BYTES = 1 << 18
NOT_BLANK = re.compile(rb"[^ \t\r\n\v\f]")
# A whole string, a bracket, or the quote of a string whose end is not there yet. What is possessive (++) keeps the memory of a
# match bounded. All are ASCII, and no byte of a longer UTF-8 character is.
STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}"]', re.DOTALL)
# behind a number, true, false, null, or a word that is none of these
END_OF_SCALAR = re.compile(rb"[,\[\]{}\s]")


def end_of_value(data: bytes, at: int) -> int | None:
    """Where the value ends that begins at data[at]; None where `data` ends before. A stray bracket is a value of one byte."""
    if data[at : at + 1] not in (b"{", b"[", b'"'):
        found = END_OF_SCALAR.search(data, at + 1)
        return found.start() if found else None
    depth = 0
    for found in STRUCTURE.finditer(data, at):
        mark = found.group()
        if mark == b'"':
            return None
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            depth -= 1
        # A string by itself ends with its quote, at depth 0.
        if depth <= 0:
            return found.end()
    return None


def read_json(stream: Stream, path: str, text_field: str) -> Iterator[Item]:
    """(line where it begins, text or (kind, reason) of a fault) of each value; empty texts are left out.

    Errors: DataError for a value that is too long to be held.
    """
    # data[at:] is what was read and not yet used, `line` the line of data[at].
    data = stream.read(CHUNK_BYTES)
    at = len(BOM) if data.startswith(BOM) else 0
    line = 1
    # What came last in the array: its bracket, a comma or a value; None: there is none, or it has ended.
    before: str | None = None
    is_first = True
    while True:
        found = NOT_BLANK.search(data, at)
        end = found.start() if found else len(data)
        line += data.count(b"\n", at, end)
        at = end
        if found is None:
            data = stream.read(CHUNK_BYTES)
            at = 0
            if not data:
                break
            continue
        byte = found.group()
        if is_first and byte == b"[":
            before = "["
            at += 1
        elif before and byte in b",]":
            if before == "," or before + byte.decode() == "[,":
                yield line, ("not JSON", f"{byte.decode()} where a value of the array is expected")
            # Objects one after the other may follow an array.
            before = "," if byte == b"," else None
            at += 1
        else:
            if before == "value":
                # They are still told apart.
                yield line, ("not JSON", "no comma between two values of the array")
            while (end_of := end_of_value(data, at)) is None:
                size = len(data) - at
                if size > limits.MAX_DOCUMENT_BYTES:
                    raise DataError(f"{path}:{line}: {limits.too_long('JSON value')[1]}")
                # As much again: what is there is looked at once more, so all of it about twice.
                more = stream.read(min(max(size, CHUNK_BYTES), limits.MAX_DOCUMENT_BYTES + 1))
                if not more:
                    end_of = len(data)
                    break
                data = data[at:] + more
                at = 0
            item = item_of(line, data[at:end_of], text_of_line, text_field)
            if item is not None:
                yield item
            line += data.count(b"\n", at, end_of)
            at = end_of
            before = before and "value"
        is_first = False
    if before:
        yield line, ("cut line", "the file ends before its JSON array does")
