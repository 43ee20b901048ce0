"""benchmarks/host_work.py. References: operations counted by hand; for each row of a merged micro-batch a third of the work."""

import torch

from benchmarks.host_work import (
    Case,
    Launches,
    chunks_of_gpu,
    mask_of_pairs,
    mask_seconds,
    measure,
    small_chunks,
    summary,
    table_of,
)
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
    counts = [measure(TINY, case, 128, times=1)[0] / case.rows for case in (before, after)]
    # At eight times the rows no part but the loss has more operations, and that has 16,384 rows in a chunk.
    assert counts[0] / 10 < counts[1] < counts[0] / 3


def test_the_last_line_is_said_to_be_another_micro_batch():
    """Ratios by hand: 1,200 of 1,400 launches, and 8 times the rows with 1,200 launches."""
    before = Case("before", 32, mask_of_pairs, small_chunks)
    after = Case("after", 32, flex_mask, chunks_of_gpu)
    merged = Case("merged", 256, flex_mask, chunks_of_gpu)
    found = [(before, 1400, 0.4), (after, 1200, 0.3), (merged, 1200, 0.3)]
    rows = [line.split()[-7:] for line in table_of(found)[2:]]
    assert rows[1] == ["after", "1,200", "300", "1,200", "0.86", "300", "0.75"]
    assert rows[2] == ["merged", "1,200", "300", "150", "0.11", "38", "0.09"]
    assert "One micro-batch of 32 rows has 0.86 of the launches and takes the host 0.75 of the time." in summary(found)
    assert "another micro-batch, of 256 rows" in summary(found) and summary(found).endswith("in the place of 8 times")


def test_a_mask_from_starts_takes_the_host_a_fraction():
    """Thirty times less when it was measured, so a busy machine leaves enough of it."""
    assert 3 * mask_seconds(flex_mask) < mask_seconds(mask_of_pairs)
