"""Checkpoints of a run whose ranks have parts of the model (trainer/sharding.py): a folder, into which each rank writes its own.

    pretrain_512_resume/update_00000120/
        __0_0.distcp, __1_0.distcp, ...    the parts of each rank, by torch.save
        parts.pt                           which rows of which tensor are in which file
        run.pt                             all else that a resume needs, and the shapes of the sharded tensors
        SHA256SUMS                         the digest of each of these files, as `sha256sum -c` reads it

Everything is written to a folder of another name, made durable, read back by the rank that wrote it, and renamed by rank 0 when
all ranks are done. A folder with its own name is whole. Any number of ranks can go on: each reads the rows that it needs.

torch.distributed.checkpoint would do as much, but its `load` unpickles `.metadata` without a check, which runs whatever code
somebody has put there. These files are read by torch's restricted unpickler alone.
"""

import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import BadContentError, require
from common.files import HashingWriter, file_digest, forget_cached, read_small, remove, sync_folder
from common.nested import replaced
from model.pth_format import check_kind
from trainer.saving.places import appears
from trainer.saving.weights import write_tensors
from trainer.sharding import TensorPart, rows_of_ranks

# the files of a folder beside the parts themselves
SUMS = "SHA256SUMS"
PARTS = "parts.pt"
RUN = "run.pt"
PART_ENDING = ".distcp"
# bytes of SUMS, which has a line for each file
MOST_SUMS_BYTES = 1 << 24
# {name of a tensor: [(file, first row)]}
Places = dict[str, list[tuple[str, int]]]


# --------------------------------------------------------------------------------------- what is in a folder


def is_folder_of_parts(checkpoint: Path) -> bool:
    """Whether a checkpoint is a folder, in which the ranks of a sharded run keep their parts; else it is one file."""
    return checkpoint.is_dir()


def is_file_of_parts(name: str) -> bool:
    """Whether a file of a folder of parts is the run's own. Others, such as notes or those of a file manager, are let be."""
    return name in (SUMS, PARTS, RUN) or name.endswith(PART_ENDING)


def remove_folder(folder: Path) -> None:
    """Delete a folder of parts. One in which somebody else has put something stays with that."""
    for entry in list(folder.iterdir()):
        if is_file_of_parts(entry.name):
            remove(entry)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def remove_replaced(before: Path, path: Path) -> None:
    """Delete a folder of parts that `path` has taken the place of. What somebody else has put into it moves there."""
    for entry in list(before.iterdir()):
        if not is_file_of_parts(entry.name) and not (path / entry.name).exists():
            os.replace(entry, path / entry.name)
    remove(before)


def verified_folder(folder: Path, rank: int, world_size: int) -> bool:
    """Whether a folder has the files that its digests were made from, and no others of parts. Errors: OSError, UnicodeDecodeError.

    The digest of each world_size-th file is compared, beginning with number `rank`.
    """
    expected = {}
    # Split as bytes: in a text other characters end a line too, and one bit makes such a one of a newline.
    for line in read_small(folder / SUMS, MOST_SUMS_BYTES).splitlines():
        digest, _, name = line.decode().partition("  ")
        expected[name] = digest
    found = {path.name for path in folder.iterdir() if is_file_of_parts(path.name)} - {SUMS}
    is_complete = {RUN, PARTS} <= expected.keys() and found <= expected.keys()
    # A machine may have a list of a network folder that lacks what another one has just written.
    is_complete = is_complete and all(is_plain(name) and appears(folder / name) for name in expected.keys() - found)
    share = sorted(expected)[rank::world_size]
    return is_complete and all(
        (folder / name).is_file() and file_digest(folder / name) == expected[name] for name in share
    )


def is_plain(name: str) -> bool:
    """Whether it names a file of a folder itself, and none elsewhere."""
    return name == Path(name).name


# ------------------------------------------------------------------------------------------------ writing


def write_checkpoint(state: dict[str, Any], path: Path, group: dist.ProcessGroup) -> None:
    """Write the parts in the ranks' states, and all else of rank 0's, to the folder `path`. All ranks of `group` must call it.

    group: one that nobody else uses meanwhile. Errors: on rank 0, OSError for what one of the ranks could not write; nothing
    is left then.
    """
    is_main = dist.get_rank(group) == 0
    # A rank of an earlier launch that is not gone yet may still be writing. What it writes is in a folder of another name.
    token = [secrets.token_hex(4)]
    dist.broadcast_object_list(token, src=0, group=group)
    temporary = path.with_name(f"{path.name}.{token[0]}.tmp")
    parts, rest = taken_apart(state)
    first_rows: list[Any] = [None] * dist.get_world_size(group)
    own_rows = {name: part.first_row for name, part in parts.items() if len(part.own)}
    dist.all_gather_object(first_rows, own_rows, group=group)
    places = places_of(first_rows)
    digests: dict[str, str] = {}
    wrong: BaseException | None = None
    try:
        _write_files(parts, temporary, places, rest if is_main else None, dist.get_rank(group), digests)
    except Exception as error:
        # Whatever it is: the other ranks wait for what this one has to say.
        wrong = error
    answers: list[Any] | None = [None] * dist.get_world_size(group) if is_main else None
    dist.gather_object((digests, wrong), answers, dst=0, group=group)
    if answers is None:
        return
    try:
        for of_rank, wrong in answers:
            if wrong is not None:
                raise wrong
            digests.update(of_rank)
        for name in sorted(digests):
            if not appears(temporary / name):
                reason = "is not there for rank 0: all ranks have to see the same --out_dir"
                raise OSError(errno.ENOENT, reason, str(temporary / name))
        lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
        with open(temporary / SUMS, "wb") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(temporary)
        put_in_place(temporary, path)
    except BaseException:
        # The error says more than one of this would; the next start deletes the rest.
        with contextlib.suppress(OSError):
            remove_folder(temporary)
        raise


def file_of(rank: int) -> str:
    """The file of a rank's parts."""
    return f"__{rank}_0{PART_ENDING}"


def places_of(first_rows: list[dict[str, int]]) -> Places:
    """Where the parts go. first_rows: of each rank. A part that several groups of ranks have is written by the first one."""
    places: Places = {}
    for rank, of_rank in enumerate(first_rows):
        for name, first_row in of_rank.items():
            others = places.setdefault(name, [])
            if first_row not in [row for _, row in others]:
                others.append((file_of(rank), first_row))
    return places


def _write_files(
    parts: dict[str, TensorPart], folder: Path, places: Places, rest: Any, rank: int, digests: dict[str, str]
) -> None:
    """Write this rank's files, and read them back. rest: of rank 0. digests: filled. Errors: OSError that names the file."""
    own = {name: part.own for name, part in parts.items() if (file_of(rank), part.first_row) in places.get(name, ())}
    contents: dict[str, Any] = {file_of(rank): own} if own else {}
    if rank == 0:
        contents.update({PARTS: places, RUN: rest})
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path = folder / name
        try:
            with open(path, "wb") as file:
                writer = HashingWriter(file)
                write_tensors(content, writer)
                writer.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        digests[name] = writer.digest.hexdigest()
        forget_cached(path)
        if file_digest(path) != digests[name]:
            raise OSError(errno.EIO, "reads back differently from what was written", str(path))


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a folder that is complete. One that is there already, of the same update, is away only for a moment.

    A kill within this moment leaves it as `{path}.before`, from where `remove_temporaries` brings it back at the next start.
    """
    before = path.with_name(f"{path.name}.before")
    takes_a_place = path.exists()
    if takes_a_place:
        remove(before)
        os.replace(path, before)
    os.replace(temporary, path)
    sync_folder(path.parent)
    if takes_a_place:
        remove_replaced(before, path)


def taken_apart(state: dict[str, Any]) -> tuple[dict[str, TensorPart], Any]:
    """({name: TensorPart}, the state with tensors without content, of the whole shapes, in the place of the parts)."""
    parts: dict[str, TensorPart] = {}

    def shape_of(name: str, value: Any) -> Any:
        if not isinstance(value, TensorPart):
            return value
        parts[name] = value
        return torch.empty(value.shape, dtype=value.own.dtype, device="meta")

    return parts, replaced(state, shape_of)


# ------------------------------------------------------------------------------------------------ reading


def filled(state: Any, folder: Path, rank: int = 0, size: int = 1) -> Any:
    """The state of `checkpoint.load_checkpoint` with the rows that rank `rank` of `size` has in the place of tensors without content.

    Of one rank they are whole tensors, else TensorParts. Errors: BadContentError for parts that cannot be read; MemoryError.
    """
    try:
        places: Places = _load(folder / PARTS)
        names = {name for of_tensor in places.values() for name, _ in of_tensor}
        require(all(map(is_plain, names)), "its parts cannot be read, one is elsewhere")
        files = {name: _load(folder / name) for name in names}

        def rows_for(name: str, tensor: Any) -> Any:
            if not (isinstance(tensor, torch.Tensor) and tensor.is_meta):
                return tensor
            where = places[name]
            rows = rows_of_ranks(tensor.shape[0], size)
            own = torch.empty((rows[rank], *tensor.shape[1:]), dtype=tensor.dtype)
            part = TensorPart(own, sum(rows[:rank]), tensor.shape)
            missing = len(own)
            for file, first in where:
                stored = files[file][name]
                begin = max(first, part.first_row)
                end = min(first + len(stored), part.first_row + len(own))
                if begin < end:
                    own[begin - part.first_row : end - part.first_row] = stored[begin - first : end - first]
                    missing -= end - begin
            require(not missing, f"{name} lacks {missing} rows")
            return own if size == 1 else part

        return replaced(state, rows_for)
    except (MemoryError, BadContentError):
        raise
    except Exception as error:
        # What is no such file raises whatever it likes.
        raise BadContentError(f"its parts cannot be read, {type(error).__name__}") from error


def _load(path: Path) -> Any:
    """What a file of the folder holds; a tensor is read as far as it is used. Errors: BadContentError and others."""
    check_kind(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
