"""Checkpoints of sharded tensors, in a process group of one; tests/faults has the runs. Reference: the tensors themselves."""

import errno
import os
import shutil

import pytest
import torch
import torch.distributed as dist

from tests.faults.harness import seeded_random
from trainer.saving import checkpoint
from trainer.saving.checkpoint import Checkpoints, load_checkpoint, verified
from trainer.sharding import TensorPart, rows_of_ranks


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def state(update):
    """As one rank has it that has all rows. `tied` is `weight`."""
    generator = torch.Generator().manual_seed(update)
    weight, bias = (torch.randn(*shape, generator=generator) for shape in ((7, 3), (5,)))
    whole = {name: TensorPart(tensor, 0, tensor.shape) for name, tensor in (("weight", weight), ("bias", bias))}
    return {"update": update, "model": {**whole, "tied": whole["weight"], "buffer": torch.arange(3)}}


def save(folder, group, update):
    checkpoints = Checkpoints(folder, group=group, n_writers=1)
    checkpoints.save(state(update), update)
    checkpoints.wait()


@pytest.fixture(scope="module")
def saved(group, tmp_path_factory):
    """A folder with checkpoints of the updates 1 and 2."""
    folder = tmp_path_factory.mktemp("parts") / "resume"
    for update in (1, 2):
        save(folder, group, update)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """(folder of checkpoints, files of the newest one), which a test may damage."""
    folder = tmp_path / "resume"
    shutil.copytree(saved, folder)
    files = sorted(folder.glob("update_00000002*"))
    assert [path.suffix for path in files] == [".part", ".pt", ".sha256"]
    return folder, files


def test_what_is_written_is_read(saved):
    """Tied tensors stay one, and what is whole on each rank is as it was."""
    read = load_checkpoint(Checkpoints(saved).newest())
    assert read["update"] == 2 and read["model"]["tied"] is read["model"]["weight"]
    for name, value in state(2)["model"].items():
        assert torch.equal(read["model"][name], value.own if isinstance(value, TensorPart) else value)


@pytest.mark.parametrize("size", [2, 8])
def test_any_number_of_ranks_reads_its_rows(saved, size):
    """Reference: the rows of the whole tensor. Of 8 ranks some have none of 5 or 7 rows."""
    path = saved / "update_00000002.pt"
    of_ranks = [load_checkpoint(path, rank, size)["model"] for rank in range(size)]
    for name in ("weight", "bias", "tied"):
        whole = state(2)["model"][name].own
        got = [of_rank[name] for of_rank in of_ranks]
        assert [len(part.own) for part in got] == rows_of_ranks(len(whole), size)
        assert torch.equal(torch.cat([part.own for part in got]), whole)
        assert all(part.shape == whole.shape for part in got)
        assert [part.first_row for part in got] == [sum(rows_of_ranks(len(whole), size)[:i]) for i in range(size)]


def test_sharded_and_whole_ones_take_turns(group, tmp_path):
    """A run may be sharded, whole and sharded again. Of the same update the one is kept that was saved last."""
    save(tmp_path, group, 1)
    whole = Checkpoints(tmp_path)
    whole.save({"update": 2}, 2)
    whole.wait()
    save(tmp_path, group, 3)
    save(tmp_path, group, 3)
    assert [path.name for path in Checkpoints(tmp_path).paths()] == ["update_00000003.pt", "update_00000002.pt"]
    assert len(os.listdir(tmp_path)) == 5 and all(map(verified, Checkpoints(tmp_path).paths()))
    Checkpoints(tmp_path).remove_all()
    assert not tmp_path.exists()


@pytest.mark.parametrize("number", range(3), ids=["part", "file", "digests"])
def test_damage_is_noticed(copy, number):
    """Flipped bits, and a file that is missing: it is named, and the checkpoint before is taken."""
    folder, files = copy
    path = files[number]
    good = path.read_bytes()
    generator = seeded_random("flipped bits of parts")

    def is_passed_over():
        said = []
        chosen = Checkpoints(folder).newest(said.append)
        return chosen.name == "update_00000001.pt" and len(said) == 1 and str(files[1]) in said[0]

    for _ in range(5):
        damaged = bytearray(good)
        damaged[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        assert is_passed_over()
    path.unlink()
    if path.suffix == ".pt":
        assert Checkpoints(folder).newest().name == "update_00000001.pt"
    else:
        assert is_passed_over()


def test_digests_that_lost_their_end_are_damage(copy):
    """The rows of a part that nobody names would be whatever the memory held."""
    _, (_, path, digests) = copy
    lines = digests.read_text().splitlines(keepends=True)
    assert len(lines) == 2
    for n_left in range(2):
        digests.write_text("".join(lines[:n_left]))
        assert not verified(path)


def test_no_part_is_deleted_where_digests_cannot_be_read(copy, monkeypatch):
    folder, (part, path, _) = copy

    def fail(checkpoint):
        raise OSError(errno.EIO, os.strerror(errno.EIO), f"{checkpoint}.sha256")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "digests_of", fail)
        Checkpoints(folder).remove_leftovers()
    assert part.exists() and verified(path)


def test_ranks_share_the_comparison(copy, monkeypatch):
    """Each file is read by one rank, which alone notices its damage."""
    _, (part, path, _) = copy
    read = []
    file_digest = checkpoint.file_digest
    monkeypatch.setattr(checkpoint, "file_digest", lambda file: read.append(file) or file_digest(file))
    assert all(verified(path, rank, 2) for rank in range(2)) and sorted(read) == [part, path]
    part.write_bytes(part.read_bytes()[:-1])
    assert [verified(path, rank, 2) for rank in range(2)].count(False) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named_and_leaves_nothing(group, copy, monkeypatch):
    folder, _ = copy
    before = sorted(os.listdir(folder))
    write = checkpoint.write_tensors

    def full(content, writer):
        if ".part." in writer.file.name:
            with open("/dev/full", "wb", buffering=0) as writer.file:
                write(content, writer)
        write(content, writer)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_tensors", full)
        with pytest.raises(OSError, match=r"No space left on device.*\.part"):
            save(folder, group, 3)
    assert sorted(os.listdir(folder)) == before
    save(folder, group, 3)
    assert Checkpoints(folder).newest().name == "update_00000003.pt"


def test_a_disk_that_returns_something_else_ends_the_save(group, copy, monkeypatch):
    folder, _ = copy
    before = sorted(os.listdir(folder))
    monkeypatch.setattr(checkpoint, "file_digest", lambda path: "0" * 64)
    with pytest.raises(OSError, match="reads back differently"):
        save(folder, group, 3)
    assert sorted(os.listdir(folder)) == before
