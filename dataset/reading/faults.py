"""What can be wrong with data, and how it is told."""

import contextlib
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.wording import counted

# (line or row from 1, text of a document or (kind, reason) of a fault): what every reader gives, one after the other.
# A fault goes the way of a document, so that whoever asks for documents decides whether it ends the run or is counted.
Item = tuple[int, str | tuple[str, str]]


class BadLine(Exception):
    """What a reader raises on a line that is no document. Arguments: kind, reason."""


def nul_in_text() -> BadLine:
    """The fault of a plain text with NUL bytes in it."""
    return BadLine("NUL byte", "the text has NUL bytes: it is binary, or in UTF-16; convert it to UTF-8")


# A command that converts a file; the new one has its ending, by which its kind is known.
CONVERT = "python -c \"import sys; open('converted{}', 'w', encoding='utf-8').write(open(sys.argv[1], encoding='{}').read())\" {}"
# The fault of what is text in the usual encoding of Chinese Windows.
GBK = "GBK"


def not_utf8(raw: bytes, reason: str) -> BadLine:
    """The fault of a line or text that UTF-8 does not spell."""
    # Two bytes beyond ASCII side by side: Latin-1 has them rarely, and GB 18030 reads nearly all pairs.
    if re.search(rb"[\x81-\xfe]{2}", raw):
        with contextlib.suppress(UnicodeDecodeError):
            raw.decode("gb18030")
            return BadLine(GBK, f"{reason}; it may be GBK (GB 18030)")
    return BadLine("bad UTF-8", reason)


def refuse_utf16(beginning: bytes, path: Path) -> None:
    """Errors: DataError for a file that begins as text in UTF-16 does. beginning: its first bytes, decompressed."""
    if re.match(rb"\xff\xfe|\xfe\xff|([^\0]\0){4}|(\0[^\0]){4}", beginning):
        raise DataError(
            f"{path}: the text is in UTF-16; convert it to UTF-8: {CONVERT.format(path.suffix, 'utf-16', path)}"
        )


@dataclass(frozen=True)
class Fault:
    """Why a line is no document."""

    path: str
    # From 1; a row of a parquet or Arrow file likewise.
    line: int
    kind: str
    reason: str

    def error(self) -> DataError:
        """What ends a run that does not skip bad lines."""
        advice = "mend the line, or pass --skip_bad_lines"
        if self.kind == GBK:
            advice = f"convert the file: {CONVERT.format(Path(self.path).suffix, 'gb18030', self.path)}"
        return DataError(f"{self.path}:{self.line}: {self.reason}; {advice}", self.kind)


def pass_over(fault: Fault, bad_lines: "BadLines | None") -> None:
    """Count a fault among the bad lines that are skipped. Errors: DataError where none are."""
    if bad_lines is None:
        raise fault.error()
    bad_lines.add(fault)


# What a run may keep of its faults is small whatever the data: a count for each of about twenty kinds and three places
# for each. A corpus of a billion lines of which half are bad costs as much as one with ten bad lines.
#
# Blocks are read by several processes, and each has a collector of its own, whose lines count from the block's first.
# Those of one file are merged in the order of its blocks, moved on by the lines before; then the first three places
# that are kept are the first three of the file, however many processes there were.
class BadLines:
    """Counts faults by kind and keeps the first few places of each; those of several blocks merge in order."""

    def __init__(self, keep: int = 3) -> None:
        self.keep = keep
        self.counts: dict[str, int] = {}
        self.places: dict[str, list[Fault]] = {}

    def add(self, fault: Fault) -> None:
        """Count a fault, and keep it if it is one of the first of its kind."""
        self._add(fault.kind, 1, [fault])

    def merge(self, other: "BadLines", lines_before: int = 0) -> None:
        """Adds what `other` collected, its line numbers moved on by `lines_before`."""
        for kind, count in other.counts.items():
            moved = [replace(fault, line=fault.line + lines_before) for fault in other.places[kind]]
            self._add(kind, count, moved)

    def _add(self, kind: str, count: int, faults: list[Fault]) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        # All that is known of the earlier lines has been added before: the first ones are kept, later ones dropped.
        kept = self.places.setdefault(kind, [])
        kept.extend(faults[: self.keep - len(kept)])

    def first(self) -> Fault:
        """The fault of the first line that was collected."""
        return next(iter(self.places.values()))[0]

    @property
    def total(self) -> int:
        """Faults of all kinds."""
        return sum(self.counts.values())

    def report(self) -> list[str]:
        """Printable lines: the total, then each kind with its count and first places; none if nothing was skipped."""
        if not self.total:
            return []
        lines = [f"skipped {counted(self.total, 'bad line')}:"]
        # the most frequent first
        for kind in sorted(self.counts, key=lambda kind: (-self.counts[kind], kind)):
            count = self.counts[kind]
            lines.append(f"  {kind}: {count:,}")
            lines += [f"    {fault.path}:{fault.line}: {fault.reason}" for fault in self.places[kind]]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` takes, to be written as JSON."""
        places = {}
        for kind in sorted(self.places):
            places[kind] = [asdict(fault) for fault in self.places[kind]]
        return {"counts": dict(sorted(self.counts.items())), "places": places}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "BadLines":
        """What `to_dict` gave."""
        bad = cls()
        bad.counts = dict(data["counts"])
        for kind, faults in data["places"].items():
            bad.places[kind] = [Fault(**fault) for fault in faults]
        return bad
