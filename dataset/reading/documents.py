"""Documents from files of all kinds; file_kinds.py lists the kinds, dataset/README.md what a document is in each.

Reading has two steps. The reader of a format finds the documents and yields their bytes. These are decoded to text later,
possibly in another process.

Faults are reported with file and line. What cannot change a document is accepted: blank lines, a byte-order mark before
a line, CRLF, a missing newline at the end, an escaped NUL, a long line. An empty text is skipped like a blank line, since
there is nothing to learn from it. Memory is bounded by a block of 4 MB or the longest document, whichever is larger;
faults.py limits the length of documents.
"""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.errors import DataError
from dataset.reading import faults
from dataset.reading.arrow_files import find_values, text_of_value
from dataset.reading.chat_forms import Shape, shape_of
from dataset.reading.conversations import CONVERSATION, MEASURED, Notes, add_notes, conversation_text
from dataset.reading.csv_files import find_rows
from dataset.reading.faults import BadLine, BadLines, Fault, RawDocument, skip_or_raise, text_of, too_long
from dataset.reading.file_kinds import kind_of
from dataset.reading.json_files import CHUNK_BYTES, find_objects, object_of_line, text_of_line
from dataset.reading.settings import BLANK, LINES, PARAGRAPHS
from dataset.reading.streams import BOM, LineReader, Stream, open_stream

# Limits of a block, which both the reading and the encoding process hold in memory
BLOCK_BYTES = 4 << 20
BLOCK_DOCUMENTS = 8192
# Behind the end of the line before, for a fast search
BLANK_LINES = rb"\n(?:(?:\xef\xbb\xbf)?\s*\n)++"
# The line end of the last text and the blank rest of a file. Possessive, and from the start of white space alone: linear.
BLANK_REST = re.compile(rb"(?<!\s)([^\S\n]*+\n)\s*+(?:\xef\xbb\xbf\s*+)?\Z")


def read_documents(
    path: Path | str,
    text_field: str = "text",
    bad_lines: BadLines | None = None,
    document_end: str | None = None,
    notes: Notes | None = None,
) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, text). A faulty line raises DataError or, with `bad_lines`, is counted there.

    document_end: what ends a document in a text file: LINES, BLANK, PARAGRAPHS or a mark; None: the end of the file.
    notes: gets what is to be said of chats.
    """
    for block in split_into_blocks(Path(path), text_field, BLOCK_BYTES, document_end):
        for line, text in block.documents(text_field):
            if isinstance(text, str):
                yield line, text
            else:
                skip_or_raise(Fault(str(path), line, *text.args), bad_lines)
        if notes is not None:
            add_notes(notes, block.notes)


def is_chat_file(path: Path, text_field: str) -> bool:
    """True if the first object of a file has no text and is a conversation."""
    # Faults are reported when all lines are read. Some kinds of files have no chats.
    with contextlib.suppress(DataError, StopIteration):
        for _, raw in next(split_into_blocks(path, CONVERSATION, BLOCK_BYTES)).raw_documents:
            with contextlib.suppress(BadLine):
                if isinstance(raw, bytes):
                    fields = object_of_line(raw, CONVERSATION)
                    return text_field not in fields and shape_of(fields) is not None
    return False


def plain_texts(
    files: list[Path], text_field: str, skip_bad_lines: bool, document_end: str | None, characters: int
) -> Iterator[str]:
    """Yields the first texts of files, or their beginnings: so many characters in all, as many of each of up to 100 files.

    Of a conversation: the texts of its messages. Errors: as `read_documents`.
    """
    files = files[:: len(files) // 100 + 1]
    for file in files:
        left = characters // len(files)
        for _, text in read_documents(file, text_field, BadLines() if skip_bad_lines else None, document_end):
            text = conversation_text(text) if text_field == CONVERSATION else text
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break


@dataclass
class Block:
    """Some documents of a file, small enough to be held and handed to another process."""

    path: Path
    raw_documents: list[RawDocument]
    source_bytes: int  # bytes of the file that this block took, for progress
    document_end: str | None
    # of chats: the shape of the file's first line, its measured fields, and what is to be said of the lines, counted by
    # `documents`
    shape: Shape | None = None
    measured: frozenset[str] = frozenset()
    notes: Notes = field(default_factory=Counter)

    def documents(self, text_field: str) -> Iterator[tuple[int, str | BadLine]]:
        """Yields (line or table row from 1, text or fault), without blank lines and empty texts."""
        decode = _format_of(self.path, self.document_end).text_of
        if text_field == CONVERSATION:
            decode = partial(text_of_line, notes=self.notes, shape=self.shape, measured=self.measured)
        for line, raw in self.raw_documents:
            try:
                if isinstance(raw, BadLine):
                    raise raw
                text = decode(raw, text_field)
            except BadLine as bad:
                yield line, bad
            else:
                if text:
                    yield line, text


def split_into_blocks(path: Path, text_field: str, max_bytes: int, document_end: str | None = None) -> Iterator[Block]:
    """The blocks of a file in order, each of about `max_bytes` at most. document_end: as in `read_documents`. Errors: DataError."""
    kind = kind_of(path)
    has_chats = text_field == CONVERSATION
    if has_chats and kind.is_text:
        raise DataError(
            f"{path}: conversations are read from .jsonl, .ndjson, .json, .csv and .tsv files, also compressed, .parquet and "
            ".arrow; name those alone, by their own paths or by a pattern"
        )
    find = _format_of(path, document_end).find
    raw_documents: list[RawDocument] = []
    shape: Shape | None = None
    measured: frozenset[str] = frozenset()
    size = 0
    done = 0
    # stream: decompressed bytes. file: the file on disk, whose position shows progress.
    with open_stream(path, kind.compression) as (stream, file):
        faults.refuse_other_content(stream.peek(64)[:64], path)
        for line, raw in find(stream, str(path), text_field):
            raw_documents.append((line, raw))
            if isinstance(raw, bytes):
                size += len(raw)
                # In the first block
                measured |= {match[1].decode() for match in MEASURED.finditer(raw)} if has_chats and not done else set()
                if has_chats and shape is None:
                    with contextlib.suppress(BadLine):
                        shape = shape_of(object_of_line(raw, text_field))
            if size >= max_bytes or len(raw_documents) >= BLOCK_DOCUMENTS:
                yield Block(path, raw_documents, file.tell() - done, document_end, shape, measured)
                raw_documents = []
                size = 0
                done = file.tell()
        if raw_documents:
            yield Block(path, raw_documents, file.tell() - done, document_end, shape, measured)


def _find_lines(stream: Stream, path: str, text_field: str) -> Iterator[RawDocument]:
    """The lines of a .jsonl that are not blank."""
    lines = LineReader(stream, faults.MAX_DOCUMENT_BYTES)
    while (line := lines.read_line()) != b"":
        if line is None:
            yield lines.number, too_long("line")
        elif line.isspace():
            lines.skip_blank_lines()
        else:
            yield lines.number, line


def _find_whole_text(stream: Stream, path: str, text_field: str) -> Iterator[RawDocument]:
    raw = stream.read(faults.MAX_DOCUMENT_BYTES + 1)
    yield 1, too_long("text file, read whole without --split_text,") if len(raw) > faults.MAX_DOCUMENT_BYTES else raw


def _find_pieces(stream: Stream, path: str, text_field: str, separator: re.Pattern[bytes]) -> Iterator[RawDocument]:
    """The parts of a text file, each with its first line's number. Errors: DataError for one that is too long."""
    # A line end before blank lines belongs to the part before, and their last one may be the one before further ones.
    shared = int(separator.pattern == BLANK_LINES)
    # data: read, and without a separator so far, behind the byte before it. line: number of its first line.
    data = b"\n"
    line = 1
    # As much again: `data` is searched again, so each byte about twice in all.
    while more := stream.read(min(max(len(data), CHUNK_BYTES), faults.MAX_DOCUMENT_BYTES + 2 - len(data))):
        data += more
        begin = 1
        for match in separator.finditer(data, 1 - shared):
            yield line, data[begin : match.start() + shared]
            line += data.count(b"\n", begin, match.end())
            begin = match.end()
        data = data[begin - 1 :]
        if len(data) > faults.MAX_DOCUMENT_BYTES + 1:
            raise DataError(f"{path}:{line}: {too_long('part of the text').args[1]}")
    # The last line may have no end, and a mark one.
    last = separator.search(data + b"\n", 1)
    yield line, BLANK_REST.sub(rb"\1", data[: last.start() + shared] if last else data)[1:]


def _text_of_file(raw: bytes, text_field: str) -> str:
    """A whole text file, with \\n for each \\r\\n."""
    return text_of(raw.removeprefix(BOM)).replace("\r\n", "\n")


def _text_of_piece(raw: bytes, text_field: str) -> str:
    """A part of a text file, without line ends around it; "" if it is blank."""
    text = _text_of_file(raw, text_field)
    return text.strip("\n") if text.strip() else ""


class Format(NamedTuple):
    """How the files of a kind are read.

    find     (decompressed stream, path, text field) -> RawDocument for each document, lazily, in memory that
             does not grow with the file
    text_of  (bytes from `find`, text field) -> the text; None or "" if there is none. Errors: BadLine
    """

    find: Callable[[Stream, str, str], Iterator[RawDocument]]
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
# {document_end: what separates documents}; others are marks. A line end after a mark belongs to no document, or to the next
# mark if it begins with one.
SEPARATORS = {LINES: rb"(?:\r?\n)++", BLANK: BLANK_LINES, PARAGRAPHS: BLANK_LINES}


def _format_of(path: Path, document_end: str | None) -> Format:
    kind = kind_of(path)
    if not kind.is_text:
        return FORMATS[kind.suffix]
    if document_end is None:
        return Format(_find_whole_text, _text_of_file)
    mark = re.escape(os.fsencode(document_end.replace("\r\n", "\n"))).replace(b"\\\n", rb"\r?\n")
    # The beginning of a file, and the end of a mark with a line end, stand for the line end before a mark.
    mark = re.sub(rb"^\\r\?\\n", rb"(?:\\r?\\n|(?<![^\\n]))", mark)
    separator = SEPARATORS.get(document_end) or (mark if document_end[0] in "\r\n" else mark + rb"[\r\n]*")
    text_of_piece = _text_of_file if document_end == PARAGRAPHS else _text_of_piece
    return Format(partial(_find_pieces, separator=re.compile(separator)), text_of_piece)
