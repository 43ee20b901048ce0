"""Checkpoints of a run whose ranks have parts of the model (trainer/parallel.py): a folder, into which each rank writes its own.

    pretrain_512_resume/update_00000120/
        __0_0.distcp, __1_0.distcp, ...    the parts of each rank
        parts.pt                           which part of which tensor is where
        run.pt                             all else that a resume needs, and the shapes of the divided tensors
        SHA256SUMS                         the digest of each of these files, as `sha256sum -c` reads it

torch.distributed.checkpoint (DCP) plans who writes what and, at a resume, who reads what, so any number of ranks can go on.
What it does not promise is added here:

1. Everything is written to a folder of another name, made durable, read back by the rank that wrote it, and renamed by rank 0
   when all ranks are done. A folder with its own name is whole.
2. A digest is made from what is written, by the rank that writes it. A resume compares them all before it reads anything
   else (`checkpoint.verified`). DCP itself loads a file with a flipped bit.
3. Nothing that is read can run code. DCP pickles what it knows of the parts, and unpickles objects without a check. Here the
   former goes through torch's restricted unpickler, and objects are never asked for: the parts are tensors alone.
4. Memory for a part is filled with NaN before it is read. So a place that no part of the checkpoint fills is found by the
   check of the numbers.

It takes a second to import, and most runs do without.
"""

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from common.errors import BadContentError
from common.files import HashingWriter, file_digest, forget_cached, remove, sync_folder
from trainer.parallel import Part, rows_of_ranks
from trainer.saving.checkpoint import PARTS, RUN, SUMS
from trainer.saving.checkpoint_content import require
from trainer.saving.weights import torch_errors_of

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
    temporary = path.with_name(f"{path.name}.tmp")
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
        unseen = sorted(digests.keys() - set(os.listdir(temporary)))
        if unseen:
            reason = "is not there for rank 0: all ranks have to see the same --out_dir"
            raise OSError(errno.ENOENT, reason, str(temporary / unseen[0]))
        lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
        with open(temporary / SUMS, "wb") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(temporary)
        put_in_place(temporary, path)
    except BaseException:
        remove(temporary)
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
    if path.exists():
        remove(before)
        os.replace(path, before)
    os.replace(temporary, path)
    sync_folder(path.parent)
    remove(before)


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

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.rank == 0:
            # Of a save that failed. No rank writes before all have planned.
            remove(Path(self.path))
        return super().prepare_local_plan(plan)

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
        part: Part = self.state_dict[index.fqn]
        return part.own


def chunk_of(part: Part) -> ChunkStorageMetadata:
    """Where in its tensor a part is, as DCP says it."""
    offsets = (part.first_row, *(0 for _ in part.shape[1:]))
    return ChunkStorageMetadata(torch.Size(offsets), part.own.shape)


# ------------------------------------------------------------------------------------------------ reading


def filled(state: Any, folder: Path, rank: int = 0, size: int = 1) -> Any:
    """The state of `checkpoint.load_checkpoint` with the rows that rank `rank` of `size` has in the place of tensors without content.

    Of one rank they are whole tensors, else Parts. Errors: BadContentError for parts that cannot be read, or numbers that
    cannot be; MemoryError.
    """
    parts: dict[str, Part] = {}

    def room(name: str, tensor: Any) -> Any:
        if not (isinstance(tensor, torch.Tensor) and tensor.is_meta):
            return tensor
        require(tensor.dim() > 0 and tensor.is_floating_point(), f"{name} cannot be divided")
        rows = rows_of_ranks(tensor.shape[0], size)
        own = torch.full((rows[rank], *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
        parts[name] = Part(own, sum(rows[:rank]), tensor.shape)
        return own if size == 1 else parts[name]

    try:
        state = replaced(state, room)
    except RecursionError:
        raise BadContentError("it is nested too deep") from None
    read_parts(parts, folder)
    for name, part in parts.items():
        # Moments may be infinite, weights may not.
        numbers_hold = torch.isfinite(part.own) if name.startswith("model.") else ~torch.isnan(part.own)
        require(bool(numbers_hold.all()), f"{name} has numbers that are NaN or infinite, or lacks some")
    return state


def read_parts(parts: dict[str, Part], folder: Path) -> None:
    """Fill them, as far as the checkpoint has what they want. Errors: BadContentError, MemoryError."""
    try:
        with torch.serialization.safe_globals(KNOWN):
            metadata = torch.load(folder / PARTS, weights_only=True)
        names = {path.name for path in folder.iterdir()}
        # No file of another place is read.
        require(all(place.relative_path in names for place in metadata.storage_data.values()), "a part is elsewhere")
        items: list[ReadItem] = []
        for name, part in parts.items():
            # Of tensors, never of objects.
            if len(part.own):
                items += create_read_items_for_chunk_list(name, metadata.state_dict_metadata[name], [chunk_of(part)])
        # The last steps of `dcp.load`, whose first one would unpickle a file.
        reader = dcp.FileSystemReader(folder)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(LoadPlan(items), _IntoParts(parts)).wait()
    except (MemoryError, BadContentError):
        raise
    except Exception as error:
        # What is no metadata raises whatever it likes.
        raise BadContentError(f"its parts cannot be read, {type(error).__name__}") from error


class _IntoParts(DefaultLoadPlanner):
    """Knows the memory into which DCP reads."""

    def __init__(self, parts: dict[str, Part]) -> None:
        super().__init__()
        self.parts = parts

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.parts[index.fqn].own

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # What is inherited unpickles it without a check.
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")


# ------------------------------------------------------------------------------------------------ nests


def replaced(state: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """A nest of dicts and lists with change(name, value) in the place of each value. name: keys and numbers with dots between.

    A value that is in it twice is asked for once, by its first name, so that tied tensors stay one.
    """
    known: dict[int, Any] = {}

    def of(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: of(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
        if isinstance(value, list):
            return [of(item, f"{name}.{number}") for number, item in enumerate(value)]
        if id(value) not in known:
            known[id(value)] = change(name, value)
        return known[id(value)]

    return of(state, name)


def taken_apart(state: dict[str, Any]) -> tuple[dict[str, Part], Any]:
    """({name: Part}, the state with tensors without content, of the whole shapes, in the place of the parts)."""
    parts: dict[str, Part] = {}

    def shape_of(name: str, value: Any) -> Any:
        if not isinstance(value, Part):
            return value
        parts[name] = value
        return torch.empty(value.shape, dtype=value.own.dtype, device="meta")

    return parts, replaced(state, shape_of)
