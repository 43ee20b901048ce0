"""Launches of a sharded model that end by themselves. Reference: exit code 0, which torchrun has if all of its processes do.

A process that still refers to its process groups when the interpreter ends may abort, once in some launches. So it takes many:

    LAUNCHES=100 python -m pytest tests/faults/test_launches.py -m slow -s
"""

import os

import pytest

from tests.faults.harness import start_torchrun

LAUNCHES = int(os.environ.get("LAUNCHES", "3"))

pytestmark = pytest.mark.slow


@pytest.mark.timeout(60 * LAUNCHES)
@pytest.mark.parametrize(("processes", "shard", "launches"), [(2, "full", LAUNCHES), (4, "2", max(1, LAUNCHES // 3))])
def test_no_launch_ends_with_an_abort(lab, processes, shard, launches):
    """`--shard 2` of four processes: groups for the parts, and others for the sums of what is there twice."""
    ended = []
    for number in range(launches):
        with start_torchrun(
            lab, f"run{number}", {}, "--nproc_per_node", str(processes), shard=shard, epochs=1, max_updates=2
        ) as run:
            said, _ = run.communicate(timeout=120)
        ended.append(run.returncode)
        assert run.returncode == 0, f"launch {number + 1}: {said}"
        assert lab.checkpoints(f"run{number}")[0].is_dir(), "the model was sharded"
    print(f"{processes} processes, --shard {shard}: {ended.count(0)} of {launches} launches ended without an abort")
