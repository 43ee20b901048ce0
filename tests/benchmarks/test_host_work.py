"""benchmarks/host_work.py. References: operations counted by hand, and the goal of a third of the host's work for each row."""

import torch

from benchmarks.host_work import Case, Launches, chunks_of_gpu, mask_of_pairs, measure, small_chunks
from model.fast.flex_attention import flex_mask

TINY = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def test_views_and_allocations_are_no_launches():
    x = torch.ones(3, 4)
    with Launches() as launches:
        y = x.view(4, 3).T[1:].unsqueeze(0)
        torch.empty_like(x)
        assert launches.count == 0
        (y + 1).exp_()
    assert launches.count == 2


def test_large_micro_batches_take_the_host_a_third_or_less_a_row():
    before = Case("before", 32, mask_of_pairs, small_chunks)
    after = Case("after", 256, flex_mask, chunks_of_gpu)
    counts = [measure(TINY, case, 128, times=1)[0] for case in (before, after)]
    # At eight times the rows no part but the loss has more operations, and that has 16,384 rows in a chunk.
    assert counts[0] / 10 < counts[1] < counts[0] / 3
