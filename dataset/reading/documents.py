"""Documents out of files of all kinds; file_kinds.py tells the kinds, and README.md what is a document in each.

Every fault of a line is named with file and line. What cannot change a document is harmless and loads as if it were
not there: blank lines, a byte-order mark before a line, CRLF, a missing newline at the end, an escaped NUL, a long
line. An empty text has nothing to learn from and is passed over like a blank line. Memory is bounded by a block of 4 MB
or the longest document, whichever is larger; limits.py says how long one may be.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

from common.errors import DataError
from dataset.reading import limits
from dataset.reading.arrow_files import TableReader
from dataset.reading.csv_files import read_csv
from dataset.reading.decompress import compression_of, open_stream
from dataset.reading.faults import (
    BadLines,
    Fault,
    Item,
    line_at,
    not_utf8,
    nul_in_text,
    pass_over,
    refuse_utf16,
)
from dataset.reading.file_kinds import UNCOMPRESSED, FileKind, find_files, kind_of
from dataset.reading.json_files import read_json
from dataset.reading.json_lines import BOM, item_of, parse_line, text_of_line
from dataset.reading.line_reader import BUFFER_BYTES, LineReader, Stream

# A block is held in memory by the process that reads it and by the one that encodes it.
BLOCK_BYTES = 4 << 20
BLOCK_ROWS = 1024

__all__ = ["BOM", "BadLines", "DataError", "Fault", "find_files", "parse_line", "read_documents"]


def read_documents(
    path: Path | str, text_field: str = "text", bad_lines: BadLines | None = None, split_text: bool = False
) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, text). A faulty line raises DataError or, with `bad_lines`, is counted there.

    split_text: in a text file a blank line ends a document.
    """
    file = Path(path) if isinstance(path, str) else path
    for block in split_into_blocks(file, text_field, block_bytes=None, split_text=split_text):
        for line, text in block.documents(text_field):
            number = (block.lines_before or 0) + line
            if isinstance(text, str):
                yield number, text
                continue
            pass_over(Fault(str(path), number, *text), bad_lines)


# Files are cut into blocks, so that several processes can encode one file, and a store comes out the same whatever their
# number. So where a block ends follows from the file and the size of a block alone, never from who is free.
#
# A plain .jsonl is cut without looking inside, at every multiple of block_bytes, which costs nothing for a file of any
# size. A cut falls into some line, and one rule decides whose it is: *a line belongs to the block in which it begins*.
# The block before reads on beyond its end to finish the line, and the block after passes what is left of it. A line
# that begins exactly at a cut is the later block's; to see that, it starts one byte early, at the newline before.
#
# What is compressed, and tables, can be read in order only. There one process reads, and hands on whole lines or items.
@dataclass
class Block:
    """Some documents of a file, small enough to be held and handed to another process. It is one of these:
    items      what was read already, of a table, a .json file, or of a text that blank lines divide
    raw        decompressed lines, or text
    neither    a byte range of a plain jsonl (the lines that begin in it), or a whole plain text file
    """

    path: Path
    start: int = 0
    end: int = 0
    raw: bytes | None = None
    items: list[Item] | None = None
    # Of what follows `raw` and was too long to be held.
    last_fault: Item | None = None
    # None: not known, see LineCounter.
    lines_before: int | None = None
    # Its share of the file, for progress.
    source_bytes: int = 0

    def documents(self, text_field: str) -> Iterator[Item]:
        """Yields (line from 1 in the block, text or (kind, reason) of a fault); not blank lines and empty texts."""
        if self.items is not None:
            yield from self.items
            return
        convert = _text_of_file if kind_of(self.path).is_text else text_of_line
        for line, raw in self._numbered():
            if raw is None:
                yield line, limits.too_long("text file" if convert is _text_of_file else "line")
                continue
            item = item_of(line, raw, convert, text_field)
            if item is not None:
                yield item
        if self.last_fault:
            yield self.last_fault

    def _numbered(self) -> Iterator[tuple[int, bytes | None]]:
        """(line in the block, bytes of a line or text, None for a longer one than is held)."""
        is_text = kind_of(self.path).is_text
        if self.raw is None:
            return self._whole_file() if is_text else self._lines_of_range()
        if is_text:
            return iter([(1, self.raw)])
        return LineReader(io.BufferedReader(io.BytesIO(self.raw), BUFFER_BYTES)).lines()

    def _whole_file(self) -> Iterator[tuple[int, bytes | None]]:
        with self.path.open("rb") as file:
            raw = file.read(limits.MAX_DOCUMENT_BYTES + 1)
        yield 1, raw if len(raw) <= limits.MAX_DOCUMENT_BYTES else None

    def _lines_of_range(self) -> Iterator[tuple[int, bytes | None]]:
        with self.path.open("rb", buffering=BUFFER_BYTES) as file:
            # Opened with a buffer, it is one.
            reader = LineReader(cast(Stream, file), self.start)
            if self.start:
                # The line that began before belongs to the block before. It may go on beyond this one.
                file.seek(self.start - 1)
                reader.position = self.start - 1
                reader.skip_rest_of_line(self.end)
            yield from reader.lines(self.end)


def _paragraphs(stream: Stream) -> Iterator[Item]:
    """(number of its first line, text or fault) of what stands between blank lines."""
    # Joined as they come: a list of short lines would take many times their bytes.
    text = bytearray()
    first = 0
    is_too_long = False
    for number, line in chain(LineReader(stream).lines(), [(0, b"")]):
        if line is None or line.removeprefix(BOM).strip():
            first = first or number
            is_too_long = is_too_long or line is None or len(text) + len(line) > limits.MAX_DOCUMENT_BYTES
            if is_too_long:
                text.clear()
            else:
                text += cast(bytes, line)
        elif first:
            item = item_of(first, bytes(text), _text_of_file, "")
            if is_too_long:
                item = (first, limits.too_long("text between blank lines"))
            if item is not None:
                yield item
            text.clear()
            first = 0
            is_too_long = False


def _text_of_file(raw: bytes, text_field: str) -> str:
    """A whole text file, its line ends made \\n whatever system wrote it."""
    if b"\0" in raw:
        raise nul_in_text()
    try:
        return raw.removeprefix(BOM).decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise not_utf8(
            raw, f"the text is not UTF-8: byte 0x{raw[error.start]:02x} in its line {line_at(raw, error.start)}"
        ) from None


def kind_of_content(path: Path) -> FileKind:
    """The format that the name says, and the compression that the first bytes say. Errors: DataError for text in UTF-16."""
    kind = kind_of(path)
    if kind.suffix in UNCOMPRESSED:
        return kind
    compression = compression_of(path, kind.compression)
    with open_stream(path, compression) as (stream, _):
        refuse_utf16(stream.peek(64)[:64], path)
    return FileKind(kind.suffix, compression)


def split_into_blocks(
    path: Path, text_field: str, block_bytes: int | None, split_text: bool = False
) -> Iterator[Block]:
    """The blocks of a file in order, cut by the file and block_bytes alone. None: a plain file in one. split_text: in a
    text file a blank line ends a document."""
    kind = kind_of_content(path)
    size = path.stat().st_size
    if kind.suffix in (".parquet", ".arrow"):
        table = TableReader(path, text_field)

        def bytes_read() -> int:
            return int(table.done * size)

        yield from _item_blocks(path, table.rows(), bytes_read, block_bytes)
        return
    if not kind.compression and kind.suffix == ".jsonl":
        step = block_bytes or max(size, 1)
        for start in range(0, size, step):
            end = min(start + step, size)
            yield Block(path, start, end, lines_before=None if start else 0, source_bytes=end - start)
        return
    if not kind.compression and kind.is_text and not split_text:
        yield Block(path, lines_before=0, source_bytes=size)
        return
    # From here on the file is read in order. `stream` gives the decompressed bytes; `file` is what lies on the disk, and
    # how far it was read says how much is done.
    with open_stream(path, kind.compression) as (stream, file):
        if kind.is_text and split_text:
            yield from _item_blocks(path, _paragraphs(stream), file.tell, block_bytes)
        elif kind.is_text:
            raw = stream.read(limits.MAX_DOCUMENT_BYTES + 1)
            fault = (1, limits.too_long("text")) if len(raw) > limits.MAX_DOCUMENT_BYTES else None
            yield Block(path, raw=b"" if fault else raw, last_fault=fault, lines_before=0, source_bytes=size)
        elif kind.suffix == ".jsonl":
            yield from _line_blocks(path, stream, file, block_bytes or BLOCK_BYTES)
        else:
            items = TABLE_READERS[kind.suffix](stream, str(path), text_field)
            yield from _item_blocks(path, items, file.tell, block_bytes)


def _read_json(stream: Stream, path: str, text_field: str) -> Iterator[Item]:
    return read_json(stream, text_field)


def _read_csv(stream: Stream, path: str, text_field: str) -> Iterator[Item]:
    return read_csv(stream, path, ",", text_field)


def _read_tsv(stream: Stream, path: str, text_field: str) -> Iterator[Item]:
    return read_csv(stream, path, "\t", text_field)


# The formats of file_kinds.TABLES: (decompressed stream, path for error lines, text field) -> its Items, one after the
# other, in memory that does not grow with the file
TABLE_READERS: dict[str, Callable[[Stream, str, str], Iterator[Item]]] = {
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
}


class LineCounter:
    """Line numbers for blocks of plain files, which are cut without looking inside. Blocks are asked for in order, so
    that a file is read at most once, and only if some line is faulty.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.position = 0
        self.newlines = 0

    def lines_before(self, block: Block) -> int:
        """How many lines of its file precede the first one that begins in the block."""
        if block.lines_before is not None:
            return block.lines_before
        # Another file, or the same one again.
        if block.path != self.path or block.start <= self.position:
            self.path = block.path
            self.position = 0
            self.newlines = 0
        with block.path.open("rb") as file:
            file.seek(self.position)
            while self.position < block.start - 1:
                chunk = file.read(min(BLOCK_BYTES, block.start - 1 - self.position))
                if not chunk:
                    raise DataError(f"{block.path}: the data changed while it was being read; start again")
                self.newlines += chunk.count(b"\n")
                self.position += len(chunk)
        # Counted up to start - 1 only, since a line that begins exactly at `start` is the block's own.
        # The newline at start - 1 or later is the one after which the block's first line begins.
        return self.newlines + 1


def _named(path: Path, items: Iterator[Item]) -> Iterator[Item]:
    """A reader's items. Errors: DataError with the file's name where it meets a byte that is not UTF-8."""
    number = 0
    try:
        for item in items:
            number = item[0]
            yield item
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{path}: not UTF-8: byte 0x{byte:02x} behind record {number}; convert the file to UTF-8"
        ) from None


def _item_blocks(
    path: Path, items: Iterator[Item], position: Callable[[], int], block_bytes: int | None
) -> Iterator[Block]:
    """Blocks of what this process reads. position: how many bytes of the file have been read."""
    block: list[Item] = []
    characters = 0
    done = 0
    for item in _named(path, items):
        block.append(item)
        # The length of a text. A fault is a pair and counts as 2.
        characters += len(item[1])
        if characters >= (block_bytes or BLOCK_BYTES) or len(block) >= BLOCK_ROWS:
            yield Block(path, items=block, lines_before=0, source_bytes=position() - done)
            block = []
            characters = 0
            done = position()
    if block:
        yield Block(path, items=block, lines_before=0, source_bytes=position() - done)


def _line_blocks(path: Path, stream: Stream, file: BinaryIO, block_bytes: int) -> Iterator[Block]:
    """Whole lines of a compressed file. Blocks of blank lines alone are passed over."""
    lines = 0
    done = 0
    while raw := stream.read(block_bytes):
        # Bytes of a line that the block has begun and the next bytes of the stream go on with. Both parts together may
        # be as long as a document.
        begun = len(raw) - (raw.rfind(b"\n") + 1)
        rest = stream.readline(limits.MAX_DOCUMENT_BYTES + 1 - begun)
        fault = None
        if begun + len(rest) <= limits.MAX_DOCUMENT_BYTES:
            raw += rest
        else:
            # The lines before it are good; the long one is told in the place where it stands, after them.
            raw = raw[: len(raw) - begun]
            fault = (raw.count(b"\n") + 1, limits.too_long("line"))
            if not rest.endswith(b"\n"):
                LineReader(stream).skip_rest_of_line()
        if fault or not raw.isspace():
            yield Block(path, raw=raw, last_fault=fault, lines_before=lines, source_bytes=file.tell() - done)
            done = file.tell()
        lines += raw.count(b"\n") + (fault is not None)
