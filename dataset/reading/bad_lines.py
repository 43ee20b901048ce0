"""Lines of data that are no documents: what is wrong with them, and how many were skipped."""

from dataclasses import dataclass, field
from typing import Any

from common.wording import counted

# faults of each kind whose places are kept
PLACES = 3


class BadLine(Exception):
    """The fault of a line that is no document. Arguments: kind, reason."""


@dataclass(frozen=True)
class Fault:
    """Why a line is no document. line: from 1; the row in a parquet or Arrow file."""

    path: str
    line: int
    kind: str
    reason: str


# Constant size: half a billion bad lines take as much memory as ten.
@dataclass
class BadLines:
    """Faults counted by kind, and the first PLACES of each."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[Fault]] = field(default_factory=dict)

    def add(self, fault: Fault) -> None:
        """Count the next fault."""
        self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
        places = self.places.setdefault(fault.kind, [])
        if len(places) < PLACES:
            places.append(fault)

    @property
    def total(self) -> int:
        """Faults of all kinds."""
        return sum(self.counts.values())

    def report(self) -> list[str]:
        """Printable lines: the total, then each kind with its count and first places; none if nothing was skipped."""
        if not self.total:
            return []
        lines = [f"skipped {counted(self.total, 'bad line')}:"]
        # most frequent first
        for kind in sorted(self.counts, key=lambda kind: (-self.counts[kind], kind)):
            lines.append(f"  {kind}: {self.counts[kind]:,}")
            lines += [f"    {fault.path}:{fault.line}: {fault.reason}" for fault in self.places[kind]]
        return lines

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "BadLines":
        """The inverse of `asdict`."""
        places = {kind: [Fault(**fault) for fault in faults] for kind, faults in data["places"].items()}
        return cls(data["counts"], places)
