"""Checkpoints to resume from: written whole or not at all, verified when read.

Layout under `--out_dir` for `--save_weight pretrain`, hidden size 512:
    pretrain_512_resume/update_00000120.pt    everything a resume needs (one `state_dict`)
    pretrain_512_resume/update_00000120.pt.sha256   its digest, as `sha256sum -c` reads it
    pretrain_512_resume/update_00000120/      in the place of these two, where ranks have sharded the model: see parts.py

How a save goes on, so that a kill or a loss of power at any moment leaves a run that can be gone on with:

1. The training thread copies the state to the CPU, and goes on training. The rest is done in a thread.
2. The weights are written (`before`), then the checkpoint, each to a file of another name, which is made durable and
   then renamed. A file with its own name is always whole.
3. The digest is renamed before the checkpoint, so that no checkpoint is ever without one. A digest without a
   checkpoint, from a kill between the two, is removed by the next start.
4. The checkpoint is read back and compared with its digest. The system is asked to forget its own copy first, so that
   what is compared comes from the disk. A disk that returns something else ends the save here.
5. Only then older checkpoints are deleted.

A start goes through the checkpoints from the newest to the oldest, and takes the first one whose digest and content
hold. Those that it passed over are named, and never count as one of those to keep.
"""

import contextlib
import dataclasses
import errno
import glob
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import BadContentError, SaidByAnotherRank, UserError
from common.files import (
    HashingWriter,
    atomic_file,
    file_digest,
    forget_cached,
    is_link_of,
    link_or_copy,
    read_small,
    remove,
    remove_if_possible,
    replace,
)
from common.nested import replaced
from model.weight_files import check_kind
from trainer.machine.ranks import ONE_RANK, Ranks, first_said, on_main
from trainer.saving.parts import (
    RUN,
    is_folder_of_parts,
    remove_folder,
    remove_replaced,
    verified_folder,
    write_checkpoint,
)
from trainer.saving.places import RECORDS
from trainer.saving.weights import write_tensors
from trainer.sharding import is_sharded, part_of

# bytes of a digest file: 64 digits and the name of a file
MOST_DIGEST_BYTES = 4096
# The endings of what a run writes beside its stem, the mark of its lock among it
OF_A_RUN = (*RECORDS, "plan.yaml", "pth", "json", "best.pth", "best.json", "running")
# What is left of them behind the stem: with the number of the process that wrote it, or in one word of which nothing else is made.
LEFT_BEHIND = re.compile(rf"(({'|'.join(map(re.escape, OF_A_RUN))})\.\d+|[^.]+)\.tmp")
# What the file of a checkpoint is called, or its folder of parts. Whatever else lies beside them is somebody's own.
CHECKPOINT_NAME = re.compile(r"update_(\d{8}|[1-9]\d{8,})(\.pt)?", re.ASCII)
# What a save, or the attempt to write at a start, leaves half done: with the number of its process, or a random one.
LEFT_OF_A_SAVE = re.compile(r"update_\d+(\.pt(\.sha256)?)?(\.[0-9a-f]+)?\.tmp", re.ASCII)


def remove_temporaries(stem: Path, folder: Path) -> None:
    """Delete what a killed run of this name left half written: beside `stem` and in its checkpoint folder.

    Other names in the same place are left alone; they may belong to a run that is writing them now, such as one whose name
    begins with this one and a dot. What cannot be deleted stays for the next start: a rank of the killed run that is not gone
    yet may still be writing there.
    """
    for start in (f"{stem.name}.", f".{stem.name}."):
        for path in stem.parent.glob(f"{glob.escape(start)}*.tmp"):
            if LEFT_BEHIND.fullmatch(path.name.removeprefix(start)):
                remove_if_possible(path)
    for path in folder.glob("update_*.tmp"):
        if LEFT_OF_A_SAVE.fullmatch(path.name):
            with contextlib.suppress(OSError):
                remove_checkpoint(path)
    # Killed while a folder of parts took the place of one of the same update, see parts.py.
    for before in folder.glob("update_*.before"):
        path = before.with_suffix("")
        if update_of(path) < 0:
            continue
        if path.exists():
            with contextlib.suppress(OSError):
                remove_replaced(before, path)
        else:
            os.replace(before, path)


def remove_checkpoint(path: Path) -> None:
    """Delete the file of a checkpoint, or a folder of parts."""
    if is_folder_of_parts(path):
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def snapshot(value: Any) -> Any:
    """A copy on the CPU that later updates do not change; tied tensors stay one. Of a sharded tensor: this rank's TensorPart.

    The host waits for a GPU once, when all copies are under way: a wait for each of hundreds of tensors takes longer than
    the copies.
    """
    copies: dict[Any, torch.Tensor] = {}
    under_way = False

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal under_way
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        # Empty tensors have no memory that tells them apart.
        if key in copies and tensor.numel():
            return copies[key]
        if is_on_cuda(tensor):
            copies[key] = pinned_like(tensor).copy_(tensor.detach(), non_blocking=True)
            under_way = True
        else:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    def copied(name: str, value: Any) -> Any:
        if is_sharded(value):
            part = part_of(value)
            return dataclasses.replace(part, own=copy_of(part.own))
        return copy_of(value) if isinstance(value, torch.Tensor) else value

    result = replaced(value, copied)
    if under_way:
        # Before this nothing may read a copy, and no later update may begin to change what is copied.
        torch.cuda.synchronize()
    return result


def is_on_cuda(tensor: torch.Tensor) -> bool:
    """Whether a copy of it can be under way while the host goes on. One from MPS is made at once, as one from the CPU."""
    return tensor.is_cuda


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory on the CPU for a copy of a tensor of a GPU, which writes by itself into pinned memory alone.

    Pinning takes longer than copying. torch keeps the pinned memory that nobody uses any more, so that the next save gets
    that of the last one.
    """
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:
        # The system pins no more: a limit of the machine, or memory is short. The host waits for such a copy.
        return torch.empty_like(tensor, device="cpu")


def verified(path: Path, rank: int = 0, world_size: int = 1) -> bool:
    """Whether a checkpoint's bytes are those that its digest file was made from, or its digests, if it is a folder of parts.

    Of a folder, rank `rank` of world_size reads its share of the files: such a folder may be too large for one rank.
    """
    try:
        if is_folder_of_parts(path):
            return verified_folder(path, rank, world_size)
        expected = read_small(f"{path}.sha256", MOST_DIGEST_BYTES).decode().split()[0]
        return path.is_file() and file_digest(path) == expected
    except (OSError, IndexError, UnicodeDecodeError):
        return False


def load_checkpoint(path: str | Path, mapped: bool = False) -> Any:
    """The state dict in a checkpoint; nothing in it can run code. Errors: BadContentError for what torch cannot read.

    mapped: a tensor is read when it is used, and as far as it is used. Of a folder of parts, sharded tensors are on the meta
    device, with their shapes and no content, until `parts.filled` reads them.
    """
    path = Path(path)
    if is_folder_of_parts(path):
        path = path / RUN
    try:
        check_kind(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except MemoryError:
        # The machine's fault, not the file's.
        raise
    except Exception as error:
        # A pickle of something else raises whatever it likes, KeyError and IndexError among it.
        raise BadContentError(f"it cannot be read, {type(error).__name__}") from error


def update_of(path: Path) -> int:
    """The update that a checkpoint is named for; -1 for a name that is none of ours."""
    found = CHECKPOINT_NAME.fullmatch(path.name)
    return int(found[1]) if found else -1


def folder_number(folder: Path) -> int:
    """n of {name}_old{n}, 0 if that is no number."""
    number = folder.name.rpartition("_old")[2]
    return int(number) if number.isdecimal() else 0


class Checkpoints:
    """The checkpoints of one run: saved in a background thread, never two at a time, the newest `keep` are kept."""

    def __init__(self, folder: str | Path, keep: int = 2, group: dist.ProcessGroup | None = None) -> None:
        """group: of the ranks that save together, where they have sharded the model: all of them call `save`."""
        self.folder = Path(folder)
        self.keep = keep
        self.group = group
        self._thread: threading.Thread | None = None
        # What went wrong in the thread, until `wait` raises it.
        self._error: BaseException | None = None
        # Found by newest(); they do not count as kept.
        self._damaged: set[Path] = set()

    def paths(self) -> list[Path]:
        """Existing checkpoints, newest first: files, and folders of parts."""
        ours = [path for path in self.folder.glob("update_*") if update_of(path) >= 0]
        # A folder of parts has no suffix.
        return sorted((path for path in ours if path.suffix or is_folder_of_parts(path)), reverse=True)

    def save(self, state: dict[str, Any], update: int, before: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Copy `state` now and write it in the background; `before(copy)` runs before that in the same thread.

        Waits for the save before this one, whose error (OSError) `wait` has to be asked for first.
        """
        self.wait()
        copy = snapshot(state)
        # A thread begins on the first GPU, which may be another rank's. Writing parts asks for the stream of the current one.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def write() -> None:
            if device is not None:
                torch.cuda.set_device(device)
            # Weights that cannot be written are no reason to lose the checkpoint too.
            try:
                if before is not None:
                    before(copy)
            except BaseException as error:
                self._error = error
            try:
                self._write(copy, update)
            except BaseException as error:
                self._error = error

        # Not a daemon: an interpreter that ends must first finish what it has begun to write.
        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()

    def writing(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until nothing is being written; raise the error of the last save, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def _write(self, state: dict[str, Any], update: int) -> None:
        """Steps 2 to 5 above, without the weights."""
        path = self.folder / f"update_{update:08d}"
        if self.group is None:
            path = path.with_suffix(".pt")
            self._write_file(state, path)
        else:
            write_checkpoint(state, path, self.group)
            if dist.get_rank(self.group) != 0:
                return
        self._damaged.discard(path)
        self._prune(path)

    def _write_file(self, state: dict[str, Any], path: Path) -> None:
        """All of the state in one file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            writer = HashingWriter(file)
            write_tensors(state, writer)
            # The digest first: a checkpoint is never seen without it.
            with atomic_file(f"{path}.sha256") as digest_file:
                digest_file.write(f"{writer.digest.hexdigest()}  {path.name}\n".encode())
        forget_cached(path)
        if not verified(path):
            raise OSError(errno.EIO, "reads back differently from what was written; older ones are kept", str(path))

    def _prune(self, newest: Path) -> None:
        """Delete all but `newest`, which has just been verified, and the `keep` - 1 good ones before it.

        Those with a higher number were damaged when this run resumed from one before them.
        """
        good = [path for path in self.paths() if path <= newest and path not in self._damaged]
        for path in self.paths():
            if path not in good[: self.keep]:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Delete a checkpoint and its digest."""
        if is_folder_of_parts(path):
            # A folder that is half deleted does not keep its name. One of that name may be there, with what is not ours.
            path = path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp"))
        remove_checkpoint(path)
        remove(Path(f"{path}.sha256"))

    def remove_all(self) -> None:
        """Delete the checkpoints, and their folder if there is nothing else in it."""
        for path in self.paths():
            self._remove(path)
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)

    def set_aside(
        self,
        files: Iterable[Path],
        weights: Iterable[Path] = (),
        notice: Callable[[str], None] = print,
        unsaved: Iterable[Path] = (),
    ) -> None:
        """Keep an earlier run when a fresh one takes its place: its checkpoints and other `files` move to a folder.

        One rename moves them, so that a kill at any moment leaves them together, here or there. `weights` (files or
        folders) stay here too until the new ones replace them. `unsaved`: files that are deleted if there is nothing
        else, since their run ended before it had saved anything.
        """
        files = list(files)
        weights = list(weights)
        # An earlier run was brought back, by renaming its folder, and not gone on with: first it goes away again.
        if any((self.folder / path.name).exists() for path in files + weights):
            self._move(notice)
        last = self._asides()[-1:]
        kept = []
        for path in files + weights:
            if not path.exists():
                continue
            # What the last move has linked there is there already.
            if not any(is_link_of(folder / path.name, path) for folder in last):
                kept.append(path)
        if not self.paths() and set(kept) <= set(unsaved):
            for path in kept:
                remove(path)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in kept:
            if path.is_dir():
                shutil.copytree(path, self.folder / path.name, copy_function=link_or_copy)
            else:
                link_or_copy(path, self.folder / path.name)
        self._move(notice)
        for path in kept:
            if path in files:
                remove(path)

    def _move(self, notice: Callable[[str], None]) -> None:
        """Rename the folder to the next free {name}_oldN."""
        numbers = [folder_number(folder) for folder in self._asides()]
        old = self.folder.with_name(f"{self.folder.name}_old{max(numbers, default=0) + 1}")
        hint = "; --from_resume 1 would have gone on with it" if self.paths() else ""
        self.folder.rename(old)
        notice(f"a fresh run: what there is of the one before is now in {old}{hint}")

    def _asides(self) -> list[Path]:
        """The folders that `set_aside` has made, the latest last."""
        found = self.folder.parent.glob(f"{glob.escape(self.folder.name)}_old*")
        return sorted((folder for folder in found if folder_number(folder)), key=folder_number)

    def last_aside(self) -> Path | None:
        """The folder of the last run that was set aside with checkpoints, or None."""
        for folder in reversed(self._asides()):
            if Checkpoints(folder).paths():
                return folder
        return None

    def bring_back(self, patterns: Iterable[str]) -> None:
        """Put what `set_aside` has moved with a run, whose folder was renamed back, where it was.

        patterns: of the names of what it moves. Whatever else is in the folder stays there.
        """
        for pattern in patterns:
            for path in list(self.folder.glob(pattern)):
                replace(path, self.folder.parent / path.name)

    def newest(
        self,
        notice: Callable[[str], None] = print,
        check: Callable[[Any, Path], None] | None = None,
        fill: Callable[[Any, Path], Any] | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> tuple[Any, Path] | None:
        """(state, path) of the newest checkpoint whose digest and content hold, or None where there is none at all.

        All ranks must call it, and get the same one; they see the same folder, each under a path of its own. Those that do not
        hold are named through `notice` and passed over.
        check(state, path): raises BadContentError for a content that cannot be used; rank 0 does it for all.
        fill(state, path): gives the state of a folder of parts its numbers, on each rank those that it needs; errors as those
        of `check`.
        Errors: UserError where some exist and none holds; what `check` raises besides.
        """
        # Names, not paths: machines may have the disk that they share in places of their own.
        names = on_main(ranks, lambda: [path.name for path in self._paths_at_start()])
        paths = [self.folder / name for name in names]
        for path in paths:
            try:
                return self._read(path, check, fill, ranks), path
            except BadContentError as error:
                notice(f"{path}: {error}; passed over")
                self._damaged.add(path)
        if paths and not ranks.is_main:
            # All ranks are here; rank 0 says why.
            raise SaidByAnotherRank
        if paths:
            raise UserError(
                f"{self.folder}: none of its {len(paths)} checkpoints is intact; "
                "delete the folder to start afresh, or begin with the weights that the run has saved (--from_weight, of encoders "
                "--model_path)"
            )
        return None

    def _paths_at_start(self) -> list[Path]:
        """`paths`, when nothing is being written."""
        for digest_file in self.folder.glob("update_*.pt.sha256"):
            checkpoint = digest_file.with_suffix("")
            # Killed between the two renames.
            if update_of(checkpoint) >= 0 and not checkpoint.exists():
                digest_file.unlink(missing_ok=True)
        return self.paths()

    def _read(
        self,
        path: Path,
        check: Callable[[Any, Path], None] | None,
        fill: Callable[[Any, Path], Any] | None,
        ranks: Ranks,
    ) -> Any:
        """The state in a checkpoint. Errors: BadContentError on all ranks for what one of them has found, see `newest`."""
        # A folder has no suffix.
        if path.suffix:
            is_intact = on_main(ranks, lambda: verified(path))
        else:
            is_intact = not first_said(ranks, "" if verified(path, ranks.rank, ranks.world_size) else "damaged")
        if not is_intact:
            raise BadContentError("damaged or without its digest")
        state: Any = None

        def load() -> str:
            """Returns what is wrong, "": nothing."""
            nonlocal state
            try:
                state = load_checkpoint(path)
                if check is not None:
                    check(state, path)
            except BadContentError as error:
                return str(error)
            return ""

        wrong = on_main(ranks, load)
        if not wrong:
            try:
                if not ranks.is_main:
                    # Ranks that shard the model need their parts of a single file alone.
                    state = load_checkpoint(path, mapped=self.group is not None)
                if fill is not None and not path.suffix:
                    state = fill(state, path)
            except BadContentError as error:
                wrong = str(error)
            wrong = first_said(ranks, wrong)
        if wrong:
            raise BadContentError(f"its digest holds, but not its content ({wrong})")
        return state
