"""Documents out of files: `.jsonl`, `.jsonl.gz`, `.jsonl.zst`, `.parquet` (a document a line or row) and `.txt` (a
document a file, or what stands between two blank lines: the trainers' encoders decide).

Every fault of a line is named with file and line. What cannot change a document is harmless and loads as if it were
not there: blank lines, a byte-order mark before a line, CRLF, a missing newline at the end, an escaped NUL, a very
long line. An empty text has nothing to learn from and is passed over like a blank line. Memory is bounded by a block
of 4 MB or the longest line, whichever is larger.
"""

import glob
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dataset.faults import BadLines, DataError, Fault

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")
BLOCK_BYTES = 4 << 20
BOM = b"\xef\xbb\xbf"

__all__ = ["BadLines", "DataError", "Fault", "find_files", "parse_line", "read_documents"]


def find_files(data_path: str) -> list[Path]:
    """The data files of a file, a folder (all levels, hidden folders left out) or a glob, sorted by path."""
    if not str(data_path).strip():
        raise DataError("--data_path is empty: name a file, a folder or a glob")
    path = Path(data_path).expanduser()
    readable = f"files that are read: {', '.join(SUFFIXES)}"
    if path.is_file():
        if not _suffix(path):
            raise DataError(f"{path}: unknown kind of file; {readable}")
        return [path]
    if path.is_dir():
        found = [p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    else:
        found = [Path(p) for p in glob.glob(str(path), recursive=True)]
        if not found:
            raise DataError(f"{path}: no such file or folder, and no file matches it as a pattern; {readable}")
    files = sorted((p for p in found if p.is_file() and _suffix(p)), key=lambda p: p.as_posix())
    if not files:
        raise DataError(f"{path}: nothing to read there; {readable}")
    return files


def read_documents(path, text_field: str = "text", bad_lines: BadLines | None = None) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, text). A faulty line raises DataError or, with `bad_lines`, is counted there."""
    for block in split_into_blocks(Path(path), text_field, block_bytes=None):
        for line, text in block.documents(text_field):
            if isinstance(text, str):
                yield block.lines_before + line, text
            else:
                fault = Fault(str(path), block.lines_before + line, *text)
                if bad_lines is None:
                    raise fault.error()
                bad_lines.add(fault)


def parse_line(raw: bytes, place: str, text_field: str = "text") -> str | None:
    """The text of a jsonl line, None for a blank one. A fault raises DataError; `place`, "file:line", begins it."""
    try:
        return _text_of(raw, text_field)
    except _BadLine as bad:
        raise DataError(f"{place}: {bad.args[1]}; mend the line, or pass --skip_bad_lines", bad.args[0]) from None


class _BadLine(Exception):
    """Arguments: kind, reason."""


def _text_of(raw: bytes, text_field: str) -> str | None:
    raw = raw.removeprefix(BOM).strip(b" \t\r\n\v\f")
    if not raw:
        return None
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            raise _BadLine("cut line", "the line ends in the middle of a character") from None
        hint = " (the file looks like UTF-16)" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise _BadLine(
            "bad UTF-8", f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}{hint}"
        ) from None
    except json.JSONDecodeError as error:
        raise _explain(error, raw) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested thousands deep
        raise _BadLine("not JSON", f"not a JSON object that can be read: {str(error)[:80]}") from None
    if not isinstance(record, dict):
        raise _BadLine(
            "not an object", f"a JSON {_json_type(record)} where an object with a {text_field!r} is expected"
        )
    if text_field not in record:
        keys = ", ".join(repr(key) for key in list(record)[:5]) or "none"
        raise _BadLine("no text", f"no {text_field!r} in the object (its keys: {keys}; --text_field names another one)")
    text = record[text_field]
    if not isinstance(text, str):
        kind = "text is null" if text is None else "text is not a string"
        raise _BadLine(kind, f"{text_field!r} is a {_json_type(text)}, not a string")
    if b"\\u" in raw:  # only an escape can spell half a surrogate pair
        _check_surrogates(text)
    return text


def _explain(error: json.JSONDecodeError, raw: bytes) -> _BadLine:
    """The kind and words for a line that is not JSON."""
    at = f"at column {error.pos + 1}"
    if error.msg.startswith("Extra data"):
        return _BadLine("two values on a line", f"something follows the object {at}; one object a line")
    if b"\0" in raw:
        return _BadLine("NUL byte", f"a NUL byte at column {raw.index(0) + 1}")
    if error.msg.startswith("Invalid control character"):
        return _BadLine("raw control character", f"a raw control character {at}; JSON wants it escaped")
    if error.msg.startswith("Unterminated string") or error.pos >= len(error.doc):
        return _BadLine("cut line", "the line ends before its JSON object does")
    return _BadLine("not JSON", f"not JSON: {error.msg} {at}")


def _check_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadLine(
            "lone surrogate", f"half a surrogate pair (\\u{ord(text[error.start]):04x}) at character {error.start + 1}"
        ) from None


def _json_type(value) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "true/false", type(None): "null"}
    return names.get(type(value), "number")


def _suffix(path: Path) -> str:
    """Which of SUFFIXES the file has, or nothing."""
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), "")


@dataclass
class Block:
    """Some lines of a file, small enough to be held and handed to another process: either a byte range of a plain
    jsonl (the lines that begin in it), or what was decompressed (`raw`), or rows of a parquet file, or a whole text
    file.
    """

    path: Path
    start: int = 0
    end: int = 0
    raw: bytes | None = None
    rows: list | None = None
    lines_before: int | None = None  # None: not known, see LineCounter
    source_bytes: int = 0  # its share of the file, for progress

    def documents(self, text_field: str) -> Iterator[tuple[int, str | tuple[str, str]]]:
        """Yields (line from 1 in the block, text or (kind, reason) of a fault); not blank lines and empty texts."""
        is_text = _suffix(self.path) == ".txt"
        if self.rows is not None:
            numbered, convert = enumerate(self.rows, 1), _text_of_value
        elif self.raw is not None:
            numbered, convert = enumerate(io.BytesIO(self.raw), 1), _text_of
            if is_text:
                numbered, convert = _paragraphs(numbered), _text_of_file
        elif is_text:
            numbered, convert = [(1, self.path.read_bytes())], _text_of_file
        else:
            numbered, convert = enumerate(self._lines_of_range(), 1), _text_of
        for line, raw in numbered:
            try:
                text = convert(raw, text_field)
            except _BadLine as bad:
                yield line, bad.args
            else:
                if text:
                    yield line, text

    def _lines_of_range(self) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            position = self.start
            if position:  # the line that began before belongs to the block before
                file.seek(position - 1)
                position += len(file.readline()) - 1
            while position < self.end and (line := file.readline()):
                position += len(line)
                yield line


def _paragraphs(numbered: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """(number of its first line, text) of what stands between blank lines."""
    lines, first = [], 0
    for number, line in numbered:
        if line.removeprefix(BOM).strip():
            first = first if lines else number
            lines.append(line)
        elif lines:
            yield first, b"".join(lines)
            lines = []
    if lines:
        yield first, b"".join(lines)


def _text_of_value(value, text_field: str) -> str:
    """A parquet value, held to the same rules as a text in JSON."""
    if not isinstance(value, str):
        kind = "text is null" if value is None else "text is not a string"
        raise _BadLine(kind, f"{text_field!r} is a {_json_type(value)}, not a string")
    return value


def _text_of_file(raw: bytes, text_field: str) -> str:
    """A whole text file, its line ends made \\n whatever system wrote it."""
    try:
        return raw.removeprefix(BOM).decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise _BadLine(
            "bad UTF-8", f"the text is not UTF-8: byte 0x{raw[error.start]:02x} in its line {line}"
        ) from None


def split_into_blocks(path: Path, text_field: str, block_bytes: int | None, split_text=False) -> Iterator[Block]:
    """The blocks of a file in order, cut by the file and block_bytes alone. None: a plain file in one. split_text: in a
    .txt file a blank line ends a document."""
    suffix, size = _suffix(path), path.stat().st_size
    if suffix == ".jsonl":
        step = block_bytes or max(size, 1)
        for start in range(0, size, step):
            end = min(start + step, size)
            yield Block(path, start, end, lines_before=None if start else 0, source_bytes=end - start)
    elif suffix == ".txt" and split_text:
        yield from _text_blocks(path, block_bytes or max(size, 1))
    elif suffix == ".txt":
        yield Block(path, lines_before=0, source_bytes=size)
    elif suffix == ".parquet":
        yield from _parquet_blocks(path, text_field)
    else:
        yield from _compressed_blocks(path, suffix, block_bytes or BLOCK_BYTES)


class LineCounter:
    """Line numbers for blocks of plain files, which are cut without looking inside. Blocks are asked for in order, so
    that a file is read at most once, and only if some line is faulty.
    """

    def __init__(self):
        self.path, self.position, self.newlines = None, 0, 0

    def lines_before(self, block: Block) -> int:
        """How many lines of its file precede the first one that begins in the block."""
        if block.lines_before is not None:
            return block.lines_before
        if block.path != self.path or block.start <= self.position:  # another file, or the same one again
            self.path, self.position, self.newlines = block.path, 0, 0
        with open(block.path, "rb") as file:
            file.seek(self.position)
            while self.position < block.start - 1:
                chunk = file.read(min(BLOCK_BYTES, block.start - 1 - self.position))
                self.newlines += chunk.count(b"\n")
                self.position += len(chunk)
        return self.newlines + 1  # the newline at start-1 or later is the one after which the block's first line begins


def _text_blocks(path: Path, block_bytes: int) -> Iterator[Block]:
    """Each ends with a blank line or with the file."""
    lines = 0
    with open(path, "rb") as file:
        while raw := file.read(block_bytes):
            more = [file.readline()]  # the rest of the last line
            while (line := file.readline()).strip():
                more.append(line)
            more.append(line)
            raw += b"".join(more)
            yield Block(path, raw=raw, lines_before=lines, source_bytes=len(raw))
            lines += raw.count(b"\n")


def _compressed_blocks(path: Path, suffix: str, block_bytes: int) -> Iterator[Block]:
    lines = done = 0
    with open(path, "rb") as file:
        stream = gzip.GzipFile(fileobj=file) if suffix == ".jsonl.gz" else io.BufferedReader(_ZstdReader(file), 1 << 20)
        try:
            while raw := stream.read(block_bytes) + stream.readline():
                yield Block(path, raw=raw, lines_before=lines, source_bytes=file.tell() - done)
                lines, done = lines + raw.count(b"\n"), file.tell()
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path}: the compressed file is damaged or cut off ({error}); fetch it again") from None


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of a zstd file of any number of frames.

    The package's own reader takes a file that is cut off for a finished one.
    """

    def __init__(self, file):
        self.zstd = _optional("zstandard", "to read .jsonl.zst")
        self.file, self.frame, self.compressed, self.ready = file, None, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.ready:
            self.compressed = self.compressed or self.file.read(1 << 17)
            if not self.compressed:
                if self.frame:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self.frame = self.frame or self.zstd.ZstdDecompressor().decompressobj()
            try:
                self.ready = self.frame.decompress(self.compressed)
            except self.zstd.ZstdError as error:
                raise OSError(str(error)) from None
            self.compressed = self.frame.unused_data
            if self.frame.eof:
                self.frame = None
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count


def _parquet_blocks(path: Path, text_field: str) -> Iterator[Block]:
    parquet = _optional("pyarrow.parquet", "to read .parquet")
    arrow = _optional("pyarrow", "to read .parquet")
    try:
        with parquet.ParquetFile(path) as file:
            if text_field not in file.schema_arrow.names:
                columns = ", ".join(file.schema_arrow.names[:8])
                raise DataError(
                    f"{path}: no column {text_field!r} (its columns: {columns}; --text_field names another one)"
                )
            rows, total = 0, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                size = path.stat().st_size
                share = size * (rows + len(batch)) // total - size * rows // total
                yield Block(path, rows=batch.column(0).to_pylist(), lines_before=rows, source_bytes=share)
                rows += len(batch)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"{path}: not a parquet file that can be read ({reason}); fetch it again") from None


def _optional(module: str, purpose: str):
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"the package {package} is needed {purpose}: pip install {package}") from None
