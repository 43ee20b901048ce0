"""Which blocks of a corpus a part (`--shard k/n`) makes, so that it reads little that is not its own.

Reading may cost as much as tokenising: sixteen parts that each unpack everything would spend most of their time so.
Files are dealt out in *sections*. Where a file has sections that can be read by themselves (blocks of a plain .jsonl,
row groups of a .parquet), these are its sections; any other file is one. Each section goes to the part that has the
fewest bytes so far, so no part gets more than the mean and one section. A section that is large against the mean part is
shared instead: every part reads it and takes every n-th block.

A large corpus is stored in shards (sharded.py). These are stretches of it of about SHARD_BYTES, whatever n is. Where each
of them is small against a part, they are dealt out as a whole, and nothing has to be put together at the end.

Everything follows from the content of the files and n, so parts on many machines agree without a word.
"""

import bisect
import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dataset.reading.documents import Block, sizes_of_sections, split_into_blocks
from dataset.reading.remote import DataFile

# Raise this number when the same data is dealt out in another way, so that no old parts are put together with new ones.
VERSION = 2
# Of the mean part: larger sections are shared. With smaller ones no part gets much more than the mean and a quarter.
SHARED_FROM = 1 / 4
# Bytes of the files that a shard of a store is made of. It is what plans deal with at once (dataset/grouped_plan.py), and
# what is fetched as a whole.
SHARD_BYTES = 256 << 20


class Place(NamedTuple):
    """Where a block stands in the corpus; places compare as the documents follow each other."""

    file: int
    section: int
    block: int


class Start(NamedTuple):
    """Where a shard of a store begins."""

    file: int
    section: int


def shard_of(place: Place, starts: Sequence[Start]) -> int:
    """The number of the shard that a block is in."""
    return bisect.bisect_right(starts, (place.file, place.section)) - 1


@dataclass(frozen=True)
class Section:
    """A piece of a file that can be read without what comes before it, or a whole file.

    number: of the section in its file, from 0; None: the file as a whole. owner: the part that makes it, from 0; None:
    all parts share it. turn: how far the dealing of a shared section's blocks is shifted.
    """

    file: int
    number: int | None
    source_bytes: int
    owner: int | None
    turn: int = 0

    def is_read_by(self, part: int) -> bool:
        """Whether the part (from 0) makes some of its blocks."""
        return self.owner is None or self.owner == part

    def owner_of_block(self, i: int, n: int) -> int:
        """The part (from 0) of n that makes block i of this section."""
        if self.owner is not None:
            return self.owner
        return (i + self.turn) % n


class Dealing:
    """The blocks of part k of n (from 1) of some files.

    sizes: bytes of each file. block_options: text_field, block_bytes and split_text of `split_into_blocks`.
    """

    def __init__(
        self, files: Sequence[DataFile], sizes: list[int], block_options: tuple[str, int, bool], k: int, n: int
    ) -> None:
        self.files = files
        self.block_options = block_options
        # From 0.
        self.part = k - 1
        self.n = n
        pieces = list(_pieces(files, sizes, block_options))
        # Of the shards of the store; one for a small corpus.
        self.starts, shard_bytes = _cut_into_shards(pieces)
        # Whether parts have whole shards.
        self.by_shards = len(self.starts) > 1 and max(shard_bytes) <= sum(shard_bytes) / n * SHARED_FROM
        # The shards of this part, ascending.
        self.shards = list(range(len(self.starts)))
        if n == 1 or self.by_shards:
            owners = _dealt_whole(shard_bytes, n)
            self.shards = [i for i in self.shards if owners[i] == self.part]
            self.sections = [
                Section(*piece, owners[shard_of(Place(piece.file, piece.number or 0, 0), self.starts)])
                for piece in pieces
            ]
        else:
            self.sections = list(_sections(files, sizes, block_options, n))

    def blocks(
        self, after: Place | None = None, shards: Collection[int] | None = None
    ) -> Iterator[tuple[Place, Block]]:
        """Those of this part in the order of the corpus, beginning with the first one behind `after`.

        shards: only those of these shards of the store.
        """
        for section in self.sections:
            if not section.is_read_by(self.part):
                continue
            number = section.number or 0
            if shards is not None and shard_of(Place(section.file, number, 0), self.starts) not in shards:
                continue
            # A section that was done before an interruption is not even opened. Within the section of `after` the
            # blocks are cut once more: a compressed file, for one, gives its text only from the beginning.
            if after is not None and (section.file, number) < (after.file, after.section):
                continue
            path = self.files[section.file]
            for i, block in enumerate(split_into_blocks(path, *self.block_options, section=section.number)):
                if section.owner_of_block(i, self.n) != self.part:
                    continue
                place = Place(section.file, number, i)
                if after is None or place > after:
                    yield place, block

    def source_bytes(self) -> int:
        """About how many bytes of the files are tokenised for this part."""
        total = 0
        for section in self.sections:
            if section.owner is None:
                total += section.source_bytes // self.n
            elif section.owner == self.part:
                total += section.source_bytes
        return total


class Piece(NamedTuple):
    """A file, or a section of a file that is larger than a shard."""

    file: int
    number: int | None
    source_bytes: int


def _pieces(files: Sequence[DataFile], sizes: list[int], block_options: tuple[str, int, bool]) -> Iterator[Piece]:
    """What a shard is made of, in the order of the corpus."""
    for file, size in enumerate(sizes):
        # To ask a file for its sections may open it.
        section_sizes = sizes_of_sections(files[file], *block_options) if size > SHARD_BYTES else None
        if section_sizes is None:
            yield Piece(file, None, size)
            continue
        for number, section_size in enumerate(section_sizes):
            yield Piece(file, number, section_size)


def _cut_into_shards(pieces: Sequence[Piece]) -> tuple[list[Start], list[int]]:
    """(where each shard begins, its bytes): as many pieces as have SHARD_BYTES together, or one that has more."""
    starts = [Start(0, 0)]
    shard_bytes = [0]
    for piece in pieces:
        if shard_bytes[-1] and shard_bytes[-1] + piece.source_bytes > SHARD_BYTES:
            starts.append(Start(piece.file, piece.number or 0))
            shard_bytes.append(0)
        shard_bytes[-1] += piece.source_bytes
    return starts, shard_bytes


def _dealt_whole(shard_bytes: Sequence[int], n: int) -> list[int]:
    """The part of each shard (from 0): each goes to the part that has the fewest bytes at that moment."""
    load = [(0, part) for part in range(n)]
    owners = []
    for n_bytes in shard_bytes:
        bytes_so_far, owner = heapq.heappop(load)
        heapq.heappush(load, (bytes_so_far + n_bytes, owner))
        owners.append(owner)
    return owners


def _sections(
    files: Sequence[DataFile], sizes: list[int], block_options: tuple[str, int, bool], n: int
) -> Iterator[Section]:
    """All sections of the corpus in its order, each with its owner.

    The sections come one after the other, and each goes to the part that has the fewest bytes at that moment; of
    several, to the one with the lowest number. When a part gets its last section it has the fewest bytes, so no more
    than the mean. That is why no part ends with more than the mean and one section.
    """
    shared_from = sum(sizes) / n * SHARED_FROM
    shared = 0
    # A heap of (bytes so far, part): its smallest entry is the part with the fewest bytes. All parts begin equal, in the
    # order of their numbers, which is a heap already.
    load = [(0, part) for part in range(n)]
    for file, size in enumerate(sizes):
        section_sizes = sizes_of_sections(files[file], *block_options)
        numbered: list[tuple[int | None, int]] = [(None, size)]
        if section_sizes is not None:
            numbered = list(enumerate(section_sizes))
        for number, section_size in numbered:
            if section_size > shared_from:
                # The blocks of each shared section begin with another part. Otherwise the first parts would get one
                # block more of every such section.
                yield Section(file, number, section_size, None, shared % n)
                shared += 1
                continue
            bytes_so_far, owner = heapq.heappop(load)
            heapq.heappush(load, (bytes_so_far + section_size, owner))
            yield Section(file, number, section_size, owner)
