"""What can be wrong with data, and how it is told."""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.wording import counted


class BadLine(Exception):
    """What a reader raises on a line that is no document. Arguments: kind, reason."""


@dataclass(frozen=True)
class Fault:
    """Why a line is no document."""

    path: str
    line: int  # 1-based (a row of a parquet file likewise)
    kind: str
    reason: str

    def error(self) -> DataError:
        """What ends a run that does not skip bad lines."""
        return DataError(f"{self.path}:{self.line}: {self.reason}; mend the line, or pass --skip_bad_lines", self.kind)


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
        kept = self.places.setdefault(kind, [])
        kept.extend(faults[: self.keep - len(kept)])

    @classmethod
    def in_document_order(cls, parts: list["BadLines"], files: list[Path]) -> "BadLines":
        """Merges collectors whose lines are mixed; `files` gives the order of the files."""
        order = {str(file): i for i, file in enumerate(files)}

        def place(fault: Fault) -> tuple[int, int]:
            return order.get(fault.path, len(files)), fault.line

        counts: Counter[str] = Counter()
        faults: dict[str, list[Fault]] = {}
        for part in parts:
            counts.update(part.counts)
            for kind, found in part.places.items():
                faults.setdefault(kind, []).extend(found)
        bad = cls()
        for kind, count in counts.items():
            bad._add(kind, count, sorted(faults[kind], key=place))
        return bad

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
        # The most frequent ones first; of equally frequent ones in the order of their names.
        kinds = sorted(self.counts, key=lambda kind: (-self.counts[kind], kind))
        for kind in kinds:
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

    @staticmethod
    def can_be_read_from(data: object) -> bool:
        """Whether `from_dict` takes it: what is read from a file may be anything."""
        if not isinstance(data, dict):
            return False
        counts = data.get("counts")
        places = data.get("places")
        if not isinstance(counts, dict) or not isinstance(places, dict) or counts.keys() != places.keys():
            return False
        fields = set(Fault.__dataclass_fields__)
        for kind, count in counts.items():
            if type(count) is not int or not isinstance(places[kind], list):
                return False
            for place in places[kind]:
                if not isinstance(place, dict) or set(place) != fields or type(place["line"]) is not int:
                    return False
        return True

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "BadLines":
        """What `to_dict` gave."""
        bad = cls()
        bad.counts = dict(data["counts"])
        for kind, faults in data["places"].items():
            bad.places[kind] = [Fault(**fault) for fault in faults]
        return bad
