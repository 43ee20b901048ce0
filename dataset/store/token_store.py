"""A corpus as token ids on disk: tokenised once, memory-mapped ever after.

A store is a folder of plain binary files and a meta.json. Its name carries a digest of the data's content, of the
tokenizer and of the options, so that an edit or another tokenizer never meets an old store. It appears by one rename
when it is complete.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from common.errors import DataError
from common.files import remove
from common.notices import announce
from common.wording import counted
from dataset.reading.documents import BLOCK_BYTES, BLOCK_ROWS, Block, LineCounter
from dataset.reading.faults import BadLines
from dataset.reading.file_kinds import expanded, find_files
from dataset.store import dealing
from dataset.store.dealing import Dealing, Place
from dataset.store.encode_worker import BlockEncoder, EncodedBlock, encode_blocks
from dataset.store.file_digests import content_stats, hash_files, remember_hashes, settled_stats, stats_of
from dataset.store.format import DamagedStore, TokenStore
from dataset.store.writer import StoreWriter, read_progress

FORMAT = 1  # raised when the same input would give another store
ABANDONED_S = 7 * 24 * 3600.0
BYTES_PER_PROCESS = 4 << 20  # less text than this does not pay for a process


def open_or_build(
    data_path: str | list[str],
    encoder,
    cache_dir: str | None = None,
    text_field: str = "text",
    skip_bad_lines: bool = False,
    num_procs: int | None = None,
    progress: bool = True,
    shard: tuple[int, int] | None = None,
    text_suffixes: Sequence[str] | None = None,
) -> TokenStore | None:
    """The store of the files of `data_path` (several: one after the other), tokenised now if it is not there yet.

    The store lies in `.token_store/` beside the data, in the user's cache folder where that is read-only, or in
    `cache_dir`. Of processes that start together one builds and the others wait. num_procs: default all cores.
    shard=(k, n): only part k of n (from 1) is made; the last part to finish puts the store together, and None is
    returned while parts are missing. text_suffixes: as in `find_files`. Raises DataError.
    """
    paths = [data_path] if isinstance(data_path, str | Path) else list(data_path)
    files = [file for path in paths for file in find_files(str(path), text_suffixes)]
    beside = expanded(paths[0]) if expanded(paths[0]).is_dir() else files[0].parent
    places = [expanded(cache_dir)] if cache_dir else [beside / ".token_store", user_cache()]
    if shard is not None:  # the parts share the folder from the start
        places = [_first_writable(places)]
    stats = settled_stats(files, places)
    hashed_at = time.time()
    data, unknown = hash_files(files, stats, places, shard)
    options = [FORMAT, data, encoder.fingerprint, text_field, skip_bad_lines]
    meta = {
        "key": hashlib.sha256(json.dumps(options).encode()).hexdigest(),
        "source_name": _source_name(Path(paths[0])),
        "data": hashlib.sha256(json.dumps(data).encode()).hexdigest(),
        "tokenizer": encoder.fingerprint,
        "text_field": text_field,
        "skip_bad_lines": skip_bad_lines,
        "dtype": "uint16" if encoder.vocab_size <= 1 << 16 else "uint32",
    }
    name = f"{meta['source_name']}-{meta['key'][:16]}"
    store = None
    for place in places:
        if store := _open(place / name, meta["key"]):
            break
    else:
        place = _first_writable(places)
        encode = BlockEncoder(encoder, text_field, skip_bad_lines)
        builder = _Builder(place, name, meta, files, stats, encode, num_procs, progress)
        try:
            store = builder.whole() if shard is None else builder.shard(*shard)
        except OSError as error:
            where, reason = error.filename or place, error.strerror or error
            raise DataError(f"{where}: {reason}; --cache_dir names another folder for the token store") from error
    if unknown:
        remember_hashes(stats, data, place, hashed_at)
    return store


def _source_name(path: Path) -> str:
    """The name of the data as the first part of a folder's name."""
    name = re.sub(r"[^\w.-]+", "_", path.resolve().name).strip("._")
    name = re.sub(r"\.jsonl.*$|\.parquet$|\.txt$", "", name)[:80]
    # Systems limit names in bytes (255), of which a character may take four; what is added takes about fifty.
    return name.encode()[:160].decode(errors="ignore") or "data"


@dataclass
class _Builder:
    """Makes one store, or one part of it, in `place`; `.tmp-*` there belongs to the holder of the lock of its name."""

    place: Path
    name: str
    meta: dict  # what is known before the first document is read
    files: list[Path]
    stats: list[tuple]  # of the files when they were hashed
    encode: BlockEncoder
    num_procs: int | None
    progress: bool

    def whole(self) -> TokenStore:
        with _lock(self.place, self.name):
            return self._open(self.name) or self._assemble() or self._build(self.name)

    def shard(self, k: int, n: int) -> TokenStore | None:
        if not 1 <= k <= n:
            raise DataError(f"shard {k}/{n}: the first number runs from 1 to the second")
        part = self._part(k, n)
        with _lock(self.place, part):
            if self._open_part(k, n) is None:
                self._build(part, k, n)
        with _lock(self.place, self.name):  # of two last parts that finish together, one assembles
            return self._open(self.name) or self._assemble()

    def _open(self, name: str) -> TokenStore | None:
        return _open(self.place / name, self.meta["key"], tell=True)

    def _part(self, k: int, n: int) -> str:
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
        """What decides, beside the data and the tokenizer, which document is in which block of which part."""
        return [dealing.VERSION, BLOCK_BYTES, BLOCK_ROWS]

    def _build(self, target: str, k: int = 1, n: int = 1) -> TokenStore:
        """Tokenises every n-th block, beginning with the k-th, into the folder `target`."""
        options = (self.encode.text_field, BLOCK_BYTES, self.encode.encoder.blank_line_ends_document)
        dealt = Dealing(self.files, [size for _, size, *_ in self.stats], options, k, n)
        source_bytes = dealt.source_bytes()
        num_procs = self.num_procs or min(_cores(), max(1, source_bytes // BYTES_PER_PROCESS))
        if not self.encode.encoder.portable:
            num_procs = 1
        progress = _Progress(self._title(), source_bytes, num_procs, self.progress)
        with (
            StoreWriter(self.place, target, self._identity(), keep_blocks=n > 1) as writer,
            closing(progress),
        ):
            progress.go_on(writer)
            # What an earlier start made durable is not tokenised again.
            self._encode_into(writer, dealt.blocks(after=writer.last), num_procs, progress)
            if content_stats(stats_of(self.files)) != content_stats(self.stats):
                writer.discard()
                raise DataError(f"{self.files[0].parent}: the data changed while it was being tokenised; start again")
            self._want_documents(writer, n)
            progress.complete = True
            part = {"dealing": self._division()} if n > 1 else {}
            return TokenStore(writer.commit({**self.meta, **part}))

    def _encode_into(
        self,
        writer: StoreWriter,
        placed_blocks: Iterator[tuple[Place, Block]],
        num_procs: int,
        progress: "_Progress",
    ) -> None:
        """Tokenises the blocks and appends them. Errors: DataError for the first faulty line."""
        places: deque[Place] = deque()  # of the blocks that are being encoded

        def blocks() -> Iterator[Block]:
            for place, block in placed_blocks:
                places.append(place)
                yield block

        counter = LineCounter()
        with closing(encode_blocks(blocks(), self.encode, num_procs)) as results:
            for block, encoded in results:
                if encoded.bad.total:
                    writer.bad_lines.merge(encoded.bad, counter.lines_before(block))
                    if not self.encode.skip_bad_lines:
                        writer.discard()
                        raise writer.bad_lines.first().error()
                writer.add(encoded, places.popleft())
                progress.advance(block.source_bytes, writer)

    def _title(self) -> str:
        name = self.meta["source_name"]
        return f"{name} ({len(self.files):,} files)" if len(self.files) > 1 else name

    def _identity(self) -> dict:
        """What an interrupted build must agree in to be gone on with."""
        return {"key": self.meta["key"], "dealing": self._division()}

    def _assemble(self) -> TokenStore | None:
        """The whole store out of its parts, if some number n of parts is complete."""
        for n in {
            int(path.name.rsplit("-", 1)[1]) for path in self.place.glob(f"{glob.escape(self.name)}.part-*-of-*")
        }:
            if not all((self.place / self._part(k, n)).is_dir() for k in range(1, n + 1)):
                continue
            parts = [self._open_part(k, n) for k in range(1, n + 1)]
            if None not in parts:
                break
        else:
            return None
        folders = [part.folder for part in parts]
        with StoreWriter(self.place, self.name, {**self._identity(), "parts": len(parts)}) as writer:
            writer.bad_lines = BadLines.in_document_order([part.bad_lines for part in parts], self.files)
            block = None
            for place, block in islice(_in_document_order(parts), writer.blocks, None):
                writer.add(block, place)
            self._want_documents(writer, 1)
            # Windows removes no file that is mapped: let go of the parts, and of the block that views one
            del parts, block
            store = TokenStore(writer.commit(self.meta))
        for folder in folders:
            remove(folder)
        return store

    def _want_documents(self, writer: StoreWriter, parts: int) -> None:
        bad = writer.bad_lines
        if parts == 1 and not writer.documents:
            writer.discard()
            skipped = f"all {bad.total:,} lines are bad" if bad.total else "the files are empty"
            raise DataError(f"{self.files[0]}: no document in there; {skipped}")


def _in_document_order(parts: list[TokenStore]) -> Iterator[tuple[Place, EncodedBlock]]:
    """The blocks of all parts, sorted by their places in the corpus."""
    width = len(Place._fields)
    rows = []  # part, place, documents before it in its part, tokens before, documents, tokens
    for number, part in enumerate(parts):
        table = np.fromfile(part.folder / "blocks.bin", np.int64).reshape(-1, width + 2)
        places = table[:, :width]
        counts = table[:, width:]
        before = np.cumsum(counts, axis=0) - counts
        rows.append(np.column_stack([np.full(len(table), number), places, before, counts]))
    table = np.concatenate(rows)
    place_columns = [table[:, column] for column in range(width, 0, -1)]  # lexsort sorts by the last one first
    for row in table[np.lexsort(place_columns)]:
        number, *place, document, token, documents, tokens = row.tolist()
        part = parts[number]
        chosen = slice(document, document + documents)
        yield (
            Place(*place),
            EncodedBlock(
                tokens=part.tokens[token : token + tokens],
                lengths=np.diff(part.offsets[document : document + documents + 1]),
                text_bytes=part.text_bytes[chosen],
                hashes=part.doc_hash[chosen],
                bad=BadLines(),
                max_token_id=part.max_token_id,
            ),
        )


def _open(folder: Path, key: str, tell: bool = False) -> TokenStore | None:
    """The store in the folder; None where there is none or a damaged one, of which it can tell."""
    if not folder.is_dir():
        return None
    try:
        store = TokenStore(folder)
        if store.fingerprint != key:
            raise DamagedStore("it belongs to other data")
        return store
    except (DamagedStore, OSError) as error:
        if tell:
            announce(f"{folder} is damaged ({error}); it is made anew")
        return None


@contextlib.contextmanager
def _lock(place: Path, name: str):
    """One process at a time works on the name, the others say that they wait. Clears up after killed builds."""
    lock = FileLock(place / f".{name}.lock")
    try:
        held = lock.acquire(timeout=1)
    except Timeout:
        announce(f"waiting for another process that makes {place / name}")
        held = lock.acquire()
    with held:
        for temp in place.glob(".tmp-*"):
            owner = temp.name.removeprefix(".tmp-")
            if owner == name:  # the writer decides whether to go on with it
                continue
            with (
                contextlib.suppress(Timeout),
                FileLock(place / f".{owner}.lock").acquire(timeout=0),
            ):  # nobody works on it
                if _is_abandoned(temp):
                    remove(temp)
        yield


def _is_abandoned(temp: Path) -> bool:
    """Whether nobody will go on with this interrupted build: it kept nothing, or has been lying there for a week."""
    if read_progress(temp) is None:
        return True
    return time.time() - (temp / "progress.json").stat().st_mtime > ABANDONED_S


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minimind" / "token_store"


def _first_writable(places: list[Path]) -> Path:
    for place in places:
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                pass
            if place != places[0]:
                announce(f"{places[0]} cannot be written: the token store goes to {place}")
            return place
    raise DataError(f"{places[0]} cannot be written; --cache_dir names a folder for the token store")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Progress:
    """A bar on a terminal, otherwise one plain line a minute and one at the end."""

    def __init__(self, name: str, total: int, num_procs: int, shown: bool):
        self.name, self.total, self.shown = name, total, shown
        self.start = self.last = time.monotonic()
        self.done, self.state = 0, ""
        self.complete = False
        self.bar = None
        if shown and sys.stderr.isatty():
            self.bar = tqdm(total=total, unit="B", unit_scale=True, desc=f"tokenising {name}", dynamic_ncols=True)
        elif shown:
            announce(f"tokenising {name}: {total / 1e6:.1f} MB, {counted(num_procs, 'process', 'processes')}")

    def go_on(self, writer: StoreWriter) -> None:
        """Say what an interrupted build left."""
        if self.shown and writer.blocks:
            announce(
                f"tokenising {self.name}: going on after {counted(writer.documents, 'document')}, "
                f"{counted(writer.tokens, 'token')} of an interrupted start"
            )

    def advance(self, source_bytes: int, writer: StoreWriter) -> None:
        self.done += source_bytes
        seconds = max(time.monotonic() - self.start, 1e-9)
        self.state = f"{counted(writer.documents, 'document')}, {counted(writer.tokens, 'token')}, {self.done / 1e6 / seconds:.1f} MB/s"
        if self.bar is not None:
            self.bar.update(source_bytes)
            self.bar.set_postfix_str(
                f"{counted(writer.documents, 'document')}, {counted(writer.tokens, 'token')}", refresh=False
            )
        elif self.shown and time.monotonic() - self.last > 60:
            self.last = time.monotonic()
            left = seconds * max(self.total - self.done, 0) / max(self.done, 1)
            announce(f"tokenising {self.name}: {self.state}, {left / 60:.0f} min left")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.shown and self.complete:
            announce(f"tokenised {self.name}: {self.state}, {time.monotonic() - self.start:.1f} s")
