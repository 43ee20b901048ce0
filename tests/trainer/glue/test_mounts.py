"""Fine-tuning by ranks whose machines have their files in places of their own. Reference: what each rank opens; a run of one mount."""

import json
import shutil
import sys

import pytest
import torch.distributed as dist

from common.errors import UserError
from tests.helpers import new_port, run_ranks
from tests.trainer.glue.glue_helpers import arguments, make_place
from trainer import train_glue
from trainer.machine.ranks import init_distributed_mode

RUN = {"dtype": "float32", "epochs": 1, "evaluate_during_training": 0, "report": 0, "do_predict": 1}


def own_flags(mount, run):
    """The flags of a rank that has everything below `mount`, but for the results, which all ranks share."""
    if run == "benchmark":
        return {}
    # The files of a machine have names of its own, too.
    files = {f"{part}_file": f"{part}_of_{mount.name}.csv" for part in ("train", "dev", "test")}
    paths = {flag: mount / "own" / file for flag, file in files.items()}
    return {**paths, "task": "mine", "data_dir": None, "kind": "classification"}


def write_own_task(place):
    (place / "own").mkdir()
    for part, n in (("train", 20), ("dev", 9), ("test", 4)):
        lines = [f"{'hi'[i % 2]} a b,{'yn'[i % 2]}" for i in range(n)]
        (place / "own" / f"{part}_of_{place.name}.csv").write_text("text,label\n" + "\n".join(lines) + "\n")


def fine_tune_on_own_mount(folder, run):
    """Returns the files that this rank has opened below the other rank's mount."""
    new_port(run)
    ranks, _ = init_distributed_mode("cpu", timeout_s=60)
    mount, other = folder / f"mount_{ranks.rank}", str(folder / f"mount_{1 - ranks.rank}")
    strange = []
    sys.addaudithook(
        lambda event, details: (
            strange.append(str(details[0])) if event == "open" and str(details[0]).startswith(other) else None
        )
    )
    words = arguments(mount, folder / "out" / run, **own_flags(mount, run), **RUN)
    try:
        assert train_glue.main(words) == 0
    finally:
        dist.destroy_process_group()
    return strange


def told_of_other_data(folder):
    """What a rank says whose development file is another one."""
    new_port("other data")
    ranks, _ = init_distributed_mode("cpu", timeout_s=60)
    words = arguments(folder / f"mount_{ranks.rank}", folder / "out" / "other", **RUN)
    try:
        train_glue.main(words)
    except UserError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "nothing"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mount_0").mkdir()
    make_place(tmp_path / "mount_0")
    shutil.copytree(tmp_path / "mount_0", tmp_path / "mount_1")
    for number in range(2):
        write_own_task(tmp_path / f"mount_{number}")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("run", ["benchmark", "own task"])
def test_each_rank_opens_the_files_that_its_own_flags_name(folder, run):
    assert run_ranks(fine_tune_on_own_mount, folder, run) == [[], []]
    results = json.loads((folder / "out" / run / "eval_results.json").read_text())
    assert len(results) == 1


@pytest.mark.slow
def test_a_rank_with_other_data_is_named_before_anything_is_trained(folder):
    """Without this it would have another number of batches to evaluate, and the ranks would wait for each other."""
    dev = folder / "mount_1" / "glue" / "CoLA" / "dev.tsv"
    dev.write_text("".join(dev.read_text().splitlines(keepends=True)[:3]))
    said = run_ranks(told_of_other_data, folder)
    assert said[0].startswith("rank 1 on ") and "CoLA/dev.tsv" in said[0] and said[1] == ""
    assert not list((folder / "out").rglob("*.metrics.jsonl"))
