"""What the ranks tell each other while they evaluate. Reference: the numbers of the signals."""

import signal
from types import SimpleNamespace

import numpy as np
import torch

from trainer.glue.scores import Evaluation
from trainer.machine.ranks import Ranks


def test_of_two_signals_the_larger_number_counts(monkeypatch):
    """Here SIGTERM, on the other rank SIGHUP. A mean would be the number of another signal."""

    def all_reduce(logits):
        logits[-1, 0] += signal.SIGHUP

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    engine = SimpleNamespace(
        model=torch.nn.Identity(), ranks=Ranks(world_size=2), shards=None, device="cpu", largest=lambda number: number
    )
    evaluation = SimpleNamespace(
        engine=engine,
        task=SimpleNamespace(outputs=3, is_of_positions=False),
        batch_size=4,
        signals=SimpleNamespace(signum=int(signal.SIGTERM)),
    )
    examples = SimpleNamespace(features=SimpleNamespace(lengths=np.array([3, 1, 2])))
    logits, stop_signal = Evaluation.outputs(evaluation, examples)
    assert stop_signal == signal.SIGTERM
    assert logits.shape == (3, 3) and not logits.any()
