"""Faults of a run over two nodes. Reference: the run that nobody disturbed, whose weights each of them must end with.

`-s` prints how long each took to go on.
"""

import time
from pathlib import Path

import pytest
import yaml

from tests.faults.harness import ROOT, Lab, digest
from tests.faults.two_nodes import ADDRESSES, Job, reason_against, two_nodes

pytestmark = pytest.mark.slow

# 30 updates of 4 rows, each of a tenth of a second, so that a fault strikes between two saves.
RUN = {"accumulation_steps": 1, "epochs": 3, "save_interval": 4}
PACE = {"slow_updates": {"seconds": 0.1}}
STRUCK = 13
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
def undisturbed(scratch, server, tokenizer, corpus, connected_nodes):
    """The Lab of the run."""
    folder = scratch / "undisturbed"
    folder.mkdir()
    lab = Lab(folder, server, tokenizer, corpus, **RUN)
    run = Job(lab, connected_nodes, "whole")
    launched = time.monotonic()
    run.start()
    print(f"the first update was done {run.goes_on_after(launched):.1f} s after the launch")
    run.wait()
    return lab


@pytest.fixture
def job(lab, nodes):
    """A run that is not started yet."""
    lab.settings.update(RUN)
    return Job(lab, nodes, "run", PACE)


def ends_as(undisturbed, job):
    """Both launchers end by themselves, with the weights, moments, progress and metrics of the run that nobody disturbed."""
    job.wait()
    return job.lab.result(job.name) == undisturbed.result("whole")


def by_static_file(node):
    """(command, environment variables) of a launch of fixed nodes."""
    return ["sh", "launch/static.sh"], {"HEAD": ADDRESSES[0], "PORT": "29500", "NODES": "2", "NODE": str(node.number)}


def by_kubeflow(node):
    """... as Kubeflow's Trainer starts its pods: all that torchrun has to know comes from the environment."""
    command = yaml.safe_load((ROOT / "launch" / "kubeflow.yaml").read_text())["spec"]["trainer"]["command"]
    variables = {
        "NNODES": 2,
        "NPROC_PER_NODE": 1,
        "NODE_RANK": node.number,
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": 29500,
    }
    return command, {f"PET_{name}": str(value) for name, value in variables.items()}


@pytest.mark.parametrize("launch_of", [by_static_file, by_kubeflow])
def test_other_launches_end_alike(launch_of, job, undisturbed):
    for node in job.nodes:
        command, variables = launch_of(node)
        job.launch(node, [*command, *job.flags()], variables)
    assert ends_as(undisturbed, job)


@pytest.fixture
def undisturbed_as(job, undisturbed):
    """(shard) -> the Lab of the run that nobody disturbed, with this --shard, which `job` has from then on.

    A sharded model is compared with one of its own: the norm of its gradient is a sum of other parts.
    """

    def run(shard):
        if shard == "none":
            return undisturbed
        job.settings["shard"] = shard
        whole = Job(job.lab, job.nodes, "whole")
        whole.settings = job.settings
        whole.start()
        whole.wait()
        return job.lab

    return run


@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_worker_is_killed(shard, job, undisturbed_as):
    undisturbed = undisturbed_as(shard)
    once = job.lab.folder / "killed"
    job.hooks["signal_at"] = {"updates": [STRUCK], "name": "SIGKILL", "rank": 1, "once": str(once)}
    killed = Path(f"{once}.{STRUCK}")
    job.start()
    job.wait_for(killed.exists, "the fault")
    print(f"went on {job.goes_on_after(time.monotonic()):.1f} s after the kill")
    assert ends_as(undisturbed, job)


def lost_and_back(job, node):
    """Start the run on both nodes; lose one of them between two saves, and bring it back. Returns the moment."""
    job.start()
    job.until_update(STRUCK)
    job.lose(node)
    time.sleep(OUTAGE_S)
    return job.bring_back(node)


@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_node_is_lost_without_a_word_and_comes_back(shard, job, undisturbed_as):
    undisturbed = undisturbed_as(shard)
    _, second = job.nodes
    back = lost_and_back(job, second)
    print(f"went on {job.goes_on_after(back):.1f} s after the node was back")
    assert ends_as(undisturbed, job)


def test_the_node_where_the_launchers_meet_is_lost_and_comes_back(job, undisturbed):
    """The other launcher ends when it finds that nobody there knows it, and is started again."""
    first, second = job.nodes
    back = lost_and_back(job, first)
    assert second.launcher.wait(60) != 0
    print(f"the other launcher ended {time.monotonic() - back:.1f} s after the node was back")
    job.start(second)
    print(f"went on {job.goes_on_after(back):.1f} s after the node was back")
    assert ends_as(undisturbed, job)


def test_the_cable_is_out_for_seconds(job, undisturbed):
    """No update is lost: the operating systems send again what was not received."""
    _, second = job.nodes
    job.start()
    job.until_update(STRUCK)
    second.plug(False)
    time.sleep(OUTAGE_S)
    back = time.monotonic()
    second.plug(True)
    print(f"went on {job.goes_on_after(back, anew=False):.1f} s after the cable was in")
    assert ends_as(undisturbed, job)
    assert [number for _, number in job.updates()] == list(range(1, 31))


def test_the_cable_is_out_for_longer_than_the_ranks_wait(job, undisturbed):
    """Both ranks end, and the launchers start them again together once they reach each other."""
    _, second = job.nodes
    job.settings = {"dist_timeout": 5}
    job.start()
    job.until_update(STRUCK)
    second.plug(False)
    time.sleep(12)
    back = time.monotonic()
    second.plug(True)
    print(f"went on {job.goes_on_after(back):.1f} s after the cable was in")
    assert ends_as(undisturbed, job)


def test_one_rank_is_slow(job, undisturbed):
    job.hooks["slow_updates"] = {"seconds": 0.3, "rank": 1}
    job.start()
    assert ends_as(undisturbed, job)
    times = [when for when, _ in job.updates()]
    # The other rank waits.
    assert times[-1] - times[0] >= 0.3 * (len(times) - 1)


def test_a_node_is_lost_and_the_other_goes_on_alone_until_it_is_back(job, undisturbed):
    """Updates have the same rows on one rank and on two. Each sum here has two parts, so that not even their order counts."""
    _, second = job.nodes
    job.nodes_asked = "1:2"
    job.settings = {"rows_per_update": 4, "accumulation_steps": None, "dist_timeout": 10}
    # The second node takes seconds to start.
    job.hooks["hold_until_signal"] = {"update": 20}
    job.start()
    job.until_update(STRUCK)
    job.lose(second)
    lost = time.monotonic()
    print(f"went on alone {job.goes_on_after(lost):.1f} s after the loss")
    back = job.bring_back(second)
    of_second = Path(f"{job.ledger}.1")
    of_second.unlink()
    job.wait_for(of_second.exists, "an update of both")
    print(f"both went on {time.monotonic() - back:.1f} s after the node was back")
    job.wait()
    ends = [lab.state(name)["model"] for lab, name in ((job.lab, "run"), (undisturbed, "whole"))]
    assert digest(ends[0]) == digest(ends[1])
