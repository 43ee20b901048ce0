"""Bad numbers. The reference is the run itself: weights before and after, and a run without a stop."""

import ast
import re

import pytest


@pytest.mark.slow
def test_counts_of_bad_updates_go_on_after_a_resume(lab):
    """Killed after the skipped update: count and curve are those of a run that was not killed."""
    poison = {"poison": {"updates": [2]}}
    lab.run("whole", hooks=poison)
    lab.run("run", expect=-9, hooks={**poison, "signal_at": {"updates": [5], "name": "SIGKILL"}}, save_interval=2)
    lab.run("run", from_resume=1)
    assert lab.result("run") == lab.result("whole")
    assert lab.metrics("run")[-1]["skipped_updates"] == 1


def scales(process):
    return [ast.literal_eval(found)["scale"] for found in re.findall(r"scaler \d: (.*)", process.out)]


def test_fp16_scaler_restored_exactly(lab):
    """Halved by an overflow. Scale and growth tracker: resumed in the middle of a growth interval, the scale grows at the same update."""
    hooks = {"scale": {"value": 2.0**14, "growth_interval": 6}, "print_scale": {}}
    whole = lab.run("whole", hooks=hooks, dtype="float16")
    assert len(set(scales(whole))) > 2
    first = lab.start("run", {**hooks, "signal_at": {"updates": [8]}}, dtype="float16")
    assert first.wait() == 143
    second = lab.run(
        "run", hooks={**hooks, "scale": {"value": 1.0, "growth_interval": 6}}, dtype="float16", from_resume=1
    )
    assert scales(first) + scales(second) == scales(whole)
    assert lab.result("run") == lab.result("whole")
