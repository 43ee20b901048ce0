"""A corpus as token ids on disk: tokenised once, memory-mapped from then on.

A store is a folder of plain binary files and a meta.json (token_store.py). Its name has a digest of the data's content, the
tokenizer and the options, so that an old store is never used after an edit or with another tokenizer.

Documents are tokenised block by block and appended in order. The bytes of a store depend on the corpus, the tokenizer
and the options only: block boundaries follow from the content of the files, and results are appended in block order,
whichever process made them. An unfinished store is in a folder named after the source alone, of the process that holds
the lock of that name. A rename makes it a store once it is complete and on disk.

`hashes.json` beside the stores caches the SHA-256 of each unchanged data file. A wrong digest in it would give the data
another identity, so it has a digest of its own.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from filelock import Timeout
from numpy.typing import ArrayLike

from common.errors import DataError, user_errors
from common.files import (
    HashingWriter,
    atomic_file,
    atomic_folder,
    digest_of_json,
    file_digest,
    file_lock,
    remove,
    sync_folder,
    try_to_write,
    user_cache,
)
from common.processes import WorkerDied, Workers, usable_cores
from common.wording import announce, counted
from dataset.reading.bad_lines import BadLines, Fault
from dataset.reading.conversations import CONVERSATION, Notes, add_notes, report_of
from dataset.reading.documents import BLOCK_BYTES, Block, plain_texts, split_into_blocks
from dataset.reading.faults import BadLine, skip_or_raise
from dataset.reading.file_kinds import choose_files, expand_user, kind_of
from dataset.reading.settings import DEFAULTS, TextSettings
from dataset.store.token_store import FILES, TokenStore, read_json
from dataset.tokenizing.encoder import MANY_CHARACTERS, DocumentEncoder, TooLongToEncode
from dataset.tokenizing.tokenizer_files import SAMPLE, lost_text

# Raise this number when the same input gives another store, so that old ones are not reused.
FORMAT = 1
# The same for the reading of chats
CHAT_VERSION = 3
# longer than the coarsest time stamps of a file system (2 s)
TIMESTAMP_MARGIN_S = 3.0
# minimum bytes of data files per process, if there are several
BYTES_PER_PROCESS = 16 << 20
# seconds between progress lines of a build
PROGRESS_INTERVAL_S = 15
# an array.array
Numbers = Any
# path, size, time of the last write, time of the last change of any kind (both in ns), inode
Stats = tuple[str, int, int, int, int]
# what is made of a text, and opened
Made = TypeVar("Made")


class DataFiles:
    """The files of some paths, their digests, and the folders where what is made of them may be kept.

    notices: lines on files that are left out. stats, digests: of each file. size: bytes of all. Errors: DataError; UserError for a file
    that cannot be read.
    """

    def __init__(self, paths: Sequence[str], reading: TextSettings, progress: bool) -> None:
        """progress: print lines."""
        self.progress = progress
        # Folders are walked once.
        choices = [choose_files(path, reading.text_suffixes) for path in paths]
        self.files = [file for chosen, _ in choices for file in chosen]
        self.notices = [line for _, lines in choices for line in lines]
        named = expand_user(paths[0].removeprefix("file://"))
        beside = (named if named.is_dir() else self.files[0].parent) / ".token_store"
        # best first
        self.folders = [expand_user(reading.cache_dir)] if reading.cache_dir else [beside, user_cache() / "token_store"]
        self.hashed_at = time.time()
        with user_errors():
            self.stats = stats_of(self.files)
            known = {tuple(stat): digest for folder in self.folders for *stat, digest in read_hashes(folder)}
            self.hashed = {stat: file_digest(Path(stat[0])) for stat in self.stats if stat not in known}
        digests = known | self.hashed
        self.digests = [digests[stat] for stat in self.stats]
        self.size = sum(size for _, size, *_ in self.stats)

    def open_or_make(
        self, name: str, source: str, open_folder: Callable[[Path], Made | None], make: Callable[[Path], None]
    ) -> Made:
        """What `open_folder` makes of the folder `name`; None: it is missing or damaged, and `make` fills a new one.

        Of processes that start together one makes it and the others wait. source: what they make by turns. Errors: DataError.
        """
        opened = next(filter(None, (open_folder(folder / name) for folder in self.folders)), None)
        if opened is None:
            folder = first_writable(self.folders)
            with locked_build_folder(folder, source, self.progress) as temporary:
                # Another process may have made it while this one waited.
                opened = open_folder(folder / name)
                if opened is None:
                    if (folder / name).is_dir():
                        announce(f"{folder / name} is damaged; it is rebuilt")
                    with atomic_folder(folder / name, temporary):
                        make(temporary)
                    sync_folder(folder)
                    opened = open_folder(folder / name)
        assert opened is not None
        if self.hashed:
            self._keep_hashes(next(folder for folder in self.folders if (folder / name).is_dir()))
        return opened

    def _keep_hashes(self, folder: Path) -> None:
        """Add new digests to the hashes.json of a folder, if it can be written."""
        entries = {entry[0]: entry for entry in read_hashes(folder)}
        for stat, digest in self.hashed.items():
            path, _, modified, changed, _ = stat
            # POSIX's change time cannot be set by hand; Windows' is the creation time. A file touched just before it
            # was read could be written again within one time stamp: it is hashed again at the next start.
            if (modified if os.name == "nt" else changed) / 1e9 < self.hashed_at - TIMESTAMP_MARGIN_S:
                entries[path] = [*stat, digest]
        listed = list(entries.values())
        with contextlib.suppress(OSError), atomic_file(folder / "hashes.json") as out:
            out.write(json.dumps({"files": listed, "sha256": digest_of_json(listed)}).encode())


def open_or_build(
    data_path: str | Path | list[str],
    encoder: DocumentEncoder,
    reading: TextSettings = DEFAULTS,
    *,
    num_procs: int | None = None,
    progress: bool = True,
) -> TokenStore:
    """The store of the files of `data_path` (several are concatenated), tokenised now if it does not exist.

    The store is in `.token_store/` beside the data, in the user's cache folder if that is read-only, or in `reading.cache_dir`.
    num_procs: default up to all cores.

    Errors: DataError for the first faulty line, a corpus without documents, files that change meanwhile, and a store
    that cannot be written; UserError for a file that cannot be read.
    """
    paths = [str(data_path)] if isinstance(data_path, str | Path) else list(data_path)
    data = DataFiles(paths, reading, progress)
    text_field, skip_bad_lines, split_text = reading.text_field, reading.skip_bad_lines, reading.split_text
    with user_errors():
        kinds = [kind_of(file) for file in data.files]
    contents = [(kind.suffix + kind.compression, digest) for kind, digest in zip(kinds, data.digests, strict=True)]
    # Only if it changes what is read: other stores keep their names.
    split = [split_text] if split_text and any(kind.is_text for kind in kinds) else []
    key = digest_of_json([FORMAT, contents, encoder.fingerprint, text_field, skip_bad_lines, *split])
    if text_field == CONVERSATION:
        key = digest_of_json([key, CHAT_VERSION])
    source = _source_name(Path(paths[0]))

    def make(folder: Path) -> None:
        # Before hours of tokenising
        texts = list(plain_texts(data.files, text_field, skip_bad_lines, split_text or encoder.document_end, SAMPLE))
        losses = lost_text(texts, encoder.round_trip, f"{paths[0]}: {encoder.name}")
        if encoder.fast or data.size > MANY_CHARACTERS:
            encoder.use_fastokens(texts)
        with contextlib.ExitStack() as open_files:
            writer = StoreWriter(folder, open_files)
            _tokenise(writer, source, data, encoder, reading, num_procs)
            notes = [f"{source}: {note}" for note in report_of(writer.notes)]
            notes += losses if encoder.should_keep_text else []
            dtype = "uint16" if encoder.vocab_size <= 1 << 16 else "uint32"
            writer.finish({"key": key, "source_name": source, "dtype": dtype, "notes": notes})

    store = data.open_or_make(f"{source}-{key[:16]}", source, open_store, make)
    store.files = data.files
    store.cache_folders = data.folders
    store.notices += data.notices
    return store


def read_hashes(folder: Path) -> list[list[Any]]:
    """The entries of a hashes.json: [path, size, times and inode of a file, its SHA-256]; none if it is damaged."""
    content: Any = read_json(folder / "hashes.json")
    if not isinstance(content, dict) or content.get("sha256") != digest_of_json(content.get("files")):
        return []
    return list(content["files"])


@contextlib.contextmanager
def locked_build_folder(folder: Path, source: str, progress: bool) -> Iterator[Path]:
    """The folder of a source's unfinished store, while no other process builds one. Errors: DataError, also for an OSError within.

    source: the name of a data file, or of its tokenizers.
    """
    # An unmistakable name: other programs may use this folder too, such as the home directory.
    temporary = folder / f".{source}.store-under-way"
    lock = file_lock(temporary.with_suffix(".store-lock"))
    try:
        try:
            held = lock.acquire(timeout=1)
        except Timeout:
            # No message from ranks that wait for another rank of their own run.
            if progress:
                announce(f"waiting for another process that builds {folder / source}")
            held = lock.acquire()
        with held:
            for left in folder.glob(".*.store-under-way"):
                # A build in progress holds the lock of its source.
                if left != temporary:
                    with contextlib.suppress(Timeout), file_lock(left.with_suffix(".store-lock")).acquire(timeout=0):
                        remove(left)
            yield temporary
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        raise DataError(f"{reason}; --cache_dir names another folder for what is made of the text") from error


def _tokenise(
    writer: "StoreWriter",
    source: str,
    data: DataFiles,
    encoder: DocumentEncoder,
    reading: TextSettings,
    num_procs: int | None,
) -> None:
    """Write the documents of the files. Errors: DataError, OSError."""
    name = f"{source} ({len(data.files):,} files)" if len(data.files) > 1 else source
    source_bytes = data.size
    # Without fork each process imports torch again, 0.3 GB.
    most_procs = usable_cores() if sys.platform == "linux" else min(usable_cores(), 4)
    num_procs = num_procs or min(most_procs, max(1, source_bytes // BYTES_PER_PROCESS))
    if data.progress:
        announce(f"tokenising {name}: {source_bytes / 1e6:.1f} MB, {counted(num_procs, 'process', 'processes')}")
    begin = last_line = time.monotonic()
    done = 0
    state = ""
    document_end = reading.split_text or encoder.document_end
    blocks = (split_into_blocks(file, reading.text_field, BLOCK_BYTES, document_end) for file in data.files)
    encode = partial(encode_block, encoder, reading)
    with closing(encode_blocks(chain.from_iterable(blocks), encode, num_procs)) as results:
        for block in results:
            for fault in block.faults:
                skip_or_raise(fault, writer.bad_lines if reading.skip_bad_lines else None)
            writer.add(block)
            done += block.source_bytes
            now = time.monotonic()
            rate = done / max(now - begin, 1e-9)
            so_far = f"{counted(writer.documents, 'document')}, {counted(writer.tokens, 'token')}"
            state = f"{so_far}, {rate / 1e6:.1f} MB/s"
            if data.progress and now - last_line > PROGRESS_INTERVAL_S:
                last_line = now
                minutes_left = max(source_bytes - done, 0) / max(rate, 1) / 60
                announce(f"tokenising {name}: {state}, {minutes_left:.0f} min left")
    # The name of the store has the digest of the earlier content. A file written to since then may have given other
    # documents. A chmod or a new link leaves the first three values alone.
    if [stat[:3] for stat in stats_of(data.files)] != [stat[:3] for stat in data.stats]:
        raise DataError(f"{data.files[0].parent}: the data changed while it was being tokenised; start again")
    if not writer.documents:
        bad = writer.bad_lines.total
        reason = "; ".join(["the files have no text", *report_of(writer.notes)])
        if bad:
            first = next(iter(writer.bad_lines.places.values()))[0]
            reason = f"all {bad:,} lines are bad; line {first.line}: {first.reason}"
        raise DataError(f"{data.files[0]}: no document in there; {reason}")
    if data.progress:
        announce(f"tokenised {name}: {state}, {time.monotonic() - begin:.1f} s")


def _source_name(path: Path) -> str:
    name = re.sub(r"[^\w.-]+", "_", path.resolve().name).strip("._")
    name = re.sub(r"\.jsonl.*$|\.parquet$|\.txt$", "", name)[:80]
    # File systems limit names to 255 bytes, a character may take four, and the suffixes take about fifty.
    return name.encode()[:160].decode(errors="ignore") or "data"


# ------------------------------------------------------------------------------------------ text to ids


class EncodedBlock(NamedTuple):
    """The documents of a block, one after the other."""

    tokens: Numbers  # uint16 or uint32
    lengths: Numbers  # int64: tokens of each document
    text_bytes: Numbers  # uint32: UTF-8 bytes of each document
    hashes: Numbers  # uint64: hash of each document's text
    copy_hashes: Numbers  # uint64: hash of each, whatever its line ends and outer blanks are
    faults: list[Fault]
    notes: Notes  # what is to be said of lines of chats
    source_bytes: int  # bytes of the data file that this block took, for progress


def encode_block(encoder: DocumentEncoder, reading: TextSettings, block: Block) -> EncodedBlock:
    """Encodes the documents of a block, in a thread of its own."""
    # fastokens caches up to 200 MB of words for each thread: they go with it.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_encode, encoder, reading, block).result()


def _encode(encoder: DocumentEncoder, reading: TextSettings, block: Block) -> EncodedBlock:
    tokens = array("H" if encoder.vocab_size <= 1 << 16 else "I")
    out = EncodedBlock(tokens, array("q"), array("I"), array("Q"), array("Q"), [], block.notes, block.source_bytes)
    for line, text in block.documents(reading.text_field):
        before = len(out.tokens)
        if isinstance(text, str):
            try:
                for ids in encoder.encode_in_parts(text):
                    out.tokens.frombytes(ids.astype(tokens.typecode).tobytes())
            except TooLongToEncode as error:
                del out.tokens[before:]
                text = BadLine("too long", str(error))
        if isinstance(text, BadLine):
            out.faults.append(Fault(str(block.path), line, *text.args))
            if not reading.skip_bad_lines:
                # The caller raises it: the rest of the block is not needed.
                break
        elif len(out.tokens) > before:
            # A text without tokens, from a tokenizer without BOS and EOS, is no document.
            body = encoder.body(text)
            raw = body.encode()
            out.lengths.append(len(out.tokens) - before)
            out.text_bytes.append(len(raw))
            out.hashes.append(hash_of_text(raw))
            out.copy_hashes.append(copy_hash_of(body))
    return out


def hash_of_text(raw: bytes) -> int:
    """A 64-bit hash. raw: the text in UTF-8, without its BOS and EOS strings, if any."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def copy_hash_of(text: str) -> int:
    """A hash of a text, whatever its line ends and outer blanks are."""
    return hash_of_text(text.replace("\r\n", "\n").replace("\r", "\n").strip().encode())


def encode_blocks(
    blocks: Iterator[Block], encode: Callable[[Block], EncodedBlock], num_procs: int
) -> Generator[EncodedBlock, None, None]:
    """Yields the encoded blocks in order. num_procs=1: no process is started."""
    if num_procs == 1:
        yield from map(encode, blocks)
        return
    try:
        with closing(Workers(num_procs, encode)) as workers:
            # Two blocks per process in flight, so that none waits for the caller.
            yield from workers.results(blocks, ahead=2 * num_procs)
    except WorkerDied as lost:
        raise DataError(
            f"the tokeniser's {lost}; let it use fewer cores (on Linux: taskset), and put the code of a script of your own below "
            "`if __name__ == '__main__':`"
        ) from None


# ------------------------------------------------------------------------------------------ making a store


def stats_of(files: Sequence[Path]) -> list[Stats]:
    """Values that change when a file does, as far as the file system shows."""
    stats = []
    for file in files:
        stat = file.stat()
        stats.append((str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return stats


class StoreWriter:
    """Writes the files of a store into a new folder; `open_files` closes them."""

    def __init__(self, folder: Path, open_files: contextlib.ExitStack) -> None:
        self.folder = folder
        self.documents = 0
        self.tokens = 0
        self.bad_lines = BadLines()
        self.notes: Notes = Counter()
        folder.mkdir(parents=True)
        self.files: dict[str, HashingWriter] = {}
        for name in (*FILES, "meta.json"):
            self.files[name] = HashingWriter(open_files.enter_context((folder / name).open("wb")))
        # The first document starts at 0; each block adds the ends of its documents.
        self._write("offsets.bin", np.zeros(1, np.int64))

    def add(self, block: EncodedBlock) -> None:
        """Append a block."""
        self._write("tokens.bin", block.tokens)
        self._write("offsets.bin", self.tokens + np.cumsum(block.lengths, dtype=np.int64))
        self._write("text_bytes.bin", block.text_bytes)
        self._write("doc_hash.bin", block.hashes)
        self._write("copy_hash.bin", block.copy_hashes)
        add_notes(self.notes, block.notes)
        self.documents += len(block.lengths)
        self.tokens += len(block.tokens)

    def _write(self, name: str, values: ArrayLike) -> None:
        self.files[name].write(np.ascontiguousarray(values).data)

    def finish(self, meta: dict[str, Any]) -> None:
        """Write meta.json, and sync the content of the files and then their names in the folder to disk. So once the
        folder is renamed, it is a complete store."""
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
        sync_folder(self.folder)


def open_store(folder: Path) -> TokenStore | None:
    """The store in the folder; None if it is missing or damaged."""
    with contextlib.suppress(ValueError, OSError):
        return TokenStore(folder)
    return None


def first_writable(folders: list[Path]) -> Path:
    """The first writable folder. Errors: DataError if there is none."""
    for folder in folders:
        # NotImplementedError: a file system without locks, such as a mounted bucket; only one process may build a store.
        with contextlib.suppress(OSError, NotImplementedError):
            folder.mkdir(parents=True, exist_ok=True)
            try_to_write(folder / ".probe", in_folder=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".probe.") as probe, file_lock(Path(probe) / "lock"):
                pass
            if folder != folders[0]:
                announce(f"{folders[0]} cannot be written to, renamed in or locked: using {folder}")
            return folder
    raise DataError(f"{folders[0]} cannot be written to, renamed in or locked; --cache_dir names one for the store")
