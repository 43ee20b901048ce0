"""Checkpoints to resume from: written atomically, verified when read.

Layout under `--out_dir` for `--save_weight pretrain`, hidden size 512:
    pretrain_512_resume/update_00000120.pt          everything a resume needs (one `state_dict`)
    pretrain_512_resume/update_00000120.pt.sha256   its digest, as `sha256sum -c` reads it

The steps of a save, after each of which a kill or a power loss leaves a run that can be resumed:

1. The training thread copies the state to the CPU, and continues training. Rank 0 gets sharded tensors whole
   (trainer/sharding.py), so any number of ranks can resume. The rest is done in a thread of rank 0.
2. The weights are written (`write_weights`), then the checkpoint, each to a temporary file, which is flushed to disk and then
   renamed. A file with its final name is always complete.
3. The digest is renamed before the checkpoint, so that no checkpoint is ever without one. One without a checkpoint, from a
   kill between the two, means nothing. If an update is saved again, its digest file has lines for both contents until the
   checkpoint is replaced.
4. The checkpoint is read back and compared with its digest, after a request to drop it from the system's cache, so that it
   comes from the disk. If it differs, the save ends here.
5. Only then are older checkpoints deleted. On a full disk all but the newest good one go first, and what failed is tried again.

A resume takes the newest checkpoint whose digest matches. Skipped ones are reported, and do not count towards `--keep_checkpoints`.

torch.distributed.checkpoint would do as much, but its `load` unpickles `.metadata` without a check, which runs any code in
it. These files are read only by torch's restricted unpickler.
"""

import contextlib
import errno
import glob
import itertools
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from common.errors import UserError
from common.files import (
    atomic_file,
    file_digest,
    is_hard_link,
    link_or_copy,
    remove,
    remove_if_possible,
    rename,
    replace,
)
from common.wording import announce
from trainer.saving.weights import save_with_digest

ResultT = TypeVar("ResultT")
# file name of a checkpoint; other files beside it are the user's
CHECKPOINT_NAME = re.compile(r"update_(\d{8}|[1-9]\d{8,})\.pt", re.ASCII)


# ------------------------------------------------------------------------------------------------ files


def verified(path: Path) -> bool:
    """True if a checkpoint matches its recorded digest."""
    try:
        return digest_line(path, file_digest(path)) in recorded_digests(path).splitlines(keepends=True)
    except OSError:
        return False


def recorded_digests(path: Path) -> bytes:
    """The content of a checkpoint's digest file; empty if it cannot be read."""
    try:
        return Path(f"{path}.sha256").read_bytes()
    except OSError:
        return b""


def digest_line(path: Path, digest: str) -> bytes:
    """A line of a checkpoint's digest file."""
    return f"{digest}  {path.name}\n".encode()


def load_checkpoint(path: Path, mapped: bool = False) -> Any:
    """The state dict in a checkpoint, on the CPU; nothing in it can run code.

    mapped: memory-mapped; tensors are read lazily, and only the parts in use.
    """
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


# ------------------------------------------------------------------------------------------------ the checkpoints of a run


def update_of(path: Path) -> int:
    """The update number in a checkpoint's name; -1 for any other name."""
    found = CHECKPOINT_NAME.fullmatch(path.name)
    return int(found[1]) if found else -1


def file_of_resumed_run(stem: Path, name: str) -> Path | None:
    """The file `name` of the run to resume; None: it has none, or no checkpoint, so its data may have been different."""
    path = stem.parent / name
    return path if path.exists() and Checkpoints(f"{stem}_resume").paths() else None


class Checkpoints:
    """The checkpoints of one run: saved in a background thread, one at a time; the newest `keep` stay.

    folder: `{stem}_resume`, beside the other files of the run, `{stem}.*`.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep
        # At exit the interpreter waits for this thread to finish its file.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # the last save, until `wait` has taken its result
        self._last_save: Future[None] | None = None
        # damaged ones found so far, which do not count towards `keep`
        self.damaged: set[Path] = set()

    def paths(self) -> list[Path]:
        """Existing checkpoints, newest first."""
        found = (path for path in self.folder.glob("update_*.pt") if update_of(path) >= 0)
        return sorted(found, key=update_of, reverse=True)

    def start_thread(self) -> None:
        """Start the thread that writes before there is anything to lose. Errors: RuntimeError if the machine has none left."""
        self._writer.submit(int)

    def save(self, state: dict[str, Any], update: int, write_weights: Callable[[], object]) -> None:
        """Write `state` in the background, after `write_weights()` in the same thread. Nothing may change it any more.

        Waits for the previous save, whose error (OSError) it raises unless `wait` has done so.
        """
        self.wait()

        def write() -> None:
            try:
                write_weights()
            except Exception:
                # The checkpoint matters more: weights may take the room of older ones only once it is there.
                self._write(state, update)
                self.with_room(write_weights)
            else:
                self._write(state, update)

        self._last_save = self._writer.submit(write)

    def is_writing(self) -> bool:
        """True while a save is in progress."""
        return self._last_save is not None and not self._last_save.done()

    def wait(self) -> None:
        """Wait for the save in progress, if any. Raises the error of the last save."""
        last_save, self._last_save = self._last_save, None
        if last_save is not None:
            last_save.result()

    def with_room(self, write: Callable[[], ResultT]) -> ResultT:
        """Returns write(), which on a full disk is called again when all checkpoints but the newest good one are deleted."""
        try:
            return write()
        except OSError as error:
            good = [path for path in self.paths() if path not in self.damaged]
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not good:
                raise
            self._prune(good[0], keep=1)
            return write()

    def _write(self, state: dict[str, Any], update: int) -> None:
        """Steps 2 to 5 above, without the weights."""
        path = self.folder / f"update_{update:08d}.pt"
        digest_path = Path(f"{path}.sha256")
        self.folder.mkdir(parents=True, exist_ok=True)
        # of the same update, saved before
        earlier = recorded_digests(path)
        save = partial(save_with_digest, state, path, digest_path, lambda digest: earlier + digest_line(path, digest))
        digest = self.with_room(save)
        if earlier:
            with atomic_file(digest_path) as digest_file:
                digest_file.write(digest_line(path, digest))
        # So that it comes from the disk, not from the page cache; macOS and Windows have no such call.
        if hasattr(os, "posix_fadvise"):
            with open(path, "rb") as file, contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if file_digest(path) != digest:
            self.damaged.add(path)
            raise OSError(errno.EIO, "reads back differently from what was written; older ones are kept", str(path))
        self.damaged.discard(path)
        self._prune(path, self.keep)

    def _prune(self, newest: Path, keep: int) -> None:
        """Delete all but `newest`, which was verified, and the `keep` - 1 good ones before it.

        Those with a higher number were damaged when this run resumed from an earlier one.
        """
        good = [path for path in self.paths() if update_of(path) <= update_of(newest) and path not in self.damaged]
        for path in self.paths():
            if path not in good[:keep]:
                # On Windows another program may have them open, and the next save tries again.
                remove_if_possible(path)
                remove_if_possible(Path(f"{path}.sha256"))

    def remove_leftovers(self) -> None:
        """Delete half-written files of a killed run, in the folder and beside it. No save may be in progress.

        A file that cannot be deleted stays until the next start: a rank of the killed run may still be writing it.
        """
        for path in self.folder.glob("update_[0-9]*.tmp"):
            remove_if_possible(path)
        run = self.folder.name.removesuffix("_resume")
        for start in (f"{run}.", f".{run}."):
            for path in self.folder.parent.glob(f"{glob.escape(start)}*.tmp"):
                # A run a_512.b_512 may be writing its own: every run's name ends with a "_" and its width, and no suffix has one.
                if "_" not in path.name.removeprefix(start):
                    remove_if_possible(path)

    def set_aside(self, files: Iterable[Path], weights: Iterable[Path], unsaved: Iterable[Path]) -> None:
        """Move an earlier run out of the way of a fresh one: its checkpoints and other `files`, into one folder.

        weights (files or folders): linked into that folder, but also left in place until the fresh run, which may start from them,
        replaces them. unsaved: files that are deleted if there is nothing else, since their run ended before its first save.
        """
        earlier = list(self.folder.parent.glob(f"{glob.escape(self.folder.name)}_old*"))
        # Skip what an earlier start has set aside: weights left in place, files that it could not delete before it was killed.
        left = [
            path
            for path in [*files, *weights]
            if path.exists() and not any(is_hard_link(old / path.name, path) for old in earlier)
        ]
        if self.paths() or not set(left) <= set(unsaved):
            self.folder.mkdir(exist_ok=True)
            for path in left:
                link = self.folder / path.name
                # left by a folder that was renamed back, or by a start that was killed here
                if link.exists() and not is_hard_link(link, path):
                    replace(link, link.with_name(f"{link.name}.before"))
                if not link.exists():
                    link_or_copy(path, link)
            numbered = (self.folder.with_name(f"{self.folder.name}_old{number}") for number in itertools.count(1))
            old = next(path for path in numbered if not path.exists())
            # Atomic: a kill before this leaves the run where it was, a kill after it the whole run in the other folder.
            rename(self.folder, old)
            hint = ""
            if Checkpoints(old).paths():
                hint = "; --from_resume 1 would have continued it, and docs/reliability.md says how it still can"
            announce(f"a fresh run: the files of the earlier one are now in {old}, its weights too{hint}")
        for path in files:
            remove(path)

    def newest(self) -> Path | None:
        """The newest intact checkpoint, or None if there are no checkpoints. Damaged ones are reported.

        Errors: UserError if there are some but none is intact.
        """
        paths = self.paths()
        for path in paths:
            if path in self.damaged:
                continue
            if verified(path):
                return path
            announce(f"{path}: damaged or without its digest; skipped")
            self.damaged.add(path)
        if paths:
            raise UserError(
                f"{self.folder}: none of its {len(paths)} checkpoints is intact; start without --from_resume, perhaps "
                "from the weights that the run has saved (--from_weight; encoders: --model_path)"
            )
        return None
