"""The ways to add up gradients that parallel.py compares. Reference: each other's weights after two updates."""

import argparse

import pytest
import torch

from benchmarks.parallel import WAYS, leave, updates
from tests.helpers import new_port, run_ranks
from trainer.machine.ranks import init_distributed_mode


def weights_of_ways():
    found = {}
    for number, (name, way) in enumerate(WAYS.items()):
        new_port(f"{number}")
        ranks, _ = init_distributed_mode("cpu")
        side = updates(argparse.Namespace(size="tiny", rows=2, dtype="float32"), ranks, way)
        next(side)
        engine = next(side)
        # Whole ones, of sharded models on rank 0 alone.
        weights = engine.weights()
        if ranks.is_main:
            found[name] = {key: tensor.detach() for key, tensor in weights.items()}
        del engine, side
        leave()
    return found


@pytest.mark.slow
def test_all_ways_train_the_same():
    found, _ = run_ranks(weights_of_ways)
    expected = found.pop("DistributedDataParallel")
    assert found.keys() == WAYS.keys() - {"DistributedDataParallel"}
    for name, weights in found.items():
        for key, tensor in weights.items():
            torch.testing.assert_close(
                tensor, expected[key], rtol=1e-5, atol=1e-6, msg=lambda said, way=name: f"{way}: {said}"
            )
