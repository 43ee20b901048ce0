"""Files as streams of their decompressed bytes, whatever they are compressed with, in bounded memory.

A file may have several members (gzip, bzip2), streams (xz) or frames (zstd) one after the other. One that is damaged or
cut off raises DataError.
"""

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from common.errors import DataError
from common.packages import optional_package
from dataset.reading.line_reader import BUFFER_BYTES, Stream

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
# How a compressed file begins, whatever its name.
FIRST_BYTES = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}

# A few kilobytes can stand for gigabytes, and the file may be anybody's. So memory must be bounded by what is asked for,
# never by what the input stands for:
#
# 1. A reader asks for some bytes, and the decoder is given that number as `max_length`. It stops there, keeps what it
#    has not yet decompressed, and says by `needs_input` that it wants none of the file yet.
# 2. The decoder's own memory is a window, whose size the file claims. That of gzip and bzip2 is small and fixed, that of
#    xz and zstd is refused above WINDOW_BYTES.
# 3. zstd's decoder has no `max_length`. It is fed in pieces so small that all that one may stand for can be held.
#
# Whoever reads the stream must do so with bounds of its own (LineReader, limits.py): a line of a gigabyte is still one.
READ_BYTES = 1 << 17
# A frame of zstd without text, which may stand first: a byte from 0x50 to 0x5f, then these.
SKIPPABLE_FRAME = b"\x2a\x4d\x18"

# Memory for the window of a compressed file: `zstd --long=31`, as public dumps have it, wants 2 GB, `xz -9` 65 MB. It is
# filled only as far as there is text.
WINDOW_BYTES = 2 << 30
# One compressed byte of zstd may stand for 32 kB, and its decoder gives all that its input stands for: 16 MB at most.
ZSTD_INPUT_BYTES = 512


class Decoder(Protocol):
    """Decompresses one member, as bz2.BZ2Decompressor does."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


@contextlib.contextmanager
def open_stream(path: Path, compression: str) -> Iterator[tuple[Stream, BinaryIO]]:
    """(decompressed bytes, the file underneath, whose tell() is for progress). compression: of COMPRESSIONS, or none."""
    with path.open("rb", buffering=BUFFER_BYTES) as file:
        if not compression:
            # Opened with a buffer, it is one.
            yield cast(Stream, file), file
            return
        try:
            # Python's own reader serves for gzip alone: those of bzip2 and xz have no bound for the memory that one read takes.
            raw = gzip.GzipFile(fileobj=file) if compression == ".gz" else _Members(file, compression)
            yield io.BufferedReader(cast(io.RawIOBase, raw), BUFFER_BYTES), file
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if "emory" in str(error):
                raise DataError(
                    f"{path}: to decompress it takes more than {WINDOW_BYTES >> 30} GB of memory ({error}); compress it anew "
                    "with a smaller window"
                ) from None
            raise DataError(f"{path}: the compressed file is damaged or cut off ({error}); fetch it again") from None


def compression_of(path: Path, named: str) -> str:
    """What a file is compressed with, by its first bytes; "" for a plain one. named: what its name says.

    Errors: DataError where the name says a compression and the content is none.
    """
    with path.open("rb") as file:
        beginning = file.read(8)
    for mark, compression in FIRST_BYTES.items():
        if beginning.startswith(mark):
            return compression
    if named and beginning and not (named == ".zst" and beginning[1:4] == SKIPPABLE_FRAME):
        raise DataError(
            f"{path}: the content is not compressed, or it is damaged: it begins as no {named} file does; fetch it again, or "
            f"take {named} off the name of a plain file"
        )
    return named


class _Members(io.RawIOBase):
    """The decompressed bytes of all members of a file."""

    def __init__(self, file: BinaryIO, compression: str) -> None:
        self.file = file
        self.compression = compression
        self.zstd = optional_package("zstandard", "to read .zst") if compression == ".zst" else None
        self.decoder: Decoder | None = None
        self.compressed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase has it: fills the start of the buffer, 0 at the end. Errors: EOFError for a cut file."""
        # Round after round until there is something to give: a member may be empty, and a decoder takes some input
        # before it gives anything. To return 0 before the end would end the file for the reader.
        while True:
            if self.decoder is None:
                self.decoder = self._next_member()
            if self.decoder is None:
                return 0
            if self.decoder.needs_input and not self.compressed:
                self.compressed = self.file.read(READ_BYTES)
                if not self.compressed:
                    raise EOFError("it ends before its end mark")
            ready = self.decoder.decompress(self.compressed, len(buffer))
            self.compressed = b""
            if self.decoder.eof:
                # The last input may hold the beginning of the next member.
                self.compressed = self.decoder.unused_data
                self.decoder = None
            if ready:
                buffer[: len(ready)] = ready
                return len(ready)

    def _next_member(self) -> Decoder | None:
        """A decoder for what comes next; None at the end of the file."""
        if not self.compressed:
            self.compressed = self.file.read(READ_BYTES)
        if self.compression == ".xz":
            # Behind a stream of xz there may be zeros, which fill a block of a tape. A file of zeros alone is none.
            starts_with_zeros = self.compressed.startswith(b"\0") and self.file.tell() == len(self.compressed)
            if starts_with_zeros:
                raise lzma.LZMAError("it does not begin as an .xz file does")
            while self.compressed and not self.compressed.strip(b"\0"):
                self.compressed = self.file.read(READ_BYTES)
            self.compressed = self.compressed.lstrip(b"\0")
        if not self.compressed:
            return None
        if self.compression == ".bz2":
            return bz2.BZ2Decompressor()
        if self.compression == ".xz":
            return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=WINDOW_BYTES)
        return _ZstdDecoder(self.zstd)


class _ZstdDecoder:
    """One frame. The package's own reader takes a file that is cut off for a finished one, and its decoder knows no
    limit for what it gives: this one feeds it in small pieces and keeps what is not wanted yet.
    """

    def __init__(self, zstd: Any) -> None:
        self.error = zstd.ZstdError
        self.frame = zstd.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj()
        self.compressed = b""
        self.fed = 0
        self.ready = memoryview(b"")

    @property
    def eof(self) -> bool:
        # The frame has ended, and all of it was given.
        return bool(self.frame.eof and not self.ready)

    @property
    def needs_input(self) -> bool:
        return not self.ready and self.fed == len(self.compressed)

    @property
    def unused_data(self) -> bytes:
        # What the frame did not take of its last piece, then the pieces that it was not fed.
        unused: bytes = self.frame.unused_data
        return unused + self.compressed[self.fed :]

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if data:
            assert self.fed == len(self.compressed), "data is given only where needs_input asks for it"
            self.compressed = data
            self.fed = 0
        # Fed only while nothing is ready, so that what is held is never more than what one piece stands for.
        while not self.ready and not self.frame.eof and self.fed < len(self.compressed):
            piece = self.compressed[self.fed : self.fed + ZSTD_INPUT_BYTES]
            self.fed += len(piece)
            try:
                self.ready = memoryview(self.frame.decompress(piece))
            except self.error as error:
                raise OSError(str(error)) from None
        given = bytes(self.ready[:max_length])
        self.ready = self.ready[max_length:]
        return given
