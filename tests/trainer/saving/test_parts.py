"""Checkpoints of parts, in a process group of one; tests/faults has the runs. References: the tensors themselves, sha256sum."""

import hashlib
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.errors import BadContentError
from tests.faults.harness import seeded_random
from tests.faults.test_damage import Payload, malicious
from trainer.saving import parts as parts_module
from trainer.saving import places
from trainer.saving.checkpoint import Checkpoints, load_checkpoint, remove_temporaries, verified
from trainer.saving.parts import PARTS, RUN, SUMS, filled
from trainer.sharding import TensorPart, rows_of_ranks

FIRST_FILE = "__0_0.distcp"


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def state(update):
    """As one rank has it that has all rows. `tied` is `weight`."""
    generator = torch.Generator().manual_seed(update)
    weight, bias, moment = (torch.randn(*shape, generator=generator) for shape in ((7, 3), (5,), (7, 3)))
    whole = {name: TensorPart(tensor, 0, tensor.shape) for name, tensor in (("weight", weight), ("bias", bias))}
    moments = [{"step": torch.tensor(float(update)), "exp_avg": TensorPart(moment, 0, moment.shape)}]
    return {
        "update": update,
        "model": {**whole, "tied": whole["weight"], "buffer": torch.arange(3)},
        "engine": {"optimizer": {"state": moments}},
    }


def written(state):
    """The tensors of a state, TensorParts as what they hold."""
    model = {name: value.own if isinstance(value, TensorPart) else value for name, value in state["model"].items()}
    (moments,) = state["engine"]["optimizer"]["state"]
    return {**model, "exp_avg": moments["exp_avg"].own, "step": moments["step"]}


def found(state):
    (moments,) = state["engine"]["optimizer"]["state"]
    return {**state["model"], **moments}


def save(checkpoints, update):
    checkpoints.save(state(update), update)
    checkpoints.wait()


@pytest.fixture(scope="module")
def saved(group, tmp_path_factory):
    """A folder with checkpoints of the updates 1 and 2."""
    folder = tmp_path_factory.mktemp("parts") / "resume"
    checkpoints = Checkpoints(folder, group=group)
    for update in (1, 2):
        save(checkpoints, update)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """(folder of checkpoints, path of the newest one), which a test may damage."""
    folder = tmp_path / "resume"
    shutil.copytree(saved, folder)
    return folder, folder / "update_00000002"


def renew_digests(path):
    """As somebody would who wants a changed file to be taken for ours."""
    names = sorted(set(os.listdir(path)) - {SUMS})
    lines = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (path / SUMS).write_text("".join(lines))


# ------------------------------------------------------------------------------------------------ good ones


def test_what_is_written_is_read(saved):
    """Tied tensors stay one, and what is whole on each rank is as it was."""
    newest, path = Checkpoints(saved).newest()
    assert path.name == "update_00000002" and newest["update"] == 2 and newest["model"]["weight"].is_meta
    read = found(filled(newest, path))
    for name, tensor in written(state(2)).items():
        assert torch.equal(read[name], tensor)
    assert read["tied"] is read["weight"]


@pytest.mark.parametrize("size", [2, 8])
def test_any_number_of_ranks_reads_its_rows(saved, size):
    """Reference: the rows of the whole tensor. Of 8 ranks some have none of 5 or 7 rows."""
    path = saved / "update_00000002"
    of_ranks = [found(filled(load_checkpoint(path), path, rank, size)) for rank in range(size)]
    for name, tensor in written(state(2)).items():
        if name in ("buffer", "step"):
            continue
        got = [of_rank[name] for of_rank in of_ranks]
        assert [len(part.own) for part in got] == rows_of_ranks(len(tensor), size)
        assert torch.equal(torch.cat([part.own for part in got]), tensor)
        assert all(part.shape == tensor.shape for part in got)
        assert [part.first_row for part in got] == [sum(rows_of_ranks(len(tensor), size)[:i]) for i in range(size)]


def test_files_and_folders_take_turns(group, tmp_path):
    """A run may be sharded, whole and sharded again. Of the same update the one is kept that was saved last."""
    save(Checkpoints(tmp_path, group=group), 1)
    whole = Checkpoints(tmp_path)
    whole.save({"update": 2}, 2)
    whole.wait()
    save(Checkpoints(tmp_path, group=group), 3)
    assert [path.name for path in Checkpoints(tmp_path).paths()] == ["update_00000003", "update_00000002.pt"]
    save(Checkpoints(tmp_path, keep=1, group=group), 3)
    assert os.listdir(tmp_path) == ["update_00000003"]


def test_an_update_that_is_saved_again_is_never_away(group, copy, monkeypatch):
    """Cut off between the two renames, the first one is brought back by the next start."""
    folder, path = copy
    replace, calls = os.replace, []

    def fails_at_the_second(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(parts_module.os, "replace", fails_at_the_second)
    checkpoints = Checkpoints(folder, group=group)
    checkpoints.save(state(2), 2)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.wait()
    monkeypatch.undo()
    assert not path.exists()
    remove_temporaries(folder.parent / "run", folder)
    assert sorted(os.listdir(folder)) == ["update_00000001", "update_00000002"] and verified(path)
    save(Checkpoints(folder, group=group), 2)
    assert sorted(os.listdir(folder)) == ["update_00000001", "update_00000002"] and verified(path)


# ------------------------------------------------------------------------------------------------ damage


def is_passed_over(folder, path):
    """Whether the damage is noticed and named, and the checkpoint before is taken."""
    said = []
    _, chosen = Checkpoints(folder).newest(said.append)
    return chosen.name == "update_00000001" and len(said) == 1 and str(path) in said[0]


def test_flipped_bits_are_noticed(copy):
    folder, path = copy
    generator = seeded_random("flipped bits of parts")
    for name in (FIRST_FILE, PARTS, RUN, SUMS):
        good = (path / name).read_bytes()
        for _ in range(5):
            damaged = bytearray(good)
            damaged[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
            (path / name).write_bytes(damaged)
            assert is_passed_over(folder, path)
        (path / name).write_bytes(good)
    assert verified(path)


@pytest.fixture
def no_wait(monkeypatch):
    """A file that is not there is not waited for."""
    monkeypatch.setattr(places, "SEEN_WITHIN_S", 0.0)


@pytest.mark.parametrize("name", [FIRST_FILE, PARTS, RUN, SUMS])
def test_missing_files_are_noticed(copy, no_wait, name):
    folder, path = copy
    (path / name).unlink()
    assert is_passed_over(folder, path)
    # Nor do digests without the file help.
    if name != SUMS:
        renew_digests(path)
        assert name == FIRST_FILE or is_passed_over(folder, path)
        if name == FIRST_FILE:
            with pytest.raises(BadContentError, match="its parts cannot be read"):
                filled(load_checkpoint(path), path)


def test_ranks_share_the_comparison(copy, monkeypatch, no_wait):
    """Each file is read by one rank, which alone notices its damage; what is missing is noticed by all."""
    _, path = copy
    read_by = {}

    def verdicts():
        return [verified(path, rank, 2) for rank in range(2)]

    def counted(file):
        read_by[file.name] = read_by.get(file.name, 0) + 1
        return file_digest(file)

    file_digest = parts_module.file_digest
    monkeypatch.setattr(parts_module, "file_digest", counted)
    assert all(verdicts())
    assert read_by == dict.fromkeys((FIRST_FILE, PARTS, RUN), 1)
    for name in (FIRST_FILE, PARTS, RUN):
        good = (path / name).read_bytes()
        (path / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert verdicts().count(False) == 1
        (path / name).write_bytes(good)
    (path / FIRST_FILE).unlink()
    assert not any(verdicts())


def test_a_file_that_is_seen_late_is_waited_for(group, copy, monkeypatch):
    """Another machine has written it. By a save, and by a resume."""
    folder, _ = copy
    late = {FIRST_FILE: 2}
    exists = Path.exists

    def seen(path, **options):
        late[path.name] = late.get(path.name, 0) - 1
        return late[path.name] < 0 and exists(path, **options)

    monkeypatch.setattr(Path, "exists", seen)
    save(Checkpoints(folder, group=group), 3)
    assert late[FIRST_FILE] < 0
    assert verified(folder / "update_00000003")


# ------------------------------------------------------------------------- hostile content, with digests that hold


def read(path):
    """What a resume reads of a checkpoint whose digests hold."""
    renew_digests(path)
    assert verified(path)
    return filled(load_checkpoint(path), path)


@pytest.mark.parametrize("name", [FIRST_FILE, PARTS, RUN])
@pytest.mark.parametrize("form", ["zip", "pickle"])
def test_a_payload_is_never_run(copy, tmp_path, name, form):
    _, path = copy
    ran = tmp_path / "ran"
    bad = pickle.dumps(Payload(ran)) if form == "pickle" else malicious(ran, form == "zip")
    good = (path / name).read_bytes()
    # The place of each part has its length too: what is read there is the payload.
    (path / name).write_bytes(bad if name != FIRST_FILE else bad.ljust(len(good), b"\0"))
    with pytest.raises(BadContentError):
        read(path)
    assert not ran.exists()


@pytest.mark.parametrize("elsewhere", ["../update_00000001/" + FIRST_FILE, "/etc/passwd", "missing"])
def test_nothing_is_read_elsewhere(copy, elsewhere):
    _, path = copy
    places = torch.load(path / PARTS, weights_only=True)
    places["model.weight"] = [(elsewhere, 0)]
    torch.save(places, path / PARTS)
    with pytest.raises(BadContentError):
        read(path)


def test_compressed_files_are_refused(copy):
    """A bomb of a few kilobytes."""
    _, path = copy
    with zipfile.ZipFile(path / FIRST_FILE) as good:
        files = {name: good.read(name) for name in good.namelist()}
    with zipfile.ZipFile(path / FIRST_FILE, "w", zipfile.ZIP_DEFLATED) as bad:
        for name, content in files.items():
            bad.writestr(name, content + b"\0" * 100_000)
    with pytest.raises(BadContentError):
        read(path)


# ------------------------------------------------------------------------------------------------ a disk that fails


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("name", [FIRST_FILE, RUN])
def test_a_full_disk_is_named_and_leaves_nothing(group, copy, monkeypatch, name):
    folder, _ = copy
    opened = open

    def full(path, mode="r", **options):
        return opened("/dev/full" if str(path).endswith(name) and "w" in mode else path, mode, **options)

    monkeypatch.setattr(parts_module, "open", full, raising=False)
    checkpoints = Checkpoints(folder, group=group)
    checkpoints.save(state(3), 3)
    with pytest.raises(OSError, match=f"No space left on device.*{name}"):
        checkpoints.wait()
    monkeypatch.undo()
    assert sorted(os.listdir(folder)) == ["update_00000001", "update_00000002"]
    save(checkpoints, 3)
    assert Checkpoints(folder).newest()[1].name == "update_00000003"


def test_ranks_that_see_other_folders_are_told(group, copy, monkeypatch, no_wait):
    """As on two machines without a shared disk: another rank has written a file that rank 0 does not see."""
    folder, _ = copy
    gather = dist.gather_object

    def of_two(*arguments, **named):
        gather(*arguments, **named)
        arguments[1].append(({"__1_0.distcp": "0" * 64}, None))

    monkeypatch.setattr(parts_module.dist, "gather_object", of_two)
    checkpoints = Checkpoints(folder, group=group)
    checkpoints.save(state(3), 3)
    with pytest.raises(OSError, match="all ranks have to see the same --out_dir.*__1_0.distcp"):
        checkpoints.wait()
    assert sorted(os.listdir(folder)) == ["update_00000001", "update_00000002"]


def test_a_disk_that_returns_something_else_ends_the_save(group, copy, monkeypatch):
    folder, _ = copy
    monkeypatch.setattr(parts_module, "file_digest", lambda path: "0" * 64)
    checkpoints = Checkpoints(folder, group=group)
    checkpoints.save(state(3), 3)
    with pytest.raises(OSError, match="reads back differently"):
        checkpoints.wait()
    assert sorted(os.listdir(folder)) == ["update_00000001", "update_00000002"]
