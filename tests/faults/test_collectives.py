"""A rank that is lost, stuck or late in a collective; a GPU that fails. Reference: the run that nobody disturbed (bitwise)."""

import os
import shutil
import time
from functools import cache

import pytest

from tests.faults.harness import rising, seeded_random, start_torchrun
from tests.faults.hooks import FAULTS, PHASES
from trainer.machine.measure import lost_card_line

TIMEOUT_S = 3
# How long it takes until a loss is told: --dist_timeout, and a busy machine
TOLD_WITHIN_S = TIMEOUT_S + 8
CUDA = "CUDA error: {}\nSearch for `cudaError' in https://docs.nvidia.com for more information.\nIt might be reported late."
CARD_LOST = [
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "the launch timed out and was terminated",
    "unknown error",
    "no CUDA-capable device is detected",
    "CUDA-capable device(s) is/are busy or unavailable",
]


@pytest.fixture(scope="module")
def new_run(new_lab):
    """new_run(number of ranks): (Lab, result of an undisturbed run). Its runs are evaluated every third update."""

    def prepared():
        lab = new_lab(dist_timeout=TIMEOUT_S)
        lab.settings.update(rising(lab.folder), eval_interval=6)
        return lab

    @cache
    def undisturbed(n_ranks):
        lab = prepared()
        lab.run_ranks("whole", n_ranks)
        return lab.result("whole")

    return lambda n_ranks: (prepared(), undisturbed(n_ranks))


def check_fault(lab, whole, n_ranks, rank, kind, phase, update):
    """The others end in time with one line; resumed, or after a late answer, the run ends as the whole one."""
    struck = lab.folder / "struck"
    hooks = {"strike": {"kind": kind, "phase": phase, "update": update, "rank": rank, "once": str(struck)}}
    processes = lab.start_ranks("run", n_ranks, hooks)
    for number, process in enumerate(processes):
        if kind == "late":
            assert process.wait() == 0, process.err
        elif number != rank:
            assert process.wait(60) == 1, process.out
            # Where rank 0 has died, torch has complained about its store before.
            _, line = process.err.split("error: ")
            assert line.startswith("another rank is gone, or silent for longer than --dist_timeout (")
            assert line.count("\n") == 1
    assert struck.exists()
    if kind != "late":
        assert time.time() - struck.stat().st_mtime < TOLD_WITHIN_S
        processes[rank].kill()
        processes[rank].wait()
        lab.run_ranks("run", n_ranks, from_resume=1)
    assert lab.result("run") == whole


@pytest.mark.slow
def test_random_faults_in_collectives(new_run):
    """FAULTS_COUNT=40: so many, not 4."""
    generator = seeded_random("collectives")
    for number in range(int(os.environ.get("FAULTS_COUNT", "4"))):
        # Each kind as often as any other
        kind, n_ranks = list(FAULTS)[number % len(FAULTS)], generator.choice((2, 3))
        fault = generator.randrange(n_ranks), kind, generator.choice(PHASES), generator.randint(2, 5)
        print(n_ranks, *fault, flush=True)
        lab, whole = new_run(n_ranks)
        check_fault(lab, whole, n_ranks, *fault)
        shutil.rmtree(lab.folder)


def test_all_ranks_end_though_only_its_neighbours_see_who_died(lab):
    processes = lab.start_ranks("run", 5, {"strike": {"kind": "die", "phase": "log", "update": 2, "rank": 2}})
    for process in (*processes[:2], *processes[3:]):
        assert process.wait() == 1
        assert process.err.startswith("error: another rank is gone") and process.err.count("\n") == 1


@pytest.mark.slow
def test_torchrun_starts_ranks_again_of_which_one_was_stopped(new_run):
    """It waits for half a minute until it kills a rank that does not end."""
    lab, whole = new_run(2)
    strike = {"kind": "stop", "phase": "exchange", "update": 4, "rank": 1, "once": str(lab.folder / "struck")}
    launcher = start_torchrun(lab, "run", {"strike": strike}, "--max-restarts", "1", from_resume=1)
    output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, output
    assert output.count("error: another rank is gone, or silent") == 1
    assert lab.result("run") == whole


@pytest.mark.parametrize("reason", CARD_LOST)
def test_a_gpu_that_fails_is_told_by_its_error(reason):
    assert f"(CUDA error: {reason})" in lost_card_line(RuntimeError(CUDA.format(reason)))


@pytest.mark.parametrize("reason", ["device-side assert triggered", "an illegal memory access was encountered"])
def test_a_mistake_in_a_kernel_keeps_its_traceback(reason):
    assert lost_card_line(RuntimeError(CUDA.format(reason))) is None


def test_a_run_whose_gpu_fails_goes_on_from_its_last_save(lab, whole):
    fault = {"fail_at": {"updates": [8], "kind": "raise", "message": CUDA.format(CARD_LOST[0])}}
    process = lab.run("run", 1, hooks=fault)
    assert process.err.startswith(
        "error: the GPU has failed, is gone, or is held by another program (CUDA error: uncorrectable ECC "
    )
    assert process.err.count("\n") == 1
    lab.finish(whole)
