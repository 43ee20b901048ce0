"""Documents out of files of all kinds; file_kinds.py tells the kinds, and README.md what is a document in each.

Every fault of a line is named with file and line. What cannot change a document is harmless and loads as if it were
not there: blank lines, a byte-order mark before a line, CRLF, a missing newline at the end, an escaped NUL, a long
line. An empty text has nothing to learn from and is passed over like a blank line. Memory is bounded by a block of 4 MB
or the longest document, whichever is larger; faults.py says how long one may be.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from common.errors import DataError
from dataset.reading import faults
from dataset.reading.arrow_files import TableReader
from dataset.reading.csv_files import read_csv
from dataset.reading.faults import BadLines, Fault, Item, items_of, pass_over, refuse_utf16, text_of
from dataset.reading.file_kinds import UNCOMPRESSED, find_files, kind_of
from dataset.reading.json_files import read_json, text_of_line
from dataset.reading.streams import BOM, LineReader, Stream, compression_of, open_stream

# A block is held in memory by the process that reads it and by the one that encodes it.
BLOCK_BYTES = 4 << 20
BLOCK_ROWS = 1024

__all__ = ["BadLines", "DataError", "Fault", "find_files", "read_documents"]


def read_documents(
    path: Path | str, text_field: str = "text", bad_lines: BadLines | None = None, split_text: bool = False
) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, text). A faulty line raises DataError or, with `bad_lines`, is counted there.

    split_text: in a text file a blank line ends a document.
    """
    for block in split_into_blocks(Path(path), text_field, BLOCK_BYTES, split_text):
        for line, text in block.documents(text_field):
            number = block.lines_before + line
            if isinstance(text, str):
                yield number, text
                continue
            pass_over(Fault(str(path), number, *text), bad_lines)


@dataclass
class Block:
    """Some documents of a file, small enough to be held and handed to another process, which reads the lines."""

    path: Path
    # whole lines of a .jsonl
    raw: bytes = b""
    # documents and faults that are read already: those behind `raw`, of other files all. Lines count from the first of `raw`.
    items: list[Item] = field(default_factory=list)
    # of the file, before the block
    lines_before: int = 0
    # its share of the file, for progress
    source_bytes: int = 0

    def documents(self, text_field: str) -> Iterator[Item]:
        """Yields (line from 1 in the block, text or (kind, reason) of a fault); not blank lines and empty texts."""
        convert = partial(text_of_line, text_field=text_field)
        for number, line in enumerate(io.BytesIO(self.raw), 1):
            yield from items_of(number, line, convert)
        yield from self.items


def split_into_blocks(path: Path, text_field: str, block_bytes: int, split_text: bool = False) -> Iterator[Block]:
    """The blocks of a file in order, cut by the file and block_bytes alone: so a store comes out the same whatever the number
    of processes. split_text: in a text file a blank line ends a document."""
    kind = kind_of(path)
    size = path.stat().st_size
    if kind.suffix in UNCOMPRESSED:
        table = TableReader(path, text_field)
        yield from _item_blocks(path, table.rows(), lambda: int(table.done * size), block_bytes)
        return
    # `stream` gives the decompressed bytes; `file` is what lies on the disk, and how far it was read says how much is done.
    with open_stream(path, compression_of(path, kind.compression)) as (stream, file):
        refuse_utf16(stream.peek(64)[:64], path)
        if kind.suffix == ".jsonl":
            yield from _line_blocks(path, stream, file, block_bytes)
            return
        if not kind.is_text:
            items = TABLE_READERS[kind.suffix](stream, str(path), text_field)
        else:
            items = _paragraphs(stream) if split_text else _whole_text(stream)
        yield from _item_blocks(path, items, file.tell, block_bytes)


# The formats of file_kinds.TABLES: (decompressed stream, path for error lines, text field) -> its Items, one after the
# other, in memory that does not grow with the file
TABLE_READERS: dict[str, Callable[[Stream, str, str], Iterator[Item]]] = {
    ".json": read_json,
    ".csv": partial(read_csv, delimiter=","),
    ".tsv": partial(read_csv, delimiter="\t"),
}


def _whole_text(stream: Stream) -> Iterator[Item]:
    """The text of a file, or its fault."""
    raw = stream.read(faults.MAX_DOCUMENT_BYTES + 1)
    if len(raw) > faults.MAX_DOCUMENT_BYTES:
        yield 1, faults.too_long("text file")
    else:
        yield from items_of(1, raw, _text_of_file)


def _paragraphs(stream: Stream) -> Iterator[Item]:
    """(number of its first line, text or fault) of what stands between blank lines."""
    lines = LineReader(stream)
    # Joined as they come: a list of short lines would take many times their bytes.
    text = bytearray()
    first = 0
    is_too_long = False
    while True:
        line = lines.read_line()
        if line is None or line.removeprefix(BOM).strip():
            first = first or lines.number
            is_too_long = is_too_long or line is None or len(text) + len(line) > faults.MAX_DOCUMENT_BYTES
            if is_too_long:
                text.clear()
            else:
                text += cast(bytes, line)
            continue
        if is_too_long:
            yield first, faults.too_long("text between blank lines")
        elif first:
            yield from items_of(first, bytes(text), _text_of_file)
        if not line:
            return
        text.clear()
        first = 0
        is_too_long = False
        lines.skip_blank_lines()


def _text_of_file(raw: bytes) -> str:
    """A whole text file, its line ends made \\n whatever system wrote it."""
    return text_of(raw.removeprefix(BOM)).replace("\r\n", "\n")


def _item_blocks(path: Path, items: Iterator[Item], position: Callable[[], int], block_bytes: int) -> Iterator[Block]:
    """Blocks of what this process reads. position: how many bytes of the file have been read.

    Errors: DataError with the file's name where a reader meets a byte that is not UTF-8.
    """
    block: list[Item] = []
    characters = 0
    done = 0
    number = 0
    try:
        for item in items:
            number = item[0]
            block.append(item)
            # The length of a text. A fault is a pair and counts as 2.
            characters += len(item[1])
            if characters >= block_bytes or len(block) >= BLOCK_ROWS:
                yield Block(path, items=block, source_bytes=position() - done)
                block = []
                characters = 0
                done = position()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{path}: not UTF-8: byte 0x{byte:02x} behind record {number}; convert the file to UTF-8"
        ) from None
    if block:
        yield Block(path, items=block, source_bytes=position() - done)


def _line_blocks(path: Path, stream: Stream, file: BinaryIO, block_bytes: int) -> Iterator[Block]:
    """Whole lines of a .jsonl. Blocks of blank lines alone are passed over."""
    lines = 0
    done = 0
    while raw := stream.read(block_bytes):
        # Bytes of a line that the block has begun and the next bytes of the stream go on with. Both parts together may
        # be as long as a document.
        begun = len(raw) - (raw.rfind(b"\n") + 1)
        rest = stream.readline(faults.MAX_DOCUMENT_BYTES + 1 - begun)
        fault: list[Item] = []
        if begun + len(rest) <= faults.MAX_DOCUMENT_BYTES:
            raw += rest
        else:
            # The lines before it are good; the long one is told in the place where it stands, after them.
            raw = raw[: len(raw) - begun]
            fault = [(raw.count(b"\n") + 1, faults.too_long("line"))]
            if not rest.endswith(b"\n"):
                LineReader(stream).skip_rest_of_line()
        if fault or not raw.isspace():
            yield Block(path, raw, fault, lines_before=lines, source_bytes=file.tell() - done)
            done = file.tell()
        lines += raw.count(b"\n") + len(fault)
