"""Making a token store: its documents are tokenised block by block and appended to its files in their order.

The bytes of a store depend on the corpus, the tokenizer and the options, and on nothing else: where a block ends follows from
the content of the files, and the results are appended in the order of the blocks, whatever process had them. What is under
way lies in a folder of another name, which belongs to the process that holds the lock of that name. One rename makes a store
of it when it is complete and on the disk; a build that was killed begins anew.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import Timeout
from numpy.typing import ArrayLike

from common.errors import DataError
from common.files import remove, sync_folder
from common.locks import file_lock
from common.notices import announce
from dataset.reading.documents import BLOCK_BYTES, Block, LineCounter, split_into_blocks
from dataset.reading.faults import BadLines
from dataset.store.encode_worker import BlockEncoder, EncodedBlock, encode_blocks
from dataset.store.file_digests import Stats, content_stats, stats_of
from dataset.store.format import FILES, DamagedStore, TokenStore, digest_of_json
from dataset.store.progress import Progress

# Less text than this does not pay for a process.
BYTES_PER_PROCESS = 4 << 20
# The name of a store ends in 16 digits of its key.
TEMPORARY_NAME = re.compile(r"\.tmp-.*-[0-9a-f]{16}", re.DOTALL)


def build(
    folder: Path,
    meta: dict[str, Any],
    files: Sequence[Path],
    stats: list[Stats],
    encode: BlockEncoder,
    num_procs: int | None,
    progress: bool,
) -> TokenStore:
    """Tokenise the files into the store `folder`. For the holder of its lock.

    meta: what is known before the first document is read. stats: of the files when they were hashed. Errors: DataError for
    the first faulty line, for a corpus without a document, and where the files change meanwhile.
    """
    name = f"{meta['source_name']} ({len(files):,} files)" if len(files) > 1 else meta["source_name"]
    source_bytes = sum(size for _, size, *_ in stats)
    num_procs = num_procs or min(cores(), max(1, source_bytes // BYTES_PER_PROCESS))
    # The other processes could not load the class of this tokenizer.
    if not encode.encoder.portable:
        num_procs = 1

    def blocks() -> Iterator[Block]:
        for file in files:
            yield from split_into_blocks(file, encode.text_field, BLOCK_BYTES, encode.encoder.blank_line_ends_document)

    with StoreWriter(folder) as writer, closing(Progress(name, source_bytes, num_procs, progress)) as bar:
        counter = LineCounter()
        with closing(encode_blocks(blocks(), encode, num_procs)) as results:
            for block, encoded in results:
                if encoded.bad.total:
                    # A process counts lines from the start of its block: it has not seen what comes before.
                    writer.bad_lines.merge(encoded.bad, counter.lines_before(block))
                    if not encode.skip_bad_lines:
                        raise writer.bad_lines.first().error()
                writer.add(encoded)
                bar.advance(block.source_bytes, writer.documents, writer.tokens)
        # The name of the store carries the digest of what the files held before. A file that was written to since then may
        # have given other documents.
        if content_stats(stats_of(files)) != content_stats(stats):
            raise DataError(f"{files[0].parent}: the data changed while it was being tokenised; start again")
        if not writer.documents:
            bad = writer.bad_lines.total
            skipped = f"all {bad:,} lines are bad" if bad else "the files are empty"
            raise DataError(f"{files[0]}: no document in there; {skipped}")
        store = writer.commit(meta)
        bar.complete = True
    return store


class StoreWriter:
    """Writes the files of a store into a folder beside it, which is gone unless `commit` gives it its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temp = folder.with_name(f".tmp-{folder.name}")
        self.documents = 0
        self.tokens = 0
        self.max_token_id = -1
        self.bad_lines = BadLines()
        if self.temp.is_dir():
            announce(f"{folder}: an earlier start was interrupted before the store was complete; it begins anew")
            remove(self.temp)
        self.temp.mkdir(parents=True)
        self.files: dict[str, BinaryIO] = {}
        for name in FILES:
            self.files[name] = open(self.temp / name, "wb")  # noqa: SIM115 - __exit__ closes it
        self.digests = {name: hashlib.sha256() for name in FILES}
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
        self.max_token_id = max(self.max_token_id, block.max_token_id)

    def _write(self, name: str, values: ArrayLike) -> None:
        """Append an array of numbers to a file and to its digest."""
        numbers = np.ascontiguousarray(values).data
        self.files[name].write(numbers)
        self.digests[name].update(numbers)

    def commit(self, meta: dict[str, Any]) -> TokenStore:
        """Complete meta.json, make all durable and rename.

        First the content of the files is on the disk, then their names in the folder, and then the folder gets its name. So a
        folder of this name is a whole store, whatever happens.
        """
        content = {
            **meta,
            "documents": self.documents,
            "tokens": self.tokens,
            "max_token_id": self.max_token_id,
            "bad_lines": self.bad_lines.to_dict(),
            "sha256": {name: digest.hexdigest() for name, digest in self.digests.items()},
        }
        meta_file = open(self.temp / "meta.json", "wb")  # noqa: SIM115 - __exit__ closes it
        self.files["meta.json"] = meta_file
        meta_file.write(
            json.dumps({**content, "meta_sha256": digest_of_json(content)}, indent=1, sort_keys=True).encode()
        )
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
            # Windows renames no folder that has an open file.
            file.close()
        sync_folder(self.temp)
        # What stands there is damaged: of a good one nobody makes another.
        remove(self.folder)
        os.rename(self.temp, self.folder)
        sync_folder(self.folder.parent)
        return TokenStore(self.folder)

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            # A full disk, which has been told already.
            with contextlib.suppress(OSError):
                file.close()
        remove(self.temp)


def open_store(folder: Path, key: str, tell: bool = False) -> TokenStore | None:
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


@contextlib.contextmanager
def lock(folder: Path, tell: bool = True) -> Iterator[None]:
    """One process at a time makes a store, the others say that they wait. What killed builds of others have left goes.

    tell: false for a process that waits for another one of its own run.
    """
    of_name = file_lock(folder.with_name(f".{folder.name}.lock"))
    try:
        held = of_name.acquire(timeout=1)
    except Timeout:
        if tell:
            announce(f"waiting for another process that makes {folder}")
        held = of_name.acquire()
    with held:
        for temp in folder.parent.glob(".tmp-*"):
            owner = temp.name.removeprefix(".tmp-")
            # The place may be one that other programs use too. Who is at work holds its lock.
            if owner != folder.name and TEMPORARY_NAME.fullmatch(temp.name) and temp.is_dir():
                with contextlib.suppress(Timeout), file_lock(temp.with_name(f".{owner}.lock")).acquire(timeout=0):
                    remove(temp)
        yield


def cores() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
