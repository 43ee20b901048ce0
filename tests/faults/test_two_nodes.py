"""Faults of a run over two nodes. Reference: the run that nobody disturbed, whose weights each of them must end with."""

import time
from pathlib import Path

import pytest

from tests.faults.harness import digest
from tests.faults.two_nodes import Job, reason_against, two_nodes
from tests.helpers import wait_until

pytestmark = pytest.mark.slow

# 20 updates of 4 rows, each of a tenth of a second, so that a fault strikes between two saves.
RUN = {"accumulation_steps": 1, "epochs": 2, "save_interval": 4}
PACE = {"slow_updates": {"seconds": 0.1}}
STRUCK = 9
OUTAGE_S = 3


@pytest.fixture(scope="module")
def connected_nodes():
    reason = reason_against()
    if reason:
        pytest.skip(reason)
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture
def nodes(connected_nodes):
    yield connected_nodes
    for node in connected_nodes:
        node.kill()
        node.plug(True)


@pytest.fixture(scope="module")
def undisturbed(new_lab):
    lab = new_lab(**RUN)
    lab.run_ranks("whole")
    return lab


@pytest.fixture
def job(lab, nodes):
    lab.settings.update(RUN)
    return Job(lab, nodes, "run", PACE)


def test_a_node_is_lost_without_a_word_and_comes_back(job):
    """A sharded model is compared with one of its own: the norm of its gradient is a sum of other parts."""
    job.settings["shard"] = "full"
    job.lab.run_ranks("whole", **job.settings)
    _, second = job.nodes
    job.start()
    job.until_update(STRUCK)
    job.lose(second)
    time.sleep(OUTAGE_S)
    job.bring_back(second)
    job.wait()
    assert job.lab.result("run") == job.lab.result("whole")


def test_the_cable_is_out_for_longer_than_the_ranks_wait(job, undisturbed):
    """Both ranks end, and the launchers start them again together once they reach each other."""
    _, second = job.nodes
    job.settings = {"dist_timeout": 5}
    job.start()
    job.until_update(STRUCK)
    second.plug(False)
    time.sleep(12)
    second.plug(True)
    job.wait()
    assert job.lab.result("run") == undisturbed.result("whole")


def test_a_node_is_lost_and_the_other_goes_on_alone_until_it_is_back(job, undisturbed):
    """Updates have the same rows on one rank and on two. Each sum here has two parts, so that not even their order counts."""
    _, second = job.nodes
    job.nodes_asked = "1:2"
    job.settings = {"rows_per_update": 4, "accumulation_steps": None, "dist_timeout": 10}
    # The second node takes seconds to start.
    job.hooks["hold_until_signal"] = {"update": 16}
    job.start()
    job.until_update(STRUCK)
    job.lose(second)
    of_second = Path(f"{job.ledger}.1")
    of_second.unlink()
    job.until_update(STRUCK + 3)
    assert not of_second.exists()
    job.bring_back(second)
    wait_until(of_second.exists, 120, job.output)
    job.wait()
    ends = [lab.state(name)["model"] for lab, name in ((job.lab, "run"), (undisturbed, "whole"))]
    assert digest(ends[0]) == digest(ends[1])
