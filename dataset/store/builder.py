"""Tokenising a corpus into a token store, whole or in parts, and going on with what was interrupted.

The corpus is cut into *blocks* of documents, each block is encoded, and the results are appended to the files of the
store. One rule makes this safe to kill, to repeat and to share out: **the bytes of a store depend on the corpus, the
tokenizer and the options, and on nothing else.**

1. Where a block begins and ends follows from the content of the files. The results are appended in the order of the
   blocks, whatever process had them and however fast it was.
2. The writer notes from time to time how far the files on the disk are good, and which block was the last one in them.
   The next start asks for the blocks behind that one and appends them to the same files.
3. A large corpus is cut into shards by its content, and each of them is a store (sharded.py). A part (`--shard k/n`)
   consists of some of them; no more has to be done than to list them.
4. Where the shards are too few for that, a part is a store of some of the blocks, with a list of the places at which
   they stand in the corpus. To put parts together is to append their blocks once more, in the order of these places.

So a build that was killed ten times, and one that was made in forty parts, end with the bytes of a single run.
"""

import glob
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.files import remove, replace
from common.notices import announce
from dataset.reading.documents import BLOCK_BYTES, BLOCK_ROWS, Block, LineCounter
from dataset.reading.faults import BadLines
from dataset.reading.remote import DataFile
from dataset.store import dealing
from dataset.store.dealing import Dealing, Place
from dataset.store.encode_worker import BlockEncoder, encode_blocks
from dataset.store.file_digests import Stats, content_stats, stats_of
from dataset.store.format import DamagedStore, TokenStore
from dataset.store.parts import in_document_order
from dataset.store.places import lock
from dataset.store.progress import Progress
from dataset.store.shard_writer import ShardWriter, Writer, shard_name
from dataset.store.sharded import ShardedStore, ShardFolder, Store
from dataset.store.writer import StoreWriter

# Less text than this does not pay for a process.
BYTES_PER_PROCESS = 4 << 20


@dataclass
class Builder:
    """Makes one store, or one part of it, in `place`.

    What is under way lies in the folder `.tmp-{name}` of `place`, which belongs to the process that holds the lock of
    that name. The writer makes it durable from time to time, so a build that is killed goes on where it was. When it is
    complete, one rename gives it its name: a folder with that name is always a whole store.

    For `--shard k/n` each process makes one part: shards of the store, or a store of the blocks that `Dealing` gives to
    part k, with a list of where they belong. Whoever finishes last puts the parts together.
    """

    place: Path
    name: str
    # What is known before the first document is read.
    meta: dict[str, Any]
    files: Sequence[DataFile]
    # Of the files when they were hashed.
    stats: list[Stats]
    encode: BlockEncoder
    num_procs: int | None
    progress: bool

    def whole(self) -> Store:
        """The store: there already, put together out of parts, or tokenised now."""
        with lock(self.place, self.name, self.progress):
            # Another process may have made it while this one waited for the lock. A whole store has at least one
            # document, so `or` never passes over one for being empty.
            return self._open(self.name) or self._assemble() or self._build_whole()

    def shard(self, k: int, n: int) -> Store | None:
        """Make part k of n, from 1. Returns the store if it can be put together then."""
        if not 1 <= k <= n:
            raise DataError(f"shard {k}/{n}: the first number runs from 1 to the second")
        part = self._part(k, n)
        dealt = self._dealing(k, n)
        with lock(self.place, part, self.progress):
            if dealt.by_shards:
                self._build_shards(dealt)
            elif self._open_part(k, n) is None:
                self._build_part(part, dealt)
        # The lock of the part is free again. Of two last parts that finish together, the first one here assembles, and
        # the other one then finds the store.
        with lock(self.place, self.name, self.progress):
            return self._open(self.name) or (self._complete(dealt) if dealt.by_shards else self._assemble())

    def _open(self, name: str) -> Store | None:
        return open_store(self.place / name, self.meta["key"], tell=True)

    def _part(self, k: int, n: int) -> str:
        """The name of a part's folder."""
        return f"{self.name}.part-{k}-of-{n}"

    def _open_part(self, k: int, n: int) -> TokenStore | None:
        """A finished part, read whole: what is put together out of it gets digests of its own."""
        folder = self.place / self._part(k, n)
        if not folder.is_dir():
            return None
        try:
            part = TokenStore(folder)
            if part.fingerprint != self.meta["key"] or part.meta.get("dealing") != self._division():
                raise DamagedStore("it was made by another version")
            part.check_all_files()
            return part
        except (DamagedStore, OSError) as error:
            announce(f"{folder} cannot be used ({error}); --shard {k}/{n} makes it anew")
            return None

    def _division(self) -> list[int]:
        """What decides, beside the data and the tokenizer, which document is in which block of which part.

        Parts, and the beginning and the end of an interrupted build, fit together only where these numbers agree.
        """
        return [dealing.VERSION, BLOCK_BYTES, BLOCK_ROWS]

    def _dealing(self, k: int, n: int) -> Dealing:
        options = (self.encode.text_field, BLOCK_BYTES, self.encode.encoder.blank_line_ends_document)
        return Dealing(self.files, [size for _, size, *_ in self.stats], options, k, n)

    def _build_whole(self) -> Store:
        """Tokenises all blocks into the store, or goes on where that was interrupted."""
        dealt = self._dealing(1, 1)
        with self._writer_of_store(dealt, self._identity()) as writer:
            self._tokenise(dealt, writer)
            self._want_documents(writer)
            return load(writer.commit(self.meta))

    def _build_part(self, part: str, dealt: Dealing) -> None:
        """Tokenises the blocks of a part that is to be put together with others, if there are some."""
        with StoreWriter(self.place, part, self._identity(), keep_blocks=True) as writer:
            self._tokenise(dealt, writer)
            writer.commit({**self.meta, "dealing": self._division()})

    def _build_shards(self, dealt: Dealing) -> None:
        """Tokenises the shards of the store that a part consists of."""
        if self._open(self.name) is None:
            with self._shard_writer(dealt, self._identity()) as writer:
                self._tokenise(dealt, writer)
                writer.finish()

    def _writer_of_store(self, dealt: Dealing, identity: dict[str, Any]) -> Writer:
        """What writes the whole store."""
        if len(dealt.starts) == 1:
            return StoreWriter(self.place, self.name, identity)
        # Of one that has lost a shard the others are kept.
        damaged = self.place / self.name
        if damaged.is_dir():
            replace(damaged, self.place / f".tmp-{self.name}")
        return self._shard_writer(dealt, identity)

    def _shard_writer(self, dealt: Dealing, identity: dict[str, Any]) -> ShardWriter:
        return ShardWriter(self.place, self.name, identity, self.meta, dealt.starts, dealt.shards)

    def _tokenise(self, dealt: Dealing, writer: Writer) -> None:
        """Writes the blocks that were dealt out. What an earlier start made durable is not tokenised again."""
        source_bytes = dealt.source_bytes()
        num_procs = self.num_procs or min(cores(), max(1, source_bytes // BYTES_PER_PROCESS))
        # The other processes could not load the class of this tokenizer.
        if not self.encode.encoder.portable:
            num_procs = 1
        with closing(Progress(self._title(), source_bytes, num_procs, self.progress)) as progress:
            progress.go_on(writer)
            shards = set(writer.left) if isinstance(writer, ShardWriter) else None
            self._encode_into(writer, dealt.blocks(writer.last, shards), num_procs, progress)
            # The name of the store carries the digest of what the files held before. A file that was written to since
            # then may have given other documents, and half of a change is worse than none: nothing of it is kept.
            if content_stats(stats_of(self.files)) != content_stats(self.stats):
                writer.discard()
                raise DataError(f"{self.files[0].parent}: the data changed while it was being tokenised; start again")
            progress.complete = True

    def _complete(self, dealt: Dealing) -> Store | None:
        """The store, if all its shards are complete."""
        folder = self.place / f".tmp-{self.name}"
        for number in range(len(dealt.starts)):
            if not (folder / shard_name(number)).is_dir():
                return None
        with ShardWriter(
            self.place, self.name, self._identity(), self.meta, dealt.starts, range(len(dealt.starts))
        ) as all_of_them:
            # A damaged one is not complete.
            if all_of_them.left:
                return None
            self._want_documents(all_of_them)
            return load(all_of_them.commit(self.meta))

    def _encode_into(
        self,
        writer: Writer,
        placed_blocks: Iterator[tuple[Place, Block]],
        num_procs: int,
        progress: Progress,
    ) -> None:
        """Tokenises the blocks and appends them. Errors: DataError for the first faulty line."""
        # A block is handed to the processes without its place, which waits here. The results come in the order in which
        # the blocks were handed over, so the place of the next result is always the oldest one.
        places: deque[Place] = deque()

        def blocks() -> Iterator[Block]:
            for place, block in placed_blocks:
                places.append(place)
                yield block

        counter = LineCounter()
        with closing(encode_blocks(blocks(), self.encode, num_procs)) as results:
            for block, encoded in results:
                place = places.popleft()
                if encoded.bad.total:
                    faults = writer.faults_at(place)
                    # A process counts lines from the start of its block: it has not seen what comes before.
                    faults.merge(encoded.bad, counter.lines_before(block))
                    if not self.encode.skip_bad_lines:
                        writer.discard()
                        raise faults.first().error()
                writer.add(encoded, place)
                progress.advance(block.source_bytes, writer)

    def _title(self) -> str:
        """What the progress calls the data."""
        name = self.meta["source_name"]
        return f"{name} ({len(self.files):,} files)" if len(self.files) > 1 else name

    def _identity(self) -> dict[str, Any]:
        """What an interrupted build must agree in to be gone on with."""
        return {"key": self.meta["key"], "dealing": self._division()}

    def _assemble(self) -> Store | None:
        """The whole store out of its parts, if some number n of parts is complete."""
        parts = self._complete_parts()
        if not parts:
            return None
        folders = [part.folder for part in parts]
        identity = {**self._identity(), "parts": len(parts)}
        with self._writer_of_store(self._dealing(1, 1), identity) as writer:
            self._copy_blocks(parts, writer)
            self._want_documents(writer)
            # Windows removes no file that is mapped: let go of the parts.
            del parts
            store = load(writer.commit(self.meta))
        # Only now does the whole store have all that they hold. A kill before the last of them is gone leaves some behind,
        # which costs space on the disk and nothing else.
        for folder in folders:
            remove(folder)
        return store

    def _copy_blocks(self, parts: list[TokenStore], writer: Writer) -> None:
        """Append the parts' blocks that the writer does not have yet. No view of a part's files is left afterwards."""
        # Each part kept the first faults that it met. Those of the whole corpus are among them.
        bad_lines = BadLines.in_document_order([part.bad_lines for part in parts], self.files)
        for place, block in in_document_order(parts):
            if writer.last is None or place > writer.last:
                writer.add(block, place)
        writer.keep_faults(bad_lines)

    def _complete_parts(self) -> list[TokenStore]:
        """The parts of a division of which all are there and good; none where there is no such division."""
        # A user may have begun with --shard k/4 and gone over to k/8: parts of several divisions can lie here.
        numbers_of_parts = set()
        for path in self.place.glob(f"{glob.escape(self.name)}.part-*-of-*"):
            numbers_of_parts.add(int(path.name.rsplit("-", 1)[1]))
        for n in numbers_of_parts:
            # Parts are read whole when they are opened. That is not worth while before the last one is there.
            all_there = all((self.place / self._part(k, n)).is_dir() for k in range(1, n + 1))
            if not all_there:
                continue
            parts = [self._open_part(k, n) for k in range(1, n + 1)]
            good = [part for part in parts if part is not None]
            if len(good) == n:
                return good
        return []

    def _want_documents(self, writer: Writer) -> None:
        """Errors: DataError for a corpus without a document. A part of one may well have none."""
        if not writer.documents:
            bad = writer.bad_lines
            writer.discard()
            skipped = f"all {bad.total:,} lines are bad" if bad.total else "the files are empty"
            raise DataError(f"{self.files[0]}: no document in there; {skipped}")


def load(folder: Path) -> Store:
    """The store in a folder. Errors: DamagedStore."""
    return ShardedStore(ShardFolder(folder)) if (folder / "manifest.json").exists() else TokenStore(folder)


def open_store(folder: Path, key: str, tell: bool = False) -> Store | None:
    """The store in the folder; None where there is none or a damaged one, of which it can tell."""
    if not folder.is_dir():
        return None
    try:
        store = load(folder)
        if store.fingerprint != key:
            raise DamagedStore("it belongs to other data")
        return store
    except (DamagedStore, OSError) as error:
        if tell:
            announce(f"{folder} is damaged ({error}); it is made anew")
        return None


def cores() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
