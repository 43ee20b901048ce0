"""Checkpoints to resume from: written whole or not at all, verified when read.

Layout under `--out_dir` for `--save_weight pretrain`, hidden size 512:
    pretrain_512_resume/update_00000120.pt          everything a resume needs (one `state_dict`)
    pretrain_512_resume/update_00000120.pt.sha256   its digest, as `sha256sum -c` reads it
    pretrain_512_resume/update_00000120.1f2e3d4c.0.part, ...   where ranks have sharded the model (trainer/sharding.py): the rows
        of tensors that rank 0, 1, ... has. The .pt then has the shapes of these tensors alone, and the digest file all digests,
        that of the .pt last: a digest file that lost its end has not that one, whatever else it has lost.

How a save goes on, so that a kill or a loss of power at any moment leaves a run that can be gone on with:

1. The training thread copies the state to the CPU, and goes on training. The rest is done in a thread.
2. The weights are written (`before`), then the parts, then the checkpoint, each to a file of another name, which is made
   durable and then renamed. A file with its own name is always whole.
3. The digest is renamed before the checkpoint, so that no checkpoint is ever without one. A digest without a
   checkpoint, from a kill between the two, is removed by the next start, and so are parts that no digest file names.
4. Each file is read back and compared with its digest. The system is asked to forget its own copy first, so that
   what is compared comes from the disk. A disk that returns something else ends the save here.
5. Only then older checkpoints are deleted.

A start takes the newest checkpoint whose digests hold. Those that it passed over are named, and never count as one of those to
keep. Any number of ranks can go on: each reads the rows that it needs.

torch.distributed.checkpoint would do as much, but its `load` unpickles `.metadata` without a check, which runs whatever code
somebody has put there. These files are read by torch's restricted unpickler alone.
"""

import contextlib
import dataclasses
import errno
import glob
import os
import pickle
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import UserError, user_errors
from common.files import (
    HashingWriter,
    atomic_file,
    file_digest,
    forget_cached,
    is_link_of,
    link_or_copy,
    remove,
    remove_if_possible,
    replace,
)
from model.pth_format import check_kind
from trainer.machine.ranks import ONE_RANK, Ranks, end_all, first_said, on_main, until_all_are_ready
from trainer.saving.places import RECORDS
from trainer.saving.weights import write_tensors
from trainer.sharding import TensorPart, is_sharded, part_of, replaced, rows_of_ranks

# The endings of what a run writes beside its stem, the mark of its lock among it
OF_A_RUN = (*RECORDS, "plan.yaml", "pth", "json", "best.pth", "best.json", "running")
# What is left of them behind the stem: with the number of the process that wrote it, or in one word of which nothing else is made.
LEFT_BEHIND = re.compile(rf"(({'|'.join(map(re.escape, OF_A_RUN))})\.\d+|[^.]+)\.tmp")
# The file of a checkpoint, and a part of one. Whatever else lies beside them is somebody's own.
CHECKPOINT_NAME = re.compile(r"update_(\d{8}|[1-9]\d{8,})\.pt", re.ASCII)
PART_NAME = re.compile(r"update_\d+\.[0-9a-f]{8}\.\d+\.part", re.ASCII)
# What a save, or the attempt to write at a start, leaves half done, with the number of its process
LEFT_OF_A_SAVE = re.compile(r"update_\d+(\..+)?\.tmp", re.ASCII)


def remove_temporaries(stem: Path) -> None:
    """Delete what a killed run of this name left half written beside `stem`.

    Other names in the same place are left alone; they may belong to a run that is writing them now, such as one whose name
    begins with this one and a dot. What cannot be deleted stays for the next start: a rank of the killed run that is not gone
    yet may still be writing there.
    """
    for start in (f"{stem.name}.", f".{stem.name}."):
        for path in stem.parent.glob(f"{glob.escape(start)}*.tmp"):
            if LEFT_BEHIND.fullmatch(path.name.removeprefix(start)):
                remove_if_possible(path)


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


# ------------------------------------------------------------------------------------------------ files


def write_file(content: Any, path: Path, parts: Mapping[str, str] | None = None) -> str:
    """Write a file of a checkpoint, and read it back. Returns its SHA-256. Errors: OSError that names it.

    parts: {name: SHA-256} of the parts that belong to the checkpoint; None: the file is a part itself, and has no digest file.
    """
    with atomic_file(path) as file:
        writer = HashingWriter(file)
        write_tensors(content, writer)
        digest = writer.digest.hexdigest()
        if parts is not None:
            # The digests first: a checkpoint is never seen without them.
            with atomic_file(f"{path}.sha256") as digest_file:
                for name, of_file in {**parts, path.name: digest}.items():
                    digest_file.write(f"{of_file}  {name}\n".encode())
    forget_cached(path)
    if file_digest(path) != digest:
        raise OSError(errno.EIO, "reads back differently from what was written; older ones are kept", str(path))
    return digest


def digests_of(checkpoint: Path) -> dict[Path, str]:
    """{file: SHA-256} of a checkpoint and its parts. Errors: OSError, ValueError where the digest file is damaged."""
    digests = {}
    for line in Path(f"{checkpoint}.sha256").read_bytes().decode("ascii").split("\n"):
        digest, _, name = line.partition("  ")
        if line:
            digests[checkpoint.with_name(name)] = digest
    return digests


def verified(path: Path, rank: int = 0, world_size: int = 1) -> bool:
    """Whether a checkpoint's bytes are those that its digests were made from.

    Rank `rank` of world_size reads its share of the parts, which together may be too large for one rank.
    """
    try:
        digests = digests_of(path)
        return path in digests and all(file_digest(file) == digests[file] for file in sorted(digests)[rank::world_size])
    except (OSError, ValueError):
        return False


def load_checkpoint(path: Path, rank: int = 0, size: int = 1, mapped: bool = False) -> Any:
    """The state dict in a checkpoint; nothing in it can run code. Errors: UserError for what torch cannot read.

    Of sharded tensors it has the rows of rank `rank` of `size`, as TensorParts; of one rank they are whole tensors.
    mapped: a tensor of the checkpoint's own file is read when it is used, and as far as it is used.
    """
    state = read_tensors(path, mapped)
    parts = [read_tensors(file, mapped=True) for file in digests_of(path) if file != path]

    def rows_for(name: str, tensor: Any) -> Any:
        if not (isinstance(tensor, torch.Tensor) and tensor.is_meta):
            return tensor
        rows = rows_of_ranks(tensor.shape[0], size)
        own = torch.empty((rows[rank], *tensor.shape[1:]), dtype=tensor.dtype)
        part = TensorPart(own, sum(rows[:rank]), tensor.shape)
        for of_rank in parts:
            first, stored = of_rank[name]
            begin = max(first, part.first_row)
            end = min(first + len(stored), part.first_row + len(own))
            if begin < end:
                own[begin - part.first_row : end - part.first_row] = stored[begin - first : end - first]
        return own if size == 1 else part

    return replaced(state, rows_for) if parts else state


def read_tensors(path: Path, mapped: bool) -> Any:
    """What torch.save has written, on the CPU. Errors: UserError."""
    with user_errors():
        check_kind(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise UserError(f"{path}: it holds Python objects besides tensors, which could run code: delete it") from None


def taken_apart(state: dict[str, Any]) -> tuple[dict[str, tuple[int, torch.Tensor]], Any]:
    """({name: (first row, rows of this rank)}, the state with tensors without content, of the whole shapes, in their place)."""
    parts: dict[str, tuple[int, torch.Tensor]] = {}

    def shape_of(name: str, value: Any) -> Any:
        if not isinstance(value, TensorPart):
            return value
        parts[name] = (value.first_row, value.own)
        return torch.empty(value.shape, dtype=value.own.dtype, device="meta")

    return parts, replaced(state, shape_of)


# ------------------------------------------------------------------------------------------------ the checkpoints of a run


def update_of(path: Path) -> int:
    """The update that a checkpoint is named for; -1 for a name that is none of ours."""
    found = CHECKPOINT_NAME.fullmatch(path.name)
    return int(found[1]) if found else -1


def kept_of_run(stem: Path, name: str) -> Path | None:
    """The file `name` of the run that a resume goes on with; None: it has no such one, or no checkpoint.

    A run whose folder was renamed back has its files among its checkpoints until the resume begins. What stands beside them then
    is that of the later run; without a checkpoint it may be of a run with other data.
    """
    checkpoints = Checkpoints(f"{stem}_resume")
    places = (checkpoints.folder / name, stem.parent / name) if checkpoints.paths() else ()
    return next((path for path in places if path.exists()), None)


class Checkpoints:
    """The checkpoints of one run: saved in a background thread, never two at a time, the newest `keep` are kept."""

    def __init__(
        self, folder: str | Path, keep: int = 2, group: dist.ProcessGroup | None = None, n_writers: int = 0
    ) -> None:
        """group: of the ranks that save together, where they have sharded the model: all of them call `save`. n_writers: how many
        of them have all of the model; others hold the same again."""
        self.folder = Path(folder)
        self.keep = keep
        self.group = group
        self.n_writers = n_writers
        self._thread: threading.Thread | None = None
        # What went wrong in the thread, until `wait` raises it.
        self._error: BaseException | None = None
        # Found by newest(); they do not count as kept.
        self._damaged: set[Path] = set()

    def paths(self) -> list[Path]:
        """Existing checkpoints, newest first."""
        return sorted((path for path in self.folder.glob("update_*.pt") if update_of(path) >= 0), reverse=True)

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
        path = self.folder / f"update_{update:08d}.pt"
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            digests: dict[str, str] = {}
            if self.group is not None:
                state, digests = self._write_parts(state, path)
                if dist.get_rank(self.group) != 0:
                    return
            write_file(state, path, digests)
            self._damaged.discard(path)
            self._prune(path)
        finally:
            if self.group is None or dist.get_rank(self.group) == 0:
                self._remove_unnamed_parts()

    def _write_parts(self, state: dict[str, Any], path: Path) -> tuple[Any, dict[str, str]]:
        """Write the parts of all ranks. Returns what is left of the state, and on rank 0 {name: SHA-256} of the parts.

        Errors: on rank 0, OSError for what one of the ranks could not write.
        """
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        # An update may be saved twice, and a rank of an earlier launch that is not gone yet may still be writing.
        token = [secrets.token_hex(4)]
        dist.broadcast_object_list(token, src=0, group=self.group)
        own, rest = taken_apart(state)
        digests: dict[str, str] = {}
        failure: Exception | None = None
        if rank < self.n_writers:
            part = path.with_suffix(f".{token[0]}.{rank}.part")
            try:
                digests[part.name] = write_file(own, part)
            except Exception as error:
                # Whatever it is: the other ranks wait for what this one has to say.
                failure = error
        answers: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object((digests, failure), answers, dst=0, group=self.group)
        for of_rank, failure in answers or ():
            if failure is not None:
                raise failure
            digests.update(of_rank)
        return rest, digests

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
        remove(path)
        remove(Path(f"{path}.sha256"))

    def _remove_unnamed_parts(self) -> None:
        """Delete the parts that no checkpoint has: of one that was deleted, replaced, or cut off."""
        try:
            named = {file for path in self.paths() for file in digests_of(path)}
        except (OSError, ValueError):
            # They may be those of a digest file that cannot be read now.
            return
        for part in set(self.folder.glob("update_*.part")) - named:
            if PART_NAME.fullmatch(part.name):
                remove_if_possible(part)

    def remove_leftovers(self) -> None:
        """Delete what a killed run has left half written in the folder. Nothing may be being saved."""
        for path in self.folder.glob("update_*.tmp"):
            if LEFT_OF_A_SAVE.fullmatch(path.name):
                remove_if_possible(path)
        for digest_file in self.folder.glob("update_*.pt.sha256"):
            checkpoint = digest_file.with_suffix("")
            # Killed between the two renames.
            if update_of(checkpoint) >= 0 and not checkpoint.exists():
                digest_file.unlink(missing_ok=True)
        self._remove_unnamed_parts()

    def remove_all(self) -> None:
        """Delete the checkpoints, and their folder if there is nothing else in it."""
        for path in self.paths():
            self._remove(path)
        self._remove_unnamed_parts()
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

        One rename ends the move. A kill before it leaves some of them in the folder of the checkpoints, where the next start finds
        them, fresh or not. `weights` (files or folders) stay here too until the new ones replace them. `unsaved`: files that are
        deleted if there is nothing else, since their run ended before it had saved anything.
        """
        files = [path for path in files if path.exists()]
        weights = [path for path in weights if path.exists()]
        # An earlier run was brought back, by renaming its folder, and not gone on with: first it goes away again.
        if any((self.folder / path.name).exists() for path in files + weights):
            self._move(notice)
        asides = self._asides()
        # What the last move has linked there is there already.
        weights = [path for path in weights if not (asides and is_link_of(asides[-1] / path.name, path))]
        if not self.paths() and not weights and set(files) <= set(unsaved):
            for path in files:
                remove(path)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in files:
            os.replace(path, self.folder / path.name)
        for path in weights:
            if path.is_dir():
                shutil.copytree(path, self.folder / path.name, copy_function=link_or_copy)
            else:
                link_or_copy(path, self.folder / path.name)
        self._move(notice)

    def _move(self, notice: Callable[[str], None]) -> None:
        """Rename the folder to the next free {name}_oldN."""
        number = folder_number(self._asides()[-1]) + 1 if self._asides() else 1
        old = self.folder.with_name(f"{self.folder.name}_old{number}")
        hint = "; --from_resume 1 would have gone on with it" if self.paths() else ""
        self.folder.rename(old)
        notice(f"a fresh run: what there is of the one before is now in {old}{hint}")

    def _asides(self) -> list[Path]:
        """The folders that `set_aside` has made, the latest last."""
        found = self.folder.parent.glob(f"{glob.escape(self.folder.name)}_old*")
        return sorted((folder for folder in found if folder_number(folder)), key=folder_number)

    def bring_back(self, patterns: Iterable[str]) -> None:
        """Put what `set_aside` has moved with a run, whose folder was renamed back, where it was.

        patterns: of the names of what it moves. Whatever else is in the folder stays there.
        """
        for pattern in patterns:
            for path in list(self.folder.glob(pattern)):
                replace(path, self.folder.parent / path.name)

    def newest(self, notice: Callable[[str], None] = print, ranks: Ranks = ONE_RANK) -> Path | None:
        """The newest checkpoint whose digests hold, or None where there is none at all. Others are named through `notice`.

        All ranks must call it, and get the same one; they see the same folder, each under a path of its own.
        Errors: UserError where some exist and none holds.
        """
        # Names, not paths: machines may have the disk that they share in places of their own.
        names = on_main(ranks, lambda: [path.name for path in self.paths()])
        for name in names:
            path = self.folder / name
            with until_all_are_ready(ranks):
                is_intact = verified(path, ranks.rank, ranks.world_size)
            if not first_said(ranks, "" if is_intact else "damaged"):
                return path
            notice(f"{path}: damaged or without its digest; passed over")
            self._damaged.add(path)
        if names:
            end_all(
                ranks,
                f"{self.folder}: none of its {len(names)} checkpoints is intact; delete the folder to start afresh, or begin with "
                "the weights that the run has saved (--from_weight, of encoders --model_path)",
            )
        return None


def folder_number(folder: Path) -> int:
    """n of {name}_old{n}, 0 if that is no number."""
    number = folder.name.rpartition("_old")[2]
    return int(number) if number.isdecimal() else 0
