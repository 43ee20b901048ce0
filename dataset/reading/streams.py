"""A file as a stream of its decompressed bytes and their lines, in bounded memory.

A few kilobytes can stand for gigabytes, and the file may be anybody's. So memory is bounded by what is asked for, never by
what the input stands for: neither a compressed file nor a line without an end nor a run of blank lines piles up.
"""

import bz2
import contextlib
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from common.errors import DataError, optional_package
from dataset.reading import faults

# decompressed bytes, with a `peek`
Stream = io.BufferedReader

# {suffix: how such a compressed file begins, whatever its name}. That of zstd may have a frame without text first.
FIRST_BYTES = {
    ".gz": rb"\x1f\x8b",
    ".bz2": rb"BZh",
    ".xz": rb"\xfd7zXZ\x00",
    ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
}
COMPRESSIONS = tuple(FIRST_BYTES)

BUFFER_BYTES = 1 << 16
# Compressed bytes that the decoder of zstd is given at once, of which it gives all that they stand for. A byte may stand for
# 32 kB: 16 MB. The others are told how much is wanted: in bzip2 a byte may stand for more than a megabyte.
ZSTD_INPUT_BYTES = 512
# Memory for the window of a compressed file: `zstd --long=31`, as public dumps have it, wants 2 GB, `xz -9` 65 MB. It is
# filled only as far as there is text.
WINDOW_BYTES = 2 << 30

SKIP_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
WHITE_SPACE = b" \t\r\n\v\f"


@contextlib.contextmanager
def open_stream(path: Path, named: str) -> Iterator[tuple[Stream, BinaryIO]]:
    """(decompressed bytes, the file underneath, whose tell() is for progress). named: the compression that its name says, of
    COMPRESSIONS or none; its first bytes decide.

    Errors: DataError for a file that is damaged or cut off, and for one that is not compressed where its name says so.
    """
    # Each of the libraries has the decoder of one member, with `decompress`, `eof` and `unused_data`.
    new_decoder: dict[str, Callable[[], Any]] = {
        ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
        ".bz2": bz2.BZ2Decompressor,
        ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=WINDOW_BYTES),
    }
    damage: tuple[type[Exception], ...] = (EOFError, OSError, zlib.error, lzma.LZMAError)
    with path.open("rb") as file:
        beginning = file.read(8)
    compression = next((suffix for suffix, mark in FIRST_BYTES.items() if re.match(mark, beginning)), "")
    if named and beginning and not compression:
        raise DataError(
            f"{path}: the content is not compressed, or it is damaged: it begins as no {named} file does; fetch it again, or "
            f"take {named} off the name of a plain file"
        )
    if compression == ".zst":
        zstd = optional_package("zstandard", "to read .zst")
        new_decoder[".zst"] = lambda: zstd.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj()
        damage += (zstd.ZstdError,)
    with path.open("rb", buffering=BUFFER_BYTES) as file:
        if not compression:
            # Opened with a buffer, it is one.
            yield cast(Stream, file), file
            return
        try:
            yield io.BufferedReader(_Members(file, compression, new_decoder[compression]), BUFFER_BYTES), file
        except damage as error:
            raise DataError(
                f"{path}: the compressed file is damaged, cut off, or takes more than {WINDOW_BYTES >> 30} GB of memory ({error}); "
                "fetch it again, or compress it anew with a smaller window"
            ) from None


class _Members(io.RawIOBase):
    """The decompressed bytes of all members (zstd: frames) of a file, one after the other.

    The libraries' own readers take a damaged second member, and that of zstd a file that is cut off, for the end.
    """

    def __init__(self, file: BinaryIO, compression: str, new_decoder: Callable[[], Any]) -> None:
        self.file = file
        self.new_decoder = new_decoder
        # Behind a member of gzip or xz there may be zeros, which fill a block of a tape.
        self.padding = b"\0" if compression in (".gz", ".xz") else b""
        self.input_bytes = ZSTD_INPUT_BYTES if compression == ".zst" else BUFFER_BYTES
        # What `decompress` is given beside the input: how much it may give.
        self.limit = () if compression == ".zst" else (BUFFER_BYTES,)
        self.decoder: Any = None
        self.compressed = b""
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase has it: fills the start of the buffer, 0 at the end. Errors: EOFError for a cut file."""
        while not self.ready:
            # At the limit bzip2 and xz keep the rest of the input and want no more; gzip gives it back.
            if not self.compressed and getattr(self.decoder, "needs_input", True):
                self.compressed = self.file.read(self.input_bytes)
                if not self.compressed:
                    if self.decoder is not None:
                        raise EOFError("it ends before its end mark")
                    return 0
            if self.decoder is None:
                self.compressed = self.compressed.lstrip(self.padding)
                if not self.compressed:
                    continue
                self.decoder = self.new_decoder()
            self.ready = memoryview(self.decoder.decompress(self.compressed, *self.limit))
            self.compressed = getattr(self.decoder, "unconsumed_tail", b"")
            if self.decoder.eof:
                self.compressed = self.decoder.unused_data
                self.decoder = None
        given = self.ready[: len(buffer)]
        buffer[: len(given)] = given
        self.ready = self.ready[len(given) :]
        return len(given)


# `for line in file` holds a line whole, however long it is, and a compressed megabyte can be a line of a gigabyte. Here
# `readline` always has a bound. Of a line that reaches it the rest is passed in pieces, and the caller is told by None
# that there was a line: it still counts, so that the numbers of later lines are right.
class LineReader:
    """Reads lines from a Stream. number: of the line that was read last, from 1. most: bytes of a line, its newline
    included (default: of a document)."""

    def __init__(self, stream: Stream, most: int | None = None) -> None:
        self.stream = stream
        self.most = faults.MAX_DOCUMENT_BYTES if most is None else most
        self.number = 0

    def read_line(self) -> bytes | None:
        """The next line with its newline, b"" at the end, None for a line of more than `most` bytes, which is passed."""
        line = self.stream.readline(self.most + 1)
        self.number += bool(line)
        if len(line) <= self.most:
            return line
        while line and not line.endswith(b"\n"):
            line = self.stream.readline(SKIP_BYTES)
        return None

    def skip_blank_lines(self) -> None:
        """Passes whole blank lines by the buffer: one by one a file of nothing else would take minutes."""
        while buffered := self.stream.peek():
            blanks = len(buffered) - len(buffered.lstrip(WHITE_SPACE))
            # Up to the last newline among the blanks: those after it may begin a line with a text.
            whole_lines = buffered.rfind(b"\n", 0, blanks) + 1
            if not whole_lines:
                return
            self.number += self.stream.read(whole_lines).count(b"\n")
