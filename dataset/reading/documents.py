"""Documents from files of all kinds; file_kinds.py lists the kinds, dataset/README.md what a document is in each.

Reading has two steps. The reader of a format finds the documents and yields their bytes. These are decoded to text later,
possibly in another process.

Faults are reported with file and line. What cannot change a document is accepted: blank lines, a byte-order mark before
a line, CRLF, a missing newline at the end, an escaped NUL, a long line. An empty text is skipped like a blank line, since
there is nothing to learn from it. Memory is bounded by a block of 4 MB or the longest document, whichever is larger;
faults.py limits the length of documents.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.errors import DataError
from dataset.reading import faults
from dataset.reading.arrow_files import find_values, text_of_value
from dataset.reading.conversations import CONVERSATION, conversation_text
from dataset.reading.csv_files import find_rows
from dataset.reading.faults import (
    BadLine,
    BadLines,
    Fault,
    Found,
    refuse_other_content,
    skip_or_raise,
    text_of,
    too_long,
)
from dataset.reading.file_kinds import OBJECTS, kind_of
from dataset.reading.json_files import find_objects, text_of_line
from dataset.reading.streams import BOM, LineReader, Stream, open_stream

# Limits of a block, which both the reading and the encoding process hold in memory
BLOCK_BYTES = 4 << 20
BLOCK_DOCUMENTS = 8192


def read_documents(
    path: Path | str, text_field: str = "text", bad_lines: BadLines | None = None, split_text: bool = False
) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, text). A faulty line raises DataError or, with `bad_lines`, is counted there.

    split_text: in a text file a blank line ends a document.
    """
    for block in split_into_blocks(Path(path), text_field, BLOCK_BYTES, split_text):
        for line, text in block.documents(text_field):
            if isinstance(text, str):
                yield line, text
            else:
                skip_or_raise(Fault(str(path), line, *text.args), bad_lines)


def plain_texts(files: Iterable[Path], text_field: str) -> Iterator[str]:
    """Yields the texts of files without faulty lines; of a conversation those of its messages."""
    for file in files:
        for _, text in read_documents(file, text_field, BadLines()):
            yield conversation_text(text) if text_field == CONVERSATION else text


@dataclass
class Block:
    """Some documents of a file, small enough to be held and handed to another process."""

    path: Path
    found: list[Found]
    # bytes of the file that this block took, for progress
    source_bytes: int

    def documents(self, text_field: str) -> Iterator[tuple[int, str | BadLine]]:
        """Yields (line or table row from 1, text or fault), without blank lines and empty texts."""
        decode = _format_of(self.path).text_of
        for line, raw in self.found:
            if isinstance(raw, BadLine):
                yield line, raw
                continue
            try:
                text = decode(raw, text_field)
            except BadLine as bad:
                yield line, bad
            else:
                if text:
                    yield line, text


def split_into_blocks(path: Path, text_field: str, block_bytes: int, split_text: bool = False) -> Iterator[Block]:
    """The blocks of a file in order. split_text: in a text file a blank line ends a document. Errors: DataError."""
    kind = kind_of(path)
    if text_field == CONVERSATION and kind.suffix not in OBJECTS:
        raise DataError(
            f"{path}: conversations are read from .jsonl, .ndjson and .json files, also compressed; name those alone, by their own "
            "paths or by a pattern"
        )
    find = _find_paragraphs if kind.is_text and split_text else _format_of(path).find
    found: list[Found] = []
    size = 0
    done = 0
    # stream: decompressed bytes. file: the file on disk, whose position shows progress.
    with open_stream(path, kind.compression) as (stream, file):
        refuse_other_content(stream.peek(64)[:64], path)
        for line, raw in find(stream, str(path), text_field):
            found.append((line, raw))
            size += len(raw) if isinstance(raw, bytes) else 0
            if size >= block_bytes or len(found) >= BLOCK_DOCUMENTS:
                yield Block(path, found, source_bytes=file.tell() - done)
                found = []
                size = 0
                done = file.tell()
        if found:
            yield Block(path, found, source_bytes=file.tell() - done)


def _find_lines(stream: Stream, path: str, text_field: str) -> Iterator[Found]:
    """The lines of a .jsonl that are not blank."""
    lines = LineReader(stream, faults.MAX_DOCUMENT_BYTES)
    while (line := lines.read_line()) != b"":
        if line is None:
            yield lines.number, too_long("line")
        elif line.isspace():
            lines.skip_blank_lines()
        else:
            yield lines.number, line


def _find_whole_text(stream: Stream, path: str, text_field: str) -> Iterator[Found]:
    """The whole text file."""
    raw = stream.read(faults.MAX_DOCUMENT_BYTES + 1)
    yield 1, too_long("text file") if len(raw) > faults.MAX_DOCUMENT_BYTES else raw


def _find_paragraphs(stream: Stream, path: str, text_field: str) -> Iterator[Found]:
    """Paragraphs of a text file, separated by blank lines, each with its first line's number."""
    lines = LineReader(stream, faults.MAX_DOCUMENT_BYTES)
    # One buffer: a list of short lines would take many times their bytes. None: too long.
    text: bytearray | None = bytearray()
    first = 0
    while True:
        line = lines.read_line()
        if line is None or line.removeprefix(BOM).strip():
            first = first or lines.number
            if line is None or text is None or len(text) + len(line) > faults.MAX_DOCUMENT_BYTES:
                text = None
            else:
                text += line
            continue
        if first:
            yield first, too_long("text between blank lines") if text is None else bytes(text)
        if not line:
            return
        text = bytearray()
        first = 0
        lines.skip_blank_lines()


def _text_of_file(raw: bytes, text_field: str) -> str:
    """A whole text file, with \\n for each \\r\\n."""
    return text_of(raw.removeprefix(BOM)).replace("\r\n", "\n")


class Format(NamedTuple):
    """How the files of a kind are read.

    find     (decompressed stream, path, text field) -> Found for each document, lazily, in memory that
             does not grow with the file
    text_of  (bytes from `find`, text field) -> the text; None or "" if there is none. Errors: BadLine
    """

    find: Callable[[Stream, str, str], Iterator[Found]]
    text_of: Callable[[bytes, str], str | None]


# {suffix in file_kinds.CORPORA or TABLES: format}
FORMATS = {
    ".jsonl": Format(_find_lines, text_of_line),
    ".json": Format(find_objects, text_of_line),
    ".csv": Format(partial(find_rows, delimiter=","), text_of),
    ".tsv": Format(partial(find_rows, delimiter="\t"), text_of),
    ".parquet": Format(find_values, text_of_value),
    ".arrow": Format(find_values, text_of_value),
}
PLAIN_TEXT = Format(_find_whole_text, _text_of_file)


def _format_of(path: Path) -> Format:
    kind = kind_of(path)
    return PLAIN_TEXT if kind.is_text else FORMATS[kind.suffix]
