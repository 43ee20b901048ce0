"""How the files of a token store are written: in a folder of another name, which a kill at any moment leaves usable.

Each file only grows at its end. So a build that was interrupted needs no more than one number for each file: how many
bytes of it are good. What lies behind them may be half a block, or be missing after a power cut; it is cut off.

Two kinds of digest guard this. Each file has a running SHA-256 that is fed with every byte written. At a checkpoint it
goes into `progress.json`; the next start reads the good bytes again, compares, and has a digest that it can go on
feeding. At the end it goes into `meta.json`, where every later reader finds it. `progress.json` and `meta.json` carry a
digest of their own content, since a wrong number in them would do as much harm as a wrong token.
"""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from common.files import remove, sync_folder
from dataset.reading.faults import BadLines
from dataset.store.dealing import Place
from dataset.store.encode_worker import EncodedBlock
from dataset.store.format import FILES, MOST_META_BYTES, digest_of_json, read_small_json

# A build that is killed loses at most so much.
CHECKPOINT_S = 10.0


class StoreWriter:
    """Writes a store into `place/.tmp-name`, then renames it to `place/name`. For the holder of the name's lock.

    Every CHECKPOINT_S seconds all that is written is made durable and `progress.json` says how much that is. A build
    that finds such a folder of the same `identity` cuts the files there, compares their SHA-256 and goes on; whatever
    does not agree is thrown away, and the build begins anew.

    Attributes: blocks, documents, tokens: how many are written; bad_lines: the faults of these blocks; last: the place
    in the corpus of the last one, None before the first.
    """

    def __init__(self, place: Path, name: str, identity: dict[str, Any], keep_blocks: bool = False) -> None:
        """identity: what the blocks depend on. keep_blocks: for a part that is to be put together with others."""
        self.place = place
        self.name = name
        self.identity = identity
        self.temp = place / f".tmp-{name}"
        self.file_names = (*FILES, "blocks.bin") if keep_blocks else FILES
        self.files: dict[str, BinaryIO] = {}
        self.digests: dict[str, hashlib._Hash] = {}
        self.blocks = 0
        self.documents = 0
        self.tokens = 0
        self.max_token_id = -1
        self.bad_lines = BadLines()
        self.last: Place | None = None
        if not self._go_on():
            self._begin()
        self._last_checkpoint = time.monotonic()

    def _begin(self) -> None:
        """Empty files. The first offset is that of the first document; each block adds where its documents end."""
        remove(self.temp)
        self.temp.mkdir(parents=True)
        for file_name in self.file_names:
            self.files[file_name] = open(self.temp / file_name, "wb")  # noqa: SIM115 - __exit__ closes it
            self.digests[file_name] = hashlib.sha256()
        self._write("offsets.bin", np.zeros(1, np.int64))

    def _go_on(self) -> bool:
        """Take over what an interrupted build of the same identity left; False where there is nothing sound."""
        progress = read_progress(self.temp)
        if progress is None or progress["identity"] != self.identity or set(progress["files"]) != set(self.file_names):
            return False
        # All files are compared before the first one is touched: a folder is gone on with whole or not at all.
        digests = {}
        for file_name in self.file_names:
            size, expected = progress["files"][file_name]
            digest = _digest_of_beginning(self.temp / file_name, size)
            if digest is None or digest.hexdigest() != expected:
                return False
            digests[file_name] = digest
        for file_name in self.file_names:
            size, _ = progress["files"][file_name]
            file = open(self.temp / file_name, "r+b")  # noqa: SIM115 - __exit__ closes it
            # What was written after the checkpoint. Nobody knows whether all of it reached the disk.
            file.truncate(size)
            file.seek(size)
            self.files[file_name] = file
        self.digests = digests
        self.blocks = progress["blocks"]
        self.documents = progress["documents"]
        self.tokens = progress["tokens"]
        self.max_token_id = progress["max_token_id"]
        self.bad_lines = BadLines.from_dict(progress["bad_lines"])
        self.last = None if progress["last"] is None else Place(*progress["last"])
        return True

    def faults_at(self, place: Place) -> BadLines:
        """Where the faults of the block at that place go."""
        return self.bad_lines

    def keep_faults(self, bad_lines: BadLines) -> None:
        """Of all blocks, where they are known at once."""
        self.bad_lines = bad_lines

    def add(self, block: EncodedBlock, place: Place) -> None:
        """Appends the block that stands at that place of the corpus."""
        ends = self.tokens + np.cumsum(block.lengths, dtype=np.int64)
        self._write("tokens.bin", block.tokens)
        self._write("offsets.bin", ends)
        self._write("text_bytes.bin", block.text_bytes)
        self._write("doc_hash.bin", block.hashes)
        # What a part needs to be put together with the others: the other files do not tell where a block ends.
        if "blocks.bin" in self.files:
            self._write("blocks.bin", np.array([*place, len(block.lengths), len(block.tokens)], np.int64))
        self.last = place
        self.blocks += 1
        self.documents += len(block.lengths)
        self.tokens += len(block.tokens)
        self.max_token_id = max(self.max_token_id, block.max_token_id)
        # Only here, between two blocks, do all files end with the same document.
        if time.monotonic() - self._last_checkpoint >= CHECKPOINT_S:
            self._checkpoint()
            # After it, and not before: to wait for a slow disk must not become all that a build does.
            self._last_checkpoint = time.monotonic()

    def _write(self, file_name: str, values: ArrayLike) -> None:
        """Append an array of numbers to a file and to its digest."""
        # The bytes as they lie in memory, in one piece.
        numbers = np.ascontiguousarray(values).data
        self.files[file_name].write(numbers)
        self.digests[file_name].update(numbers)

    def _checkpoint(self) -> None:
        """Make durable what is written, then say so: progress.json never tells of more than the disk has.

        A power cut may lose the rename of progress.json. Then the one before it is there, which tells of fewer bytes;
        the files have these as well.
        """
        files = {}
        for file_name, file in self.files.items():
            file.flush()
            os.fsync(file.fileno())
            files[file_name] = [file.tell(), self.digests[file_name].hexdigest()]
        progress = {
            "identity": self.identity,
            "files": files,
            "blocks": self.blocks,
            "documents": self.documents,
            "tokens": self.tokens,
            "max_token_id": self.max_token_id,
            "bad_lines": self.bad_lines.to_dict(),
            "last": self.last,
        }
        _write_json(self.temp / "progress.new", {**progress, "sha256": digest_of_json(progress)})
        os.replace(self.temp / "progress.new", self.temp / "progress.json")

    def commit(self, meta: dict[str, Any]) -> Path:
        """Completes meta.json, makes all durable and renames. Returns the folder of the store.

        The order is what makes a folder of this name a whole store: first the content of the files is on the disk, then
        their names in the folder, and then the folder gets its name.
        """
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
            # Windows renames no folder that has an open file.
            file.close()
        digests = {}
        for file_name, digest in self.digests.items():
            digests[file_name] = digest.hexdigest()
        content = {
            **meta,
            "documents": self.documents,
            "tokens": self.tokens,
            "max_token_id": self.max_token_id,
            "bad_lines": self.bad_lines.to_dict(),
            "sha256": digests,
        }
        _write_json(self.temp / "meta.json", {**content, "meta_sha256": digest_of_json(content)})
        # It is no file of a store. If the process is killed between here and the renaming, the build begins anew.
        with contextlib.suppress(FileNotFoundError):
            (self.temp / "progress.json").unlink()
        sync_folder(self.temp)
        return give_name(self.temp, self.place / self.name)

    def discard(self) -> None:
        """Nothing that is written will be of use: the data has a fault, or has changed."""
        with contextlib.suppress(FileNotFoundError):
            (self.temp / "progress.json").unlink()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            # A full disk, which has been told already.
            with contextlib.suppress(OSError):
                file.close()
        # Without it nobody can go on with what lies here. After a commit there is no such folder any more.
        if not (self.temp / "progress.json").exists():
            remove(self.temp)


def give_name(temp: Path, final: Path) -> Path:
    """Make a complete store out of a folder whose content is durable. Returns `final`, which is there after a power cut too."""
    # A damaged store: of a good one of this name nobody makes another.
    remove(final)
    os.rename(temp, final)
    sync_folder(final.parent)
    return final


def read_progress(temp: Path) -> dict[str, Any] | None:
    """What a build says it has made durable in the folder; None where it says nothing sound.

    Sound is what has the right digest and the right kinds of values. Whether the files agree is for `StoreWriter`, which
    reads them.
    """
    progress = read_small_json(temp / "progress.json", MOST_META_BYTES)
    if not isinstance(progress, dict):
        return None
    digest = progress.pop("sha256", None)
    if digest != digest_of_json(progress) or not _is_progress(progress):
        return None
    return progress


def _is_progress(progress: dict[str, Any]) -> bool:
    """Whether the fields are those of this version. `type(...) is int`, since True and False are ints as well."""
    for name in ("blocks", "documents", "tokens", "max_token_id"):
        if type(progress.get(name)) is not int:
            return False
    files = progress.get("files")
    if not isinstance(files, dict):
        return False
    for entry in files.values():
        if not (isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and entry[0] >= 0):
            return False
    # None says that no block is there yet, so a field that is missing must be something else.
    last = progress.get("last", "")
    if last is not None:
        is_place = isinstance(last, list) and len(last) == len(Place._fields)
        if not is_place or not all(type(number) is int for number in last):
            return False
    return isinstance(progress.get("identity"), dict) and BadLines.can_be_read_from(progress.get("bad_lines"))


def _digest_of_beginning(path: Path, size: int) -> "hashlib._Hash | None":
    """The running SHA-256 of the first `size` bytes of a file; None where it has fewer or cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while size:
                chunk = file.read(min(size, 1 << 20))
                if not chunk:
                    return None
                digest.update(chunk)
                size -= len(chunk)
    except OSError:
        return None
    return digest


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, and wait until it is on the disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
