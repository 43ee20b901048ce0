"""Size limits of documents, and the faults of lines and files."""

import re
from collections.abc import Sequence
from pathlib import Path

from common.errors import DataError
from dataset.reading.bad_lines import BadLine, BadLines, Fault
from dataset.reading.encodings import conversion_command, how_to_convert

# Maximum bytes of a decompressed line, a text file, a value in a table. A reader holds a few copies of it.
MAX_DOCUMENT_BYTES = 256 << 20
# Python's csv module takes four bytes per character of a row, and up to sixty per field.
MAX_CSV_ROW_BYTES = 32 << 20
# Python objects for the values of a JSON line can take twenty times its bytes, so long lines must hold few values.
MANY_VALUES_BYTES = 16 << 20
MAX_JSON_VALUES = 4_000_000
# Rendering and cutting a conversation takes 27 times its bytes.
MAX_CONVERSATION_BYTES = 16 << 20


# (line or row from 1, bytes of a document or a fault), as every reader yields them.
# Faults are yielded like documents, so that the caller decides whether one ends the run or is counted.
RawDocument = tuple[int, bytes | BadLine]


def too_long(what: str, max_bytes: int | None = None) -> BadLine:
    """The fault of a line, row or file of more than `max_bytes` (default: MAX_DOCUMENT_BYTES)."""
    megabytes = (MAX_DOCUMENT_BYTES if max_bytes is None else max_bytes) >> 20
    return BadLine("too long", f"the {what} is longer than {megabytes} MB; cut its text into several documents")


# the kind of a fault of a whole file
NOT_UTF8 = "not UTF-8"
# {pattern of a text's first bytes: its encoding}: a byte-order mark, or the zeros beside ASCII characters
WIDE_ENCODINGS = {
    rb"\xff\xfe\0\0|\0\0\xfe\xff": "utf-32",
    rb"\xff\xfe|\xfe\xff": "utf-16",
    rb"([^\0]\0){4}": "utf-16-le",
    rb"(\0[^\0]){4}": "utf-16-be",
}
# {pattern of the first bytes: what the file is, and what to do}
OTHER_CONTENT = {
    rb"version https://git-lfs\.github\.com/spec/": "a pointer of git LFS, not the file itself; fetch it with `git lfs pull`",
    rb"%PDF-\d": "a PDF, whatever its name; convert it to plain text, as by `pdftotext`, and name that",
    rb"PK\x03\x04": "a zip file, as those of Word, Excel and EPUB are; save its text as .txt, a table as .csv (UTF-8)",
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1|\{\\rtf": "a file of Word or Excel; save its text as .txt, a table as .csv (UTF-8)",
}
# {whether these are chats: what to do where the field of the text is missing}
ADVICE = {False: "--text_field names another one", True: "these are conversations, which train_sft.py reads"}


def text_of(raw: bytes, text_field: str = "") -> str:
    """The text of a file or field of any name. Errors: BadLine for invalid UTF-8 and for NUL bytes."""
    if b"\0" in raw:
        raise BadLine("NUL byte", "the text has NUL bytes: it is binary, or in UTF-16; convert it to UTF-8")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadLine(NOT_UTF8, f"the text is not UTF-8: byte 0x{raw[error.start]:02x} in its line {line}") from None


def check_column(text_field: str, names: Sequence[str], where: str, is_chat: bool) -> None:
    """Errors: DataError, starting with `where`, unless exactly one column of a table has the name. is_chat: of conversations."""
    if names.count(text_field) == 1:
        return
    shown = ", ".join(name[:40] for name in names[:8])
    # Bytes of a .csv header that are not UTF-8 are lone surrogates here, which no terminal prints.
    shown = shown.encode("utf-8", "backslashreplace").decode("utf-8")
    advice = ADVICE[is_chat]
    if "\0" in shown:
        shown, advice = "unreadable", "the file is binary, or in UTF-16; convert it to UTF-8"
    elif "\\udc" in shown:
        file = Path(where.rpartition(":")[0])
        advice = f"the file is not UTF-8; {how_to_convert(file) or 'save it as CSV UTF-8'}"
    elif len(names) == 1 and re.search("[;,\t]", shown):
        advice = "separate columns by commas, in a .tsv by tabs (or rename the file)"
    what = "no column" if text_field not in names else "more than one column"
    raise DataError(f"{where}: {what} {text_field!r} (its columns: {shown}; {advice})")


def refuse_other_content(beginning: bytes, path: Path) -> None:
    """Errors: DataError for OTHER_CONTENT and for text in UTF-16 or UTF-32. beginning: the first decompressed bytes."""
    for mark, content in OTHER_CONTENT.items():
        if re.match(mark, beginning):
            raise DataError(f"{path}: {content}")
    for mark, encoding in WIDE_ENCODINGS.items():
        if re.match(mark, beginning):
            command = conversion_command(path, encoding)
            raise DataError(f"{path}: the text is in {encoding.upper()}; convert it to UTF-8: {command}")


def skip_or_raise(fault: Fault, bad_lines: BadLines | None) -> None:
    """Count a fault as skipped. Errors: DataError if faults are not skipped (None)."""
    if bad_lines is not None:
        bad_lines.add(fault)
        return
    advice = how_to_convert(Path(fault.path)) if fault.kind == NOT_UTF8 else ""
    advice = advice or "fix the line, or pass --skip_bad_lines"
    raise DataError(f"{fault.path}:{fault.line}: {fault.reason}; {advice}")
