"""Checkpoints of parts, in a process group of one; tests/faults has the runs. References: the tensors themselves, sha256sum."""

import errno
import hashlib
import os
import pickle
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.errors import BadContentError, UserError
from tests.faults.harness import seeded_random
from tests.faults.test_damage import Payload, malicious
from trainer.saving import parts as parts_module
from trainer.saving import places
from trainer.saving.checkpoint import Checkpoints, load_checkpoint, remove_temporaries, verified
from trainer.saving.parts import PARTS, RUN, SUMS, filled, places_of
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


@pytest.mark.parametrize("size", [2, 3, 8])
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


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_knows_the_digests(saved):
    for path in Checkpoints(saved).paths():
        subprocess.run(["sha256sum", "-c", SUMS], cwd=path, check=True, capture_output=True)


def test_the_newest_are_kept_and_nothing_else(group, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, group=group)
    for update in (1, 2, 3):
        save(checkpoints, update)
    assert sorted(os.listdir(tmp_path)) == ["update_00000002", "update_00000003"]


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


FOREIGN = {".DS_Store": b"of a file manager", "notes.txt": b"of a user"}


def put_foreign_files(path):
    for name, content in FOREIGN.items():
        (path / name).write_bytes(content)


def foreign_files(path):
    return {name: (path / name).read_bytes() for name in FOREIGN if (path / name).exists()}


def test_what_somebody_else_has_put_there_breaks_no_resume(copy):
    folder, path = copy
    put_foreign_files(path)
    said = []
    assert Checkpoints(folder).newest(said.append)[1] == path and said == []


def test_what_somebody_else_puts_there_breaks_no_save(group, copy, monkeypatch):
    folder, _ = copy
    write_files = parts_module._write_files

    def with_a_file_manager(state, temporary, *arguments):
        write_files(state, temporary, *arguments)
        put_foreign_files(temporary)

    monkeypatch.setattr(parts_module, "_write_files", with_a_file_manager)
    save(Checkpoints(folder, group=group), 3)
    assert verified(folder / "update_00000003")


def test_what_somebody_else_has_put_there_stays(group, copy):
    """When its checkpoint is saved again, when it is deleted, and at the next start."""
    folder, path = copy
    put_foreign_files(path)
    save(Checkpoints(folder, group=group), 2)
    assert verified(path) and foreign_files(path) == FOREIGN
    save(Checkpoints(folder, keep=1, group=group), 3)
    remove_temporaries(folder.parent / "run", folder)
    assert [path.name for path in Checkpoints(folder).paths()] == ["update_00000003"]
    (left,) = [path for path in folder.iterdir() if path.name.startswith("update_00000002")]
    assert foreign_files(left) == FOREIGN and set(os.listdir(left)) == FOREIGN.keys()


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
        for _ in range(25):
            damaged = bytearray(good)
            damaged[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
            (path / name).write_bytes(damaged)
            assert is_passed_over(folder, path)
        (path / name).write_bytes(good)
    assert verified(path)


def test_a_bit_flipped_in_a_newline_is_noticed(copy):
    """One bit makes a vertical tab of it, which ends a line too where Python splits a text."""
    folder, path = copy
    good = (path / SUMS).read_bytes()
    for place, byte in enumerate(good):
        if byte == ord("\n"):
            (path / SUMS).write_bytes(good[:place] + b"\v" + good[place + 1 :])
            assert is_passed_over(folder, path)


def test_truncated_files_are_noticed(copy):
    folder, path = copy
    for name in (FIRST_FILE, PARTS, RUN, SUMS):
        good = (path / name).read_bytes()
        # Behind a line of SUMS too: what is left of it is in order.
        cuts = {0, 1, len(good) // 2, len(good) - 1, good.find(b"\n") + 1} - {len(good)}
        for cut in cuts:
            (path / name).write_bytes(good[:cut])
            # A final newline may be missing: all digests are there.
            if not (name == SUMS and cut == len(good) - 1):
                assert is_passed_over(folder, path), (name, cut)
        (path / name).write_bytes(good)


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


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_share_the_comparison(copy, monkeypatch, no_wait, world_size):
    """Each file is read by one rank, which alone notices its damage; what is missing is noticed by all."""
    _, path = copy
    read_by = {}

    def verdicts():
        return [verified(path, rank, world_size) for rank in range(world_size)]

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


@pytest.mark.parametrize("kind", ["file of parts", "folder for a file", "empty folder for a checkpoint"])
def test_what_is_too_much_is_noticed(copy, kind):
    folder, path = copy
    if kind == "file of parts":
        (path / "__9_0.distcp").write_bytes(b"")
    elif kind == "folder for a file":
        (path / RUN).unlink()
        (path / RUN).mkdir()
    else:
        shutil.rmtree(path)
        path.mkdir()
    assert is_passed_over(folder, path)


def test_names_of_files_elsewhere_are_refused(copy, no_wait):
    """Their digests hold, and they are there."""
    folder, path = copy
    beside = folder / "update_00000001" / FIRST_FILE
    digest = hashlib.sha256(beside.read_bytes()).hexdigest()
    for name in (f"../update_00000001/{FIRST_FILE}", str(beside)):
        sums = (path / SUMS).read_text()
        (path / SUMS).write_text(f"{sums}{digest}  {name}\n")
        assert not verified(path)
        (path / SUMS).write_text(sums)
    assert verified(path)


@pytest.fixture
def stale_lists(monkeypatch):
    """Lists of a folder lack the last of its files for a while, as those that a machine has kept of a network folder."""
    listdir, iterdir = os.listdir, Path.iterdir

    def without_last(names):
        return [name for name in names if not str(name).endswith(FIRST_FILE)]

    monkeypatch.setattr(os, "listdir", lambda *arguments: without_last(listdir(*arguments)))
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(without_last(iterdir(path))))


def test_a_resume_finds_files_that_a_list_of_the_folder_lacks(copy, stale_lists):
    _, path = copy
    assert all(verified(path, rank, 2) for rank in range(2))
    for name, tensor in written(state(2)).items():
        assert torch.equal(found(read(path))[name], tensor)


def test_a_save_finds_files_that_a_list_of_the_folder_lacks(group, tmp_path, stale_lists):
    save(Checkpoints(tmp_path / "resume", group=group), 3)
    assert verified(tmp_path / "resume" / "update_00000003")


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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(copy):
    folder, path = copy
    for name in (FIRST_FILE, SUMS):
        good = (path / name).read_bytes()
        (path / name).unlink()
        os.mkfifo(path / name)
        assert is_passed_over(folder, path)
        (path / name).unlink()
        (path / name).write_bytes(good)


def test_none_intact_is_an_error(copy):
    folder, _ = copy
    for path in Checkpoints(folder).paths():
        (path / RUN).write_bytes(b"")
    with pytest.raises(UserError, match="none of its 2 checkpoints is intact"):
        Checkpoints(folder).newest(lambda text: None)


# ------------------------------------------------------------------------- hostile content, with digests that hold


def read(path):
    """What a resume reads of a checkpoint whose digests hold."""
    renew_digests(path)
    assert verified(path)
    return filled(load_checkpoint(path), path)


@pytest.mark.parametrize("name", [FIRST_FILE, PARTS, RUN])
@pytest.mark.parametrize("form", ["zip", "old", "pickle"])
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


def test_rows_that_no_part_has_are_told(copy):
    _, path = copy
    content = load_checkpoint(path)
    content["model"]["weight"] = torch.empty(9, 3, device="meta")
    torch.save(content, path / RUN)
    with pytest.raises(BadContentError, match="model.weight lacks 2 rows"):
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


@pytest.mark.parametrize("groups", [1, 2])
def test_a_part_that_several_groups_have_is_written_once(groups):
    """Reference: by hand. The first group writes, as with --shard 2 on four ranks."""
    first_rows = [{"a": 0, "b": 0}, {"a": 4}] * groups
    files = ("__0_0.distcp", "__1_0.distcp")
    assert places_of(first_rows) == {"a": [(files[0], 0), (files[1], 4)], "b": [(files[0], 0)]}


# ------------------------------------------------------------------------------------------------ a disk that fails


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("name", [FIRST_FILE, PARTS, RUN])
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


def test_each_save_has_a_folder_of_its_own(group, copy, monkeypatch):
    """What a rank of an earlier launch goes on writing comes into no checkpoint of this one, even under the same name."""
    folder, _ = copy
    names = []
    write_files = parts_module._write_files

    def with_a_straggler(state, temporary, *arguments):
        for number, name in enumerate((*names, "update_00000003.tmp")):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / f"__{number}_0.distcp").write_bytes(b"of an earlier launch")
        names.append(temporary.name)
        write_files(state, temporary, *arguments)

    monkeypatch.setattr(parts_module, "_write_files", with_a_straggler)
    for _ in range(2):
        save(Checkpoints(folder, group=group), 3)
        assert sorted(os.listdir(folder / "update_00000003")) == [SUMS, FIRST_FILE, PARTS, RUN]
        assert verified(folder / "update_00000003")
    assert len({*names, "update_00000003.tmp"}) == 3
    # The next start clears away what the others have left.
    remove_temporaries(folder.parent / "run", folder)
    assert sorted(os.listdir(folder)) == ["update_00000002", "update_00000003"]


def test_a_file_that_no_rank_has_written_ends_the_save(group, copy, monkeypatch):
    folder, _ = copy
    write_files = parts_module._write_files

    def with_a_guest(state, temporary, *arguments):
        write_files(state, temporary, *arguments)
        (temporary / "__1_0.distcp").write_bytes(b"of another launch")

    monkeypatch.setattr(parts_module, "_write_files", with_a_guest)
    checkpoints = Checkpoints(folder, group=group)
    checkpoints.save(state(3), 3)
    with pytest.raises(OSError, match="was written by none of the ranks.*__1_0.distcp"):
        checkpoints.wait()
    assert sorted(os.listdir(folder)) == ["update_00000001", "update_00000002"]


@pytest.fixture
def straggler(monkeypatch):
    """A rank of an earlier launch writes into what is being deleted."""

    def rmdir(path, **options):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(os, "rmdir", rmdir)


def test_a_start_leaves_what_is_still_written_to_the_next_one(copy, straggler):
    folder, _ = copy
    left = folder / "update_00000003.0123abcd.tmp"
    left.mkdir()
    others = [folder / "update_00000004.pt.77.tmp", folder.parent / "run.pth.77.tmp"]
    for path in others:
        path.touch()
    remove_temporaries(folder.parent / "run", folder)
    assert left.exists() and not any(path.exists() for path in others)


def test_what_cannot_be_deleted_hides_no_error_of_a_save(group, copy, monkeypatch, straggler):
    folder, _ = copy

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "parts")

    monkeypatch.setattr(parts_module, "put_in_place", full)
    checkpoints = Checkpoints(folder, group=group)
    checkpoints.save(state(3), 3)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.wait()


def test_a_disk_that_returns_something_else_ends_the_save(group, copy, monkeypatch):
    folder, _ = copy
    monkeypatch.setattr(parts_module, "file_digest", lambda path: "0" * 64)
    checkpoints = Checkpoints(folder, group=group)
    checkpoints.save(state(3), 3)
    with pytest.raises(OSError, match="reads back differently"):
        checkpoints.wait()
    assert sorted(os.listdir(folder)) == ["update_00000001", "update_00000002"]
