"""Decompressed bytes and lines of a file, in bounded memory.

A few kilobytes can expand to gigabytes, and files may be untrusted. So memory depends on what the caller requests, never
on the input: no compressed file, endless line or run of blank lines piles up.
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

# decompressed bytes, with a `peek`
Stream = io.BufferedReader

# {suffix: pattern of the first bytes}. After its level a bzip2 file has the mark of a block or of its end: a text may begin
# with "BZh". A zstd file may start with a skippable frame.
FIRST_BYTES = {
    ".gz": rb"\x1f\x8b",
    ".bz2": rb"BZh[1-9](1AY&|\x17rE8)",
    ".xz": rb"\xfd7zXZ\x00",
    ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
}
COMPRESSIONS = tuple(FIRST_BYTES)

BUFFER_BYTES = 1 << 16
# Input of one call of the zstd decoder, which has no limit on its output: a byte can expand to 32 kB, so 16 MB at most.
# The other decoders take an output limit: in bzip2 a byte can expand to more than a megabyte.
ZSTD_INPUT_BYTES = 512
# Maximum memory of a decoder's window: `zstd --long=31`, as in public dumps, needs 2 GB, `xz -9` 65 MB. Pages are touched
# only as text fills them.
WINDOW_BYTES = 2 << 30

SKIP_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
WHITE_SPACE = b" \t\r\n\v\f"


@contextlib.contextmanager
def open_stream(path: Path, named: str) -> Iterator[tuple[Stream, BinaryIO]]:
    """(decompressed bytes, the underlying file, whose tell() shows progress). named: the compression in its name, of
    COMPRESSIONS or ""; its first bytes decide.

    Errors: DataError for a damaged or truncated file, and for one that is not compressed although its name says so.
    """
    # Decoders of one member, each with `decompress`, `eof` and `unused_data`
    new_decoder: dict[str, Callable[[], Any]] = {
        ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
        ".bz2": bz2.BZ2Decompressor,
        ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=WINDOW_BYTES),
    }
    damage: tuple[type[Exception], ...] = (EOFError, OSError, zlib.error, lzma.LZMAError)
    # A buffered file is a BufferedReader.
    with cast(Stream, path.open("rb", buffering=BUFFER_BYTES)) as file:
        compression = next((suffix for suffix, mark in FIRST_BYTES.items() if re.match(mark, file.peek())), "")
        if named and not compression:
            raise DataError(
                f"{path}: not compressed, or damaged: it does not start like a {named} file; fetch it again, or take {named} off the "
                "name of a plain file"
            )
        if compression == ".zst":
            zstd = optional_package("zstandard", "to read .zst")
            new_decoder[".zst"] = lambda: zstd.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj()
            damage += (zstd.ZstdError,)
        if not compression:
            yield file, file
            return
        try:
            yield io.BufferedReader(_Members(file, compression, new_decoder[compression]), BUFFER_BYTES), file
        except damage as error:
            raise DataError(
                f"{path}: the compressed file is damaged, cut off, or takes more than {WINDOW_BYTES >> 30} GB of memory ({error}); "
                "fetch it again, or compress it again with a smaller window"
            ) from None


class _Members(io.RawIOBase):
    """The decompressed bytes of all members (zstd: frames) of a file.

    The libraries' own readers take a damaged second member for the end, and that of zstd also a truncated file.
    """

    def __init__(self, file: BinaryIO, compression: str, new_decoder: Callable[[], Any]) -> None:
        self.file = file
        self.new_decoder = new_decoder
        # Zeros may follow a gzip or xz member, to fill a tape block.
        self.padding = b"\0" if compression in (".gz", ".xz") else b""
        self.input_bytes = ZSTD_INPUT_BYTES if compression == ".zst" else BUFFER_BYTES
        # Further arguments of `decompress`: its output limit
        self.limit = () if compression == ".zst" else (BUFFER_BYTES,)
        self.decoder: Any = None
        self.compressed = b""
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As in io.RawIOBase: fills the start of the buffer; 0 at the end. Errors: EOFError for a truncated file."""
        while not self.ready:
            # At the limit bzip2 and xz keep the rest of the input and need no more; gzip returns it.
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
        size = min(len(buffer), len(self.ready))
        buffer[:size] = self.ready[:size]
        self.ready = self.ready[size:]
        return size


# `for line in file` holds a whole line, and a compressed megabyte can be a line of a gigabyte. Here `readline` always has
# a bound. The rest of a longer line is skipped piece by piece, and the caller gets None for it: it still counts, so that
# later line numbers are right.
class LineReader:
    """Reads lines from a Stream. number: of the last line read, from 1. max_bytes: of a line with its newline."""

    def __init__(self, stream: Stream, max_bytes: int) -> None:
        self.stream = stream
        self.max_bytes = max_bytes
        self.number = 0

    def read_line(self) -> bytes | None:
        """The next line with its newline, b"" at the end, None for a line of more than `max_bytes`, which is skipped."""
        line = self.stream.readline(self.max_bytes + 1)
        self.number += bool(line)
        if len(line) <= self.max_bytes:
            return line
        while line and not line.endswith(b"\n"):
            line = self.stream.readline(SKIP_BYTES)
        return None

    def skip_blank_lines(self) -> None:
        """Skips whole blank lines buffer by buffer: one by one, a file of them would take minutes."""
        while buffered := self.stream.peek():
            blanks = len(buffered) - len(buffered.lstrip(WHITE_SPACE))
            # Up to the last newline among the blanks: those after it may start a line with text.
            whole_lines = buffered.rfind(b"\n", 0, blanks) + 1
            if not whole_lines:
                return
            self.number += self.stream.read(whole_lines).count(b"\n")
