"""A corpus as token ids on disk: tokenised once, memory-mapped ever after.

A store is a folder of plain binary files and a meta.json (format.py). Its name carries a digest of the data's content, of the
tokenizer and of the options, so that an edit or another tokenizer never meets an old store.

Its documents are tokenised block by block and appended to its files in their order. The bytes of a store depend on the corpus,
the tokenizer and the options, and on nothing else: where a block ends follows from the content of the files, and the results
are appended in the order of the blocks, whatever process had them. What is under way lies in a folder that has the name of the
source alone. It belongs to the process that holds the lock of that name, whose first act is to clear away what killed builds of
this source and of others have left. One rename makes a store of it when it is complete and on the disk.

`hashes.json` beside the stores has the SHA-256 of each data file, as long as that does not change: {"files": [[path, size, times
and inode, SHA-256], ...], "sha256": of these}. A wrong digest in it would give the data another identity, so one that is damaged
in any way is ignored, and the files are read again.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypedDict

import numpy as np
from filelock import Timeout
from numpy.typing import ArrayLike

from common.errors import DataError
from common.files import HashingWriter, atomic_file, file_digest, file_lock, remove, sync_folder, user_cache
from common.wording import announce, counted
from dataset.reading.documents import BLOCK_BYTES, split_into_blocks
from dataset.reading.faults import BadLines, pass_over
from dataset.reading.file_kinds import expanded, find_files, is_address, kind_of
from dataset.store.encode_worker import BlockEncoder, EncodedBlock, encode_blocks
from dataset.store.format import FILES, DamagedStore, TokenStore, digest_of_json, read_json
from dataset.tokenizing.encoder import DocumentEncoder

# Raise this number when the same input gives another store, so that no old one is taken for it.
FORMAT = 1
# beyond the coarsest time stamps that a file system gives (2 s)
SETTLED_S = 3.0
# Less text than this does not pay for a process.
BYTES_PER_PROCESS = 16 << 20
# seconds of a build between two lines on how far it is
LINE_EVERY_S = 15
# path, size, time of the last write, time of the last change of any kind (both in ns), inode
Stats = tuple[str, int, int, int, int]


class StoreOptions(TypedDict, total=False):
    """What `open_or_build` may be given beside the data and the encoder."""

    cache_dir: str | None
    text_field: str
    skip_bad_lines: bool
    num_procs: int | None
    progress: bool
    text_suffixes: Sequence[str] | None


def open_or_build(
    data_path: str | Path | list[str],
    encoder: DocumentEncoder,
    *,
    cache_dir: str | None = None,
    text_field: str = "text",
    skip_bad_lines: bool = False,
    num_procs: int | None = None,
    progress: bool = True,
    text_suffixes: Sequence[str] | None = None,
) -> TokenStore:
    """The store of the files of `data_path` (several: one after the other), tokenised now if it is not there yet.

    The store lies in `.token_store/` beside the data, in the user's cache folder where that is read-only, or in
    `cache_dir`; that of data behind addresses in one of the latter two. Of processes that start together one builds and
    the others wait. num_procs: default all cores. text_suffixes: as in `find_files`.

    Errors: DataError for the first faulty line, for a corpus without a document, where the files change meanwhile, and where the
    store cannot be written.
    """
    paths = [str(data_path)] if isinstance(data_path, str | Path) else list(data_path)
    files = files_of(paths, text_suffixes, cache_dir)
    places = places_of(paths[0], files[0], cache_dir)
    try:
        stats = stats_of(files)
        hashed_at = time.time()
        known = {tuple(stat): digest for place in places for *stat, digest in read_hashes(place)}
        hashed = {stat: file_digest(Path(stat[0])) for stat in stats if stat not in known}
        digests = known | hashed
        data = []
        for file, stat in zip(files, stats, strict=True):
            kind = kind_of(file)
            data.append((kind.suffix + kind.compression, digests[stat]))
    except OSError as error:
        raise DataError(f"{error.filename or paths[0]}: {error.strerror or error}") from error
    key = hashlib.sha256(
        json.dumps([FORMAT, data, encoder.fingerprint, text_field, skip_bad_lines]).encode()
    ).hexdigest()
    source = _source_name(Path(paths[0]))
    name = f"{source}-{key[:16]}"
    store = next(filter(None, (open_store(place / name) for place in places)), None)
    if store is None:
        meta: dict[str, Any] = {
            "key": key,
            "source_name": source,
            "data": hashlib.sha256(json.dumps(data).encode()).hexdigest(),
            "tokenizer": encoder.fingerprint,
            "text_field": text_field,
            "skip_bad_lines": skip_bad_lines,
            "dtype": "uint16" if encoder.vocab_size <= 1 << 16 else "uint32",
        }
        place = first_writable(places)
        try:
            with _turn_to_build(place, source, progress) as temporary:
                # Another process may have made it while this one waited.
                store = open_store(place / name, tell=True)
                if store is None:
                    with StoreWriter(place / name, temporary) as writer:
                        encode = BlockEncoder(encoder, text_field, skip_bad_lines)
                        _tokenise(writer, source, files, stats, encode, num_procs, progress)
                        store = writer.commit(meta)
        except OSError as error:
            raise DataError(
                f"{error.filename or place}: {error.strerror or error}; --cache_dir names another folder for the token store"
            ) from error
    if hashed:
        renewed = {stat[0] for stat in hashed}
        entries = [entry for entry in read_hashes(store.folder.parent) if entry[0] not in renewed]
        for (path, size, modified, changed, inode), digest in hashed.items():
            # POSIX's change time cannot be set by hand; Windows' is the time of creation. Of a file that was touched just before
            # it was read one more write could keep the time stamp: such a file is read again at the next start.
            if (modified if os.name == "nt" else changed) / 1e9 < hashed_at - SETTLED_S:
                entries.append([path, size, modified, changed, inode, digest])
        with contextlib.suppress(OSError), atomic_file(store.folder.parent / "hashes.json") as out:
            out.write(json.dumps({"files": entries, "sha256": digest_of_json(entries)}).encode())
    return store


def read_hashes(place: Path) -> list[list[Any]]:
    """The entries of a hashes.json: [path, size, times and inode of a file, its SHA-256]; none where it is damaged."""
    content = read_json(place / "hashes.json")
    if not isinstance(content, dict) or content.get("sha256") != digest_of_json(content.get("files")):
        return []
    entries: list[list[Any]] = content["files"]
    return entries


@contextlib.contextmanager
def _turn_to_build(place: Path, source: str, progress: bool) -> Iterator[Path]:
    """The folder for a store of a source under way, while no other process makes one. Errors: OSError."""
    # The place may be one that other programs use too, such as the home.
    temporary = place / f".{source}.store-under-way"
    lock = file_lock(temporary.with_suffix(".store-lock"))
    try:
        held = lock.acquire(timeout=1)
    except Timeout:
        # progress: not for a process that waits for another one of its own run.
        if progress:
            announce(f"waiting for another process that makes a store of {place / source}")
        held = lock.acquire()
    with held:
        for left in place.glob(".*.store-under-way"):
            # Who is at work holds the lock of its source.
            if left != temporary:
                with contextlib.suppress(Timeout), file_lock(left.with_suffix(".store-lock")).acquire(timeout=0):
                    remove(left)
        yield temporary


def _tokenise(
    writer: "StoreWriter",
    source: str,
    files: list[Path],
    stats: list[Stats],
    encode: BlockEncoder,
    num_procs: int | None,
    progress: bool,
) -> None:
    """Write the documents of the files. Errors: DataError, OSError."""
    name = f"{source} ({len(files):,} files)" if len(files) > 1 else source
    source_bytes = sum(size for _, size, *_ in stats)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_procs = num_procs or min(cores, max(1, source_bytes // BYTES_PER_PROCESS))
    if progress:
        announce(f"tokenising {name}: {source_bytes / 1e6:.1f} MB, {counted(num_procs, 'process', 'processes')}")
    begin = last_line = time.monotonic()
    done = 0
    state = ""
    ends_at_blank_line = encode.encoder.blank_line_ends_document
    blocks = chain.from_iterable(
        split_into_blocks(file, encode.text_field, BLOCK_BYTES, ends_at_blank_line) for file in files
    )
    with closing(encode_blocks(blocks, encode, num_procs)) as results:
        for block in results:
            for fault in block.faults:
                pass_over(fault, writer.bad_lines if encode.skip_bad_lines else None)
            writer.add(block)
            done += block.source_bytes
            now = time.monotonic()
            rate = done / max(now - begin, 1e-9)
            so_far = f"{counted(writer.documents, 'document')}, {counted(writer.tokens, 'token')}"
            state = f"{so_far}, {rate / 1e6:.1f} MB/s"
            if progress and now - last_line > LINE_EVERY_S:
                last_line = now
                minutes_left = max(source_bytes - done, 0) / max(rate, 1) / 60
                announce(f"tokenising {name}: {state}, {minutes_left:.0f} min left")
    # The name of the store carries the digest of what the files held before. A file that was written to since then may
    # have given other documents. A chmod or a new link leaves the first three alone.
    if [stat[:3] for stat in stats_of(files)] != [stat[:3] for stat in stats]:
        raise DataError(f"{files[0].parent}: the data changed while it was being tokenised; start again")
    if not writer.documents:
        bad = writer.bad_lines.total
        reason = f"all {bad:,} lines are bad" if bad else "the files are empty"
        raise DataError(f"{files[0]}: no document in there; {reason}")
    if progress:
        announce(f"tokenised {name}: {state}, {time.monotonic() - begin:.1f} s")


def files_of(paths: list[str], text_suffixes: Sequence[str] | None, cache_dir: str | None) -> list[Path]:
    """The files of some paths, in the order of the store that they make; see `find_files`. Errors: DataError."""
    files: list[Path] = []
    for path in paths:
        files += find_files(path, text_suffixes, cache_dir)
    return files


def places_of(path: str, first_file: Path, cache_dir: str | None) -> list[Path]:
    """The folders in which the store may lie, the best one first."""
    if cache_dir:
        return [expanded(cache_dir)]
    of_user = user_cache() / "token_store"
    if is_address(path):
        return [of_user]
    folder = expanded(path) if expanded(path).is_dir() else first_file.parent
    return [folder / ".token_store", of_user]


def _source_name(path: Path) -> str:
    """The name of the data as the first part of a folder's name."""
    name = re.sub(r"[^\w.-]+", "_", path.resolve().name).strip("._")
    name = re.sub(r"\.jsonl.*$|\.parquet$|\.txt$", "", name)[:80]
    # Systems limit names in bytes (255), of which a character may take four; what is added takes about fifty.
    return name.encode()[:160].decode(errors="ignore") or "data"


# ------------------------------------------------------------------------------------------ making a store


def stats_of(files: Sequence[Path]) -> list[Stats]:
    """What changes when a file does, as far as the file system tells."""
    stats = []
    for file in files:
        stat = file.stat()
        stats.append((str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return stats


class StoreWriter:
    """Writes the files of a store into the folder `temporary`, which is gone unless `commit` gives it the name `folder`."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder = folder
        self.temp = temporary
        self.documents = 0
        self.tokens = 0
        self.bad_lines = BadLines()
        if self.temp.is_dir():
            announce(f"{folder}: an earlier start was interrupted before its store was complete; it begins anew")
            remove(self.temp)
        self.temp.mkdir(parents=True)
        self.files: dict[str, HashingWriter] = {}
        for name in (*FILES, "meta.json"):
            self.files[name] = HashingWriter(open(self.temp / name, "wb"))  # noqa: SIM115 - __exit__ closes it
        # The first offset is that of the first document; each block adds where its documents end.
        self._write("offsets.bin", np.zeros(1, np.int64))

    def add(self, block: EncodedBlock) -> None:
        """Append a block."""
        self._write("tokens.bin", block.tokens)
        self._write("offsets.bin", self.tokens + np.cumsum(block.lengths, dtype=np.int64))
        self._write("text_bytes.bin", block.text_bytes)
        self._write("doc_hash.bin", block.hashes)
        self.documents += len(block.lengths)
        self.tokens += len(block.tokens)

    def _write(self, name: str, values: ArrayLike) -> None:
        """Append an array of numbers to a file and to its digest."""
        self.files[name].write(np.ascontiguousarray(values).data)

    def commit(self, meta: dict[str, Any]) -> TokenStore:
        """Complete meta.json, make all durable and rename.

        First the content of the files is on the disk, then their names in the folder, and then the folder gets its name. So a
        folder of this name is a whole store, whatever happens.
        """
        content = {
            **meta,
            "documents": self.documents,
            "tokens": self.tokens,
            "bad_lines": asdict(self.bad_lines),
            "sha256": {name: self.files[name].digest.hexdigest() for name in FILES},
        }
        whole = {**content, "meta_sha256": digest_of_json(content)}
        self.files["meta.json"].write(json.dumps(whole, indent=1, sort_keys=True).encode())
        for writer in self.files.values():
            writer.flush()
            os.fsync(writer.file.fileno())
            # Windows renames no folder that has an open file.
            writer.file.close()
        sync_folder(self.temp)
        # What stands there is damaged: of a good one nobody makes another.
        remove(self.folder)
        os.rename(self.temp, self.folder)
        sync_folder(self.folder.parent)
        return TokenStore(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.files.values():
            # A full disk, which has been told already.
            with contextlib.suppress(OSError):
                writer.file.close()
        remove(self.temp)


def open_store(folder: Path, tell: bool = False) -> TokenStore | None:
    """The store in the folder; None where there is none or a damaged one, of which it can tell."""
    if not folder.is_dir():
        return None
    try:
        return TokenStore(folder)
    except (DamagedStore, OSError) as error:
        if tell:
            announce(f"{folder} is damaged ({error}); it is made anew")
        return None


def first_writable(places: list[Path]) -> Path:
    """The first of some folders that files can be made in. Errors: DataError where there is none."""
    for place in places:
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                pass
            if place != places[0]:
                announce(f"{places[0]} cannot be written: the token store goes to {place}")
            return place
    raise DataError(f"{places[0]} cannot be written; --cache_dir names a folder for the token store")
