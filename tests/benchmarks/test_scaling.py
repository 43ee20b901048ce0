"""Formulas of what ranks send. Reference: rings that are walked step by step, and the cases in which one thing alone counts."""

import json
import subprocess
import sys

import pytest

from benchmarks.arguments import SIZES as MODELS
from benchmarks.scaling import FP32, Link, Sizes, bytes_of_update, seconds_of_sharded, seconds_of_whole, sizes_of
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.helpers import ROOT, tiny_model

SIZES = Sizes(layers=[40_000_000, 30_000_000, 20_000_000], outside=24_000_000)
FAST = Link(rate=1e30, latency=0.0)
SLOW = Link(rate=1e6, latency=0.001)
FORWARD, BACKWARD = 0.5, 1.0


def walked_all_reduce(n, n_bytes):
    """Bytes that a rank sends until each has the sums of all, where a piece is handed on at each step."""
    sent = [0.0] * n
    # {(rank, piece): ranks whose values are in it}
    held = {(rank, piece): {rank} for rank in range(n) for piece in range(n)}
    for adds in (True, False):
        for step in range(n - 1):
            moves = []
            for rank in range(n):
                piece = (rank - step + (0 if adds else 1)) % n
                moves.append((rank, piece, set(held[rank, piece])))
            for rank, piece, values in moves:
                sent[rank] += n_bytes / n
                to = ((rank + 1) % n, piece)
                held[to] = held[to] | values if adds else values
    assert all(values == set(range(n)) for values in held.values())
    assert len(set(sent)) == 1
    return sent[0]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_whole_models_send_as_an_all_reduce_that_is_walked(n):
    assert bytes_of_update(SIZES, n, 1) == pytest.approx(walked_all_reduce(n, SIZES.total))


@pytest.mark.parametrize("library, of_sums", [("Gloo", 1.0), ("NCCL", 0.5)])
def test_sharded_models_send_gatherings_and_sums_for_each_micro_batch(library, of_sums):
    """A gathering is half of an all-reduce. Layers are gathered twice."""
    gathered = [*SIZES.layers, *SIZES.layers, SIZES.outside]
    once = sum(walked_all_reduce(4, n_bytes) / 2 for n_bytes in gathered) + of_sums * walked_all_reduce(4, SIZES.total)
    assert bytes_of_update(SIZES, 4, 4, micro_batches=3, library=library) == pytest.approx(3 * once)


def test_groups_send_among_each_other_once_an_update():
    within = bytes_of_update(SIZES, 4, 4, micro_batches=3)
    between = walked_all_reduce(2, SIZES.total / 4)
    assert bytes_of_update(SIZES, 8, 4, micro_batches=3) == pytest.approx(within + between)


@pytest.mark.parametrize("n", [1, 2, 64])
def test_a_network_that_takes_no_time_leaves_the_computing(n):
    computed = 3 * (FORWARD + BACKWARD)
    assert seconds_of_whole(SIZES, n, FAST, FORWARD, BACKWARD, 3) == pytest.approx(computed)
    assert seconds_of_sharded(SIZES, n, FAST, FORWARD, BACKWARD, 3, "NCCL") == pytest.approx(computed)


@pytest.mark.parametrize("library", ["Gloo", "NCCL"])
def test_computing_that_takes_no_time_leaves_the_network(library):
    link = Link(rate=1e6, latency=0.0)
    for group, seconds in (
        (1, seconds_of_whole(SIZES, 4, link, 0.0, 0.0, 1)),
        (4, seconds_of_sharded(SIZES, 4, link, 0.0, 0.0, 1, library)),
    ):
        assert seconds == pytest.approx(bytes_of_update(SIZES, 4, group, library=library) / link.rate)


def test_an_update_takes_as_long_as_the_longer_of_both_at_least_and_both_together_at_most():
    for n in (2, 8, 512):
        computed = 2 * (FORWARD + BACKWARD)
        for link in (SLOW, Link(rate=1e8, latency=0.0001), FAST):
            sends = 2 * seconds_of_sharded(SIZES, n, link, 0.0, 0.0, 1, "NCCL")
            both = seconds_of_sharded(SIZES, n, link, FORWARD, BACKWARD, 2, "NCCL")
            assert max(computed, sends) * 0.999 <= both <= (computed + sends) * 1.001


def test_the_bytes_of_a_model_are_those_of_its_weights():
    model = tiny_model()
    sizes = sizes_of(model)
    assert len(sizes.layers) == 2
    assert sizes.total == FP32 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2])
def test_two_ranks_send_no_less_than_the_formula_says(group):
    """More may be counted: other programs of the machine talk to themselves too."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "scaling.py"),
        "--size",
        "tiny",
        "--updates_of",
        "2",
        str(group),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    measured, _ = json.loads(done.stdout.splitlines()[-1])
    sizes = sizes_of(MiniMindForCausalLM(MiniMindConfig(**MODELS["tiny"])))
    assert measured >= 0.99 * bytes_of_update(sizes, 2, group)
