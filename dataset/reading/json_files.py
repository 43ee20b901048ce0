"""The text of a `.jsonl` line, with a reason for each kind of line that is no document; and `.json` files: an array of
objects, or a sequence of objects (a single one, or lines that are really jsonl).

`text_field` names the field of the text, `translation.en` one within an object; CONVERSATION instead selects the line's
conversation, ANY_TEXT the unchanged object. In an array of strings, each string is a text.
"""

import json
import re
from collections.abc import Collection, Iterator
from functools import reduce
from itertools import islice
from operator import getitem
from typing import Any

from common.errors import DataError
from dataset.reading import faults
from dataset.reading.chat_forms import LISTS, JsonObject, Shape, keys_of, shape_of
from dataset.reading.conversations import CONVERSATION, Notes, text_of_conversation
from dataset.reading.faults import ADVICE, NOT_UTF8, BadLine, RawDocument, too_long
from dataset.reading.streams import BOM, WHITE_SPACE, Stream

# `text_field` for objects of any form, as in evaluation sets
ANY_TEXT = "any text"
# `text_field` for all columns of a table
WHOLE_ROWS = (CONVERSATION, ANY_TEXT)

CHUNK_BYTES = 1 << 18
NOT_BLANK = re.compile(rb"[^ \t\r\n\v\f]")
# All marks are ASCII, which no byte of a longer UTF-8 character is. Possessive quantifiers (++) bound a match's memory.
# A string, or a mark that comes before most values.
VALUE_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{,]', re.DOTALL)
# A whole string, a bracket, or the quote of a string whose end is not yet read.
STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}"]', re.DOTALL)
ARRAY_OF_STRINGS = re.compile(rb'\s*\[\s*"')
DEPTH_CHANGE = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}
# end of a number, true, false, null, or any other bare word
END_OF_SCALAR = re.compile(rb"[,\[\]{}\s]")

# {error message of json: kind of the fault}; others are "not JSON"
KINDS = {
    "Extra data": "two values on a line",
    "Invalid control character": "raw control character",
    "Unterminated string starting": "cut line",
}
# Others are numbers.
JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a true/false", type(None): "a null"}


def text_of_line(
    raw: bytes, text_field: str, notes: Notes | None = None, shape: Shape | None = None, measured: Collection[str] = ()
) -> str | None:
    """The text of a jsonl line, None for a blank one. The last three: see text_of_conversation. Errors: BadLine."""
    # In joined files any line may start with a byte-order mark.
    raw = raw.removeprefix(BOM).strip(WHITE_SPACE)
    if not raw:
        return None
    fields = object_of_line(raw, text_field)
    if text_field == ANY_TEXT:
        # Already decoded once, so it is UTF-8.
        return raw.decode("utf-8")
    if text_field == CONVERSATION:
        text: Any = text_of_conversation(fields, notes, shape, measured)
    else:
        try:
            text = fields[text_field] if text_field in fields else reduce(getitem, text_field.split("."), fields)
        except (KeyError, TypeError):
            advice = ADVICE[shape_of(fields) is not None]
            reason = f"no {text_field!r} in the object (its keys: {keys_of(fields)}; {advice})"
            raise BadLine("no text", reason) from None
    if not isinstance(text, str):
        kind = "text is null" if text is None else "text is not a string"
        raise BadLine(kind, f"{text_field!r} is {JSON_TYPES.get(type(text), 'a number')}, not a string")
    # Only an escape can produce a lone surrogate.
    if b"\\u" in raw:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"half a surrogate pair (\\u{ord(text[error.start]):04x}) at character {error.start + 1}"
            raise BadLine("lone surrogate", half) from None
    return text


def object_of_line(raw: bytes, text_field: str) -> JsonObject:
    """The JSON object of a line; a list of messages becomes one. Errors: BadLine."""
    if text_field == CONVERSATION and len(raw) > faults.MAX_CONVERSATION_BYTES:
        raise too_long("conversation", faults.MAX_CONVERSATION_BYTES)
    fields = value_of_line(raw.removeprefix(BOM).strip(WHITE_SPACE))
    if text_field == CONVERSATION and isinstance(fields, list):
        fields = {LISTS[0]: fields}
    if not isinstance(fields, dict):
        json_type = JSON_TYPES.get(type(fields), "a number")
        raise BadLine("not an object", f"{json_type} where an object with a {text_field!r} is expected")
    if text_field == CONVERSATION:
        fields = {name: _turns(value) if name in (*LISTS, "history") else value for name, value in fields.items()}
    return fields


def _turns(value: Any) -> Any:
    """A list of turns, which tables may have as JSON, or as an object of lists. Errors: BadLine."""
    if isinstance(value, str) and value.startswith("["):
        value = value_of_line(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        value = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=False)]
    return value


def value_of_line(raw: bytes) -> object:
    """The JSON value of a line without its byte-order mark. Errors: BadLine."""
    # Counted first, since json cannot be stopped midway: a few hundred megabytes of `[],[],[]` would become gigabytes of
    # Python objects.
    most = faults.MAX_JSON_VALUES
    if len(raw) > faults.MANY_VALUES_BYTES and any(islice(VALUE_MARK.finditer(raw), most, None)):
        raise BadLine("too many values", f"more than {most:,} strings, brackets and commas on a line")
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        # The last character is incomplete: the writer was interrupted, the encoding is right.
        if error.reason == "unexpected end of data":
            raise BadLine("cut line", "the line ends in the middle of a character") from None
        byte = f"byte 0x{raw[error.start]:02x}, byte {error.start + 1} of its JSON"
        raise BadLine(NOT_UTF8, f"not UTF-8: {byte}") from None
    except json.JSONDecodeError as error:
        # NULs, as after a full disk
        if b"\0" in raw:
            raise BadLine("NUL byte", f"byte {raw.index(0) + 1} of its JSON is NUL") from None
        reason = error.msg.removesuffix(" at")
        kind = KINDS.get(reason, "cut line" if error.pos == len(error.doc) else "not JSON")
        raise BadLine(kind, f"{kind}: {reason} at character {error.pos + 1} of its JSON") from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, brackets nested thousands deep.
        raise BadLine("not JSON", f"not a JSON object that can be read: {str(error)[:80]}") from None


def end_of_value(data: bytes, at: int) -> int | None:
    """The end of the value that starts at data[at]; None if it is beyond `data`. A stray bracket is a value of one byte."""
    if data[at : at + 1] not in (b"{", b"[", b'"'):
        match = END_OF_SCALAR.search(data, at + 1)
        return match.start() if match else None
    depth = 0
    for match in STRUCTURE.finditer(data, at):
        mark = match.group()
        if mark == b'"':
            return None
        # A whole string leaves the depth as it is.
        depth += DEPTH_CHANGE.get(mark, 0)
        # A bare string ends with its quote, at depth 0.
        if depth <= 0:
            return match.end()
    return None


# The file is never held whole. Counting the brackets outside strings finds the end of each value, and json decodes values
# one by one: a fault in one does not affect the next. Commas may be missing or doubled: they are not needed to separate
# values.
def find_objects(stream: Stream, path: str, text_field: str) -> Iterator[RawDocument]:
    """Yields (first line of a value, its bytes or fault) of a `.json`.

    Errors: DataError for a value that is too long.
    """
    # data[at:]: read and not yet used. line: number of the line of data[at]
    data = stream.read(CHUNK_BYTES)
    at = len(BOM) if data.startswith(BOM) else 0
    line = 1
    is_first = True
    in_array = False
    has_texts = ARRAY_OF_STRINGS.match(data, at) is not None
    while True:
        match = NOT_BLANK.search(data, at)
        begin = match.start() if match else len(data)
        line += data.count(b"\n", at, begin)
        at = begin
        if match is None:
            data = stream.read(CHUNK_BYTES)
            at = 0
            if not data:
                break
            continue
        byte = match.group()
        if is_first and byte == b"[":
            in_array = True
            at += 1
        elif in_array and byte in b",]":
            # A sequence of objects may follow an array.
            in_array = byte == b","
            at += 1
        else:
            while (end := end_of_value(data, at)) is None:
                size = len(data) - at
                if size > faults.MAX_DOCUMENT_BYTES:
                    raise DataError(f"{path}:{line}: {too_long('JSON value').args[1]}")
                # As much again: `data` is scanned again, so each byte about twice in all.
                more = stream.read(min(max(size, CHUNK_BYTES), faults.MAX_DOCUMENT_BYTES + 1 - size))
                if not more:
                    end = len(data)
                    break
                data = data[at:] + more
                at = 0
            value = data[at:end]
            is_text = has_texts and byte == b'"'
            yield line, b"{%s: %s}" % (json.dumps(text_field).encode(), value) if is_text else value
            line += data.count(b"\n", at, end)
            at = end
        is_first = False
    if in_array:
        yield line, BadLine("cut line", "the file ends before its JSON array does")
