"""A line of jsonl to its text, with a reason for each kind of line that is no document.

`text_field` names the field of the text; CONVERSATION in its place makes a text of the line's conversation, and ANY_TEXT
gives the object as it stands there.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from common.errors import DataError
from dataset.reading import limits
from dataset.reading.conversations import CONVERSATION, text_of_conversation
from dataset.reading.faults import BadLine, Item, not_utf8
from dataset.reading.line_reader import WHITE_SPACE

BOM = b"\xef\xbb\xbf"
# What a reader is asked for where the objects may be of any form, as those of evaluation sets are.
ANY_TEXT = "any text"

# A string, or a mark that comes before most values. What is possessive (++) keeps the memory of a match bounded.
VALUE_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{,]', re.DOTALL)


def parse_line(raw: bytes, place: str, text_field: str = "text") -> str | None:
    """The text of a jsonl line, None for a blank one. A fault raises DataError; `place`, "file:line", begins it."""
    try:
        return text_of_line(raw, text_field)
    except BadLine as bad:
        raise DataError(f"{place}: {bad.args[1]}; mend the line, or pass --skip_bad_lines", bad.args[0]) from None


def item_of(line: int, raw: bytes, convert: Callable[[bytes, str], str | None], text_field: str) -> Item | None:
    """What a reader gives of a line or a file: the text that `convert` makes of it, or its fault; None for an empty text."""
    try:
        text = convert(raw, text_field)
    except BadLine as bad:
        return line, bad.args
    return (line, text) if text else None


def text_of_line(raw: bytes, text_field: str) -> str | None:
    """The text of a jsonl line, None for a blank one. Errors: BadLine."""
    # A mark may stand before any line, where files were joined.
    raw = raw.removeprefix(BOM).strip(WHITE_SPACE)
    if not raw:
        return None
    if text_field == CONVERSATION and len(raw) > limits.MAX_CONVERSATION_BYTES:
        raise BadLine(*limits.too_long("conversation", limits.MAX_CONVERSATION_BYTES))
    record = record_of_line(raw)
    if not isinstance(record, dict):
        raise BadLine("not an object", f"a JSON {json_type(record)} where an object with a {text_field!r} is expected")
    if text_field == ANY_TEXT:
        # It was decoded already, so it is UTF-8.
        return raw.decode("utf-8")
    if text_field == CONVERSATION:
        text = text_of_conversation(record)
    elif text_field not in record:
        keys = ", ".join(repr(key[:80]) for key in list(record)[:5]) or "none"
        advice = "--text_field names another one"
        if {"conversations", "messages"} & set(record):
            advice = "these are conversations, which train_sft.py reads"
        raise BadLine("no text", f"no {text_field!r} in the object (its keys: {keys}; {advice})")
    else:
        text = record[text_field]
    if not isinstance(text, str):
        kind = "text is null" if text is None else "text is not a string"
        raise BadLine(kind, f"{text_field!r} is a {json_type(text)}, not a string")
    # Only an escape can spell half a surrogate pair.
    if b"\\u" in raw:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"half a surrogate pair (\\u{ord(text[error.start]):04x}) at character {error.start + 1}"
            raise BadLine("lone surrogate", half) from None
    return text


def record_of_line(raw: bytes, keys_once: bool = False) -> object:
    """The JSON value of a line without its byte-order mark. keys_once: no object may have a key twice. Errors: BadLine."""
    # Before json sees it: what it builds cannot be stopped half way.
    if len(raw) > limits.MANY_VALUES_BYTES:
        _check_number_of_values(raw)
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_no_key_twice if keys_once else None)
    except UnicodeDecodeError as error:
        # The bytes at the end begin a character that is not there: the writer was stopped, the encoding is right.
        if error.reason == "unexpected end of data":
            raise BadLine("cut line", "the line ends in the middle of a character") from None
        raise not_utf8(raw, f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise _explain(error, raw) from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, brackets nested thousands deep.
        raise BadLine("not JSON", f"not a JSON object that can be read: {str(error)[:80]}") from None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a line. Errors: BadLine for a key of which nobody can tell which value was meant."""
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadLine("key twice", f"the key {twice[:80]!r} stands twice in an object")
    return record


def _check_number_of_values(raw: bytes) -> None:
    """A few hundred megabytes of `[],[],[]` would become gigabytes of Python objects."""
    for count, _ in enumerate(VALUE_MARK.finditer(raw), start=1):
        if count > limits.MAX_JSON_VALUES:
            raise BadLine("too many values", f"more than {limits.MAX_JSON_VALUES:,} JSON values on a line")


def _explain(error: json.JSONDecodeError, raw: bytes) -> BadLine:
    """The kind and words for a line that is not JSON."""
    # The order matters: NULs where a disk was full also look like a control character, or like a line that is cut.
    at = f"at column {error.pos + 1}"
    if error.msg.startswith("Extra data"):
        return BadLine("two values on a line", f"something follows the object {at}; one object a line")
    if b"\0" in raw:
        return BadLine("NUL byte", f"a NUL byte at column {raw.index(0) + 1}")
    if error.msg.startswith("Invalid control character"):
        return BadLine("raw control character", f"a raw control character {at}; JSON wants it escaped")
    if error.msg.startswith("Unterminated string") or error.pos >= len(error.doc):
        return BadLine("cut line", "the line ends before its JSON object does")
    return BadLine("not JSON", f"not JSON: {error.msg} {at}")


def json_type(value: object) -> str:
    """What JSON calls a value of this type."""
    names = {dict: "object", list: "list", str: "string", bool: "true/false", type(None): "null"}
    return names.get(type(value), "number")
