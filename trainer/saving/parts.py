"""Checkpoints of a run whose ranks have parts of the model (trainer/sharding.py): a folder, into which each rank writes its own.

    pretrain_512_resume/update_00000120/
        __0_0.distcp, __1_0.distcp, ...    the parts of each rank
        parts.pt                           which part of which tensor is where
        run.pt                             all else that a resume needs, and the shapes of the sharded tensors
        SHA256SUMS                         the digest of each of these files, as `sha256sum -c` reads it

torch.distributed.checkpoint (DCP) plans who writes what, and writes it. Its metadata say where each row is, so any number of
ranks can go on. What it does not promise is added here:

1. Everything is written to a folder of another name, made durable, read back by the rank that wrote it, and renamed by rank 0
   when all ranks are done. A folder with its own name is whole.
2. A digest is made from what is written, by the rank that writes it. A resume compares them all before it reads anything
   else (`checkpoint.verified`). DCP itself loads a file with a flipped bit.
3. Nothing that is read can run code. DCP pickles what it knows of the parts, and unpickles objects without a check. Here the
   former goes through torch's restricted unpickler, and parts are tensors alone, read by ourselves.
4. Nothing that is read takes more memory than the run itself: only tensors that it has, of their sizes, from places inside
   the folder's files, uncompressed.
5. Memory for a part is filled with NaN before it is read. So a place that no part of the checkpoint fills is found by the
   check of the numbers.

It takes a second to import, and most runs do without.
"""

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from common.errors import BadContentError, require
from common.files import HashingWriter, file_digest, forget_cached, remove, sync_folder
from common.nested import replaced
from model.weight_files import check_kind, holds_no_more_than_its_size
from trainer.saving.checkpoint import PARTS, RUN, SUMS, is_file_of_parts, is_plain, remove_checkpoint, remove_replaced
from trainer.saving.places import appears
from trainer.saving.weights import torch_errors_of
from trainer.tensor_parts import TensorPart, rows_of_ranks

# How the names of what is sharded begin
WEIGHTS = "model."
MOMENTS = "engine.optimizer."
# Bytes that torch.save adds to the numbers of a tensor, at most; it is some 1,300.
MOST_OVERHEAD = 1 << 16
# All that parts.pt is made of, beside plain containers and what torch allows by itself.
KNOWN: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
]


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
    files = _HashingFiles()
    wrong: BaseException | None = None
    try:
        _write_files(state, temporary, files, group, is_main)
    except CheckpointException as error:
        # All ranks get it, with what went wrong on some of them.
        wrong = next(iter(error.failures.values()))[0]
    except Exception as error:
        # Whatever it is: the other ranks wait for what this one has to say.
        wrong = error
    answers: list[Any] | None = [None] * dist.get_world_size(group) if is_main else None
    dist.gather_object((files.digests, wrong), answers, dst=0, group=group)
    if answers is None:
        return
    try:
        digests: dict[str, str] = {}
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
        strange = sorted(set(filter(is_file_of_parts, os.listdir(temporary))) - digests.keys() - {SUMS})
        if strange:
            raise OSError(errno.EEXIST, "was written by none of the ranks", str(temporary / strange[0]))
        put_in_place(temporary, path)
    except BaseException:
        # The error says more than one of this would; the next start deletes the rest.
        with contextlib.suppress(OSError):
            remove_checkpoint(temporary)
        raise


def _write_files(
    state: dict[str, Any], folder: Path, files: "_HashingFiles", group: dist.ProcessGroup, is_main: bool
) -> None:
    """This rank's part of the work: write, and read back. Errors: OSError; CheckpointException for that of any rank."""
    parts, rest = taken_apart(state)
    dcp.save(parts, storage_writer=_Writer(folder, files), planner=_SavesParts(), process_group=group)
    if is_main:
        files.write(folder / RUN, rest)
    for name, digest in files.digests.items():
        forget_cached(folder / name)
        if file_digest(folder / name) != digest:
            raise OSError(errno.EIO, "reads back differently from what was written", str(folder / name))


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


class _HashingFiles(FileSystem):
    """Files for DCP, whose content is digested while it is written."""

    def __init__(self) -> None:
        # {name of a file: its digest}
        self.digests: dict[str, str] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file for writing. Errors: OSError that names it."""
        assert mode == "wb"
        try:
            with open(path, "wb") as file, torch_errors_of(writer := HashingWriter(file)):
                # It has all that DCP and torch.save ask of a file.
                yield cast(io.IOBase, writer)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        self.digests[Path(path).name] = writer.digest.hexdigest()

    def write(self, path: Path, content: Any) -> None:
        """Write what torch.save takes, so that it survives a power cut."""
        with self.create_stream(path, "wb") as file:
            torch.save(content, cast(IO[bytes], file))
            file.flush()
            os.fsync(file.fileno())


class _Writer(dcp.FileSystemWriter):
    """Writes what DCP has planned: a file for each rank, and PARTS by rank 0."""

    def __init__(self, folder: Path, files: _HashingFiles) -> None:
        super().__init__(folder)
        self.fs = files

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        # What is inherited would pickle it.
        cast(_HashingFiles, self.fs).write(Path(self.path, PARTS), metadata)


class _SavesParts(DefaultSavePlanner):
    """Plans who writes what. A part that several groups of ranks have is written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, part in self.state_dict.items():
            if not len(part.own):
                continue
            chunk = chunk_of(part)
            data = TensorWriteData(chunk, TensorProperties(dtype=part.own.dtype), part.shape)
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        part: TensorPart = self.state_dict[index.fqn]
        return part.own


def chunk_of(part: TensorPart) -> ChunkStorageMetadata:
    """Where in its tensor a part is, as DCP says it."""
    offsets = (part.first_row, *(0 for _ in part.shape[1:]))
    return ChunkStorageMetadata(torch.Size(offsets), part.own.shape)


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

    Of one rank they are whole tensors, else TensorParts. Errors: BadContentError for parts that cannot be read, or numbers
    that cannot be; MemoryError.
    """
    parts: dict[str, TensorPart] = {}

    def room(name: str, tensor: Any) -> Any:
        if not (isinstance(tensor, torch.Tensor) and tensor.is_meta):
            return tensor
        # What is there has been compared with the run's own, so it asks for as much memory as the run itself.
        require(name.startswith((WEIGHTS, MOMENTS)), f"{name} has no numbers")
        require(tensor.dim() > 0 and tensor.is_floating_point(), f"{name} cannot be divided")
        rows = rows_of_ranks(tensor.shape[0], size)
        own = torch.full((rows[rank], *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
        parts[name] = TensorPart(own, sum(rows[:rank]), tensor.shape)
        return own if size == 1 else parts[name]

    try:
        state = replaced(state, room)
    except RecursionError:
        raise BadContentError("it is nested too deep") from None
    read_parts(parts, folder)
    for name, part in parts.items():
        # Moments may be infinite, weights may not.
        numbers_hold = torch.isfinite(part.own) if name.startswith(WEIGHTS) else ~torch.isnan(part.own)
        require(bool(numbers_hold.all()), f"{name} has numbers that are NaN or infinite, or lacks some")
    return state


def read_parts(parts: dict[str, TensorPart], folder: Path) -> None:
    """Fill them, as far as the checkpoint has what they want. Errors: BadContentError, MemoryError."""
    try:
        metadata = read_metadata(folder)
        strange = sorted(metadata.state_dict_metadata.keys() - parts.keys())
        require(not strange, f"it has parts of unknown tensors, {strange[:1]}")
        for name, part in parts.items():
            fill(part, name, metadata, folder)
    except (MemoryError, BadContentError):
        raise
    except Exception as error:
        # What is no metadata raises whatever it likes.
        raise BadContentError(f"its parts cannot be read, {type(error).__name__}") from error


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint says of where its parts are; each place is in a file of the folder. Errors: BadContentError and others."""
    path = folder / PARTS
    check_kind(path)
    with torch.serialization.safe_globals(KNOWN):
        metadata = torch.load(path, weights_only=True)
    sizes: dict[str, int] = {}
    for place in metadata.storage_data.values():
        name = place.relative_path
        if name not in sizes:
            # No file of another place is read.
            require(is_plain(name) and (folder / name).is_file(), "a part is elsewhere")
            sizes[name] = (folder / name).stat().st_size
        is_inside = 0 <= place.offset <= place.offset + place.length <= sizes[name]
        require(is_inside, f"a part is beyond the end of {name}")
        # Names of programs that would unpack it.
        require(not place.transform_descriptors, "a part is packed")
    return metadata


def fill(part: TensorPart, name: str, metadata: Metadata, folder: Path) -> None:
    """Copy the rows of a part from where the metadata say that they are. Errors: BadContentError and others."""
    stored = metadata.state_dict_metadata[name]
    dtype = part.own.dtype
    if not isinstance(stored, TensorStorageMetadata):
        raise BadContentError(f"{name} is no tensor among its parts")
    require(stored.size == part.shape and stored.properties.dtype == dtype, f"{name} is another tensor among its parts")
    # So as much is read as the tensor has, whatever the metadata say.
    require(sum(chunk.sizes[0] for chunk in stored.chunks) == part.shape[0], f"{name} has other rows among its parts")
    end_row = part.first_row + len(part.own)
    for chunk in stored.chunks:
        first = chunk.offsets[0]
        has_rows = (
            chunk.sizes[0] > 0 and first >= 0 and chunk.sizes[1:] == part.shape[1:] and not any(chunk.offsets[1:])
        )
        require(has_rows, f"{name} has a part that is no rows of it")
        begin = max(first, part.first_row)
        end = min(first + chunk.sizes[0], end_row)
        if begin < end:
            rows = tensor_at(metadata.storage_data[MetadataIndex(name, chunk.offsets)], folder, chunk.sizes, dtype)
            part.own[begin - part.first_row : end - part.first_row] = rows[begin - first : end - first]


def tensor_at(place: _StorageInfo, folder: Path, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that a part of a file holds. Errors: BadContentError where it is another one, and others."""
    where = f"{place.relative_path}, byte {place.offset:,}"
    require(place.length <= shape.numel() * dtype.itemsize + MOST_OVERHEAD, f"{where}: too long for a part")
    with open(folder / place.relative_path, "rb") as file:
        file.seek(place.offset)
        content = io.BytesIO(file.read(place.length))
    require(holds_no_more_than_its_size(content), f"{where}: a compressed archive, which torch never writes")
    content.seek(0)
    tensor = torch.load(content, map_location="cpu", weights_only=True)
    is_wanted = isinstance(tensor, torch.Tensor) and tensor.shape == shape and tensor.dtype == dtype
    require(is_wanted and tensor.layout is torch.strided and not tensor.is_meta, f"{where}: another tensor")
    return tensor
