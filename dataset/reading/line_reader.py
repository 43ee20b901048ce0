"""Lines of a binary stream within bounded memory: neither a line without an end nor a run of blank lines piles up."""

import io
from collections.abc import Iterator

from dataset.reading import limits

# Of decompressed bytes, with a `peek`.
Stream = io.BufferedReader

BUFFER_BYTES = 1 << 16
SKIP_BYTES = 1 << 20
WHITE_SPACE = b" \t\r\n\v\f"


# `for line in file` holds a line whole, however long it is, and a compressed megabyte can be a line of a gigabyte. Here
# `readline` always has a bound. Of a line that reaches it the rest is passed in pieces, and the caller is told by None
# that there was a line: it still counts, so that the numbers of later lines are right.
#
# Blank lines cost as little: a run of them has no bound, and to give them out one by one would take minutes for a file
# of nothing else. After two in a row the buffer is searched for the end of the run instead.
class LineReader:
    """Reads lines from a BufferedReader. number: of the line that was read last, from 1. most: bytes of a line, its newline
    included (default: of a document)."""

    def __init__(self, stream: Stream, most: int | None = None) -> None:
        self.stream = stream
        self.most = limits.MAX_DOCUMENT_BYTES if most is None else most
        self.number = 0

    def read_line(self) -> bytes | None:
        """The next line with its newline, b"" at the end, None for a line of more than `most` bytes, which is passed."""
        line = self.stream.readline(self.most + 1)
        self.number += bool(line)
        if len(line) <= self.most:
            return line
        if not line.endswith(b"\n"):
            self.skip_rest_of_line()
        return None

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """(number, what read_line gives) of the lines. A run of blank lines may come as two."""
        blank_before = False
        while (line := self.read_line()) != b"":
            yield self.number, line
            blank = line is not None and line.isspace()
            if blank and blank_before:
                self.skip_blank_lines()
            blank_before = blank

    def skip_rest_of_line(self) -> None:
        """Passes what is left of a line."""
        while (piece := self.stream.readline(SKIP_BYTES)) and not piece.endswith(b"\n"):
            pass

    def skip_blank_lines(self) -> None:
        """Passes whole blank lines by the buffer, as fast as they are decompressed."""
        while buffered := self.stream.peek():
            blanks = len(buffered) - len(buffered.lstrip(WHITE_SPACE))
            # Up to the last newline among the blanks: those after it may begin a line with a text.
            whole_lines = buffered.rfind(b"\n", 0, blanks) + 1
            if not whole_lines:
                return
            self.number += self.stream.read(whole_lines).count(b"\n")
