"""What `make gpu` measures: what training does not use computes the same, and what is missing or does not run is told."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from benchmarks import gpu_figures
from benchmarks.arguments import bench_parser
from benchmarks.bench import has_side
from benchmarks.training import packed_batch
from model.attention import document_mask

B, T, D = 3, 60, 8


def kernel(q, k, v, of_queries, of_keys, longest_q, longest_k, *, window_size, enable_gqa):
    """As torch's, which needs a GPU: document by document."""
    assert of_queries.dtype == of_keys.dtype == torch.int32 and window_size == (-1, 0) and enable_gqa
    found = []
    for start, end in zip(of_queries[:-1].tolist(), of_queries[1:].tolist(), strict=True):
        assert end - start <= longest_q == longest_k
        one = (x[start:end].transpose(0, 1) for x in (q, k, v))
        found.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True).transpose(0, 1))
    return torch.cat(found)


@pytest.fixture
def packed():
    """(queries, keys, values, documents' ids)."""
    torch.manual_seed(0)
    batch, _ = packed_batch(B, T, 20, 97, torch.Generator().manual_seed(0))
    q, k, v = (torch.randn(B, heads, T, D) for heads in (4, 2, 2))
    return q, k, v, batch.document_ids


def test_attention_of_a_list_of_documents_is_that_with_a_mask(packed, monkeypatch):
    """References: SDPA with the mask of documents; and their ends, counted one by one."""
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    q, k, v, document_ids = packed
    bounds = gpu_figures.document_bounds(document_ids)
    starts = [i for i in range(B * T) if i % T == 0 or document_ids.flatten()[i] != document_ids.flatten()[i - 1]]
    assert bounds.tolist() == [*starts, B * T]
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    ours = gpu_figures.varlen_attend(rows, bounds, int(bounds.diff().max())).view(B, T, 4, D).transpose(1, 2)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(document_ids), enable_gqa=True)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_both_lists_are_timed_forward_and_backward(packed, monkeypatch):
    lists = []

    def noted(q, *arguments, **options):
        lists.append(arguments[2])
        return kernel(q, *arguments, **options)

    monkeypatch.setattr(varlen, "varlen_attn", noted)
    exact, fixed = gpu_figures.varlen_attention(*packed, turn_s=0.001)
    assert exact.what.endswith("a list of its documents") and fixed.what.endswith("a list of a fixed length")
    assert exact.value > 0 and fixed.value > 0 and exact.unit == fixed.unit == "ms"
    assert {len(bounds) for bounds in lists} == {len(gpu_figures.document_bounds(packed[3])), B * T + 1}
    assert all(int(bounds[-1]) == B * T for bounds in lists)


def test_a_torch_without_it_says_so(packed, monkeypatch):
    monkeypatch.delattr(varlen, "varlen_attn")
    exact, fixed = gpu_figures.varlen_attention(*packed, turn_s=0.001)
    assert "does not work here" in exact.value and "varlen_attn" in exact.value
    assert "does not work here" in fixed.value


def test_a_side_that_does_not_run_here_leaves_the_others_their_figures(monkeypatch):
    """As one that needs more memory than the card has. The run of bench.py leaves what it would."""
    ours = {"text_tokens_per_second": 100.4, "utilisation": 0.151, "peak_memory_bytes": 3e9, "first_update_seconds": 7}
    ran = []

    def run(command, **options):
        ran.append(command)
        record = {"sides": {"ours": ours}, "ratios": {"ours / plain-bf16, text tokens": (3.0, 2.5, 3.5)}}
        Path(command[command.index("--out") + 1]).write_text(json.dumps([record]))

    monkeypatch.setattr(gpu_figures.subprocess, "run", run)
    found = list(gpu_figures.step_of_electra(torch.device("cuda"), gpu_figures.FULL))
    assert [(figure.what, figure.value, figure.predicted) for figure in found] == [
        ("plain", "does not run here; its error stands above", ""),
        ("plain-bf16", "does not run here; its error stands above", ""),
        ("ours: text tokens", 100, ""),
        ("ours: share of the product rate", 15.1, "15 to 20"),
        ("ours: peak memory", 3.0, ""),
        ("ours: first update", 7, ""),
        ("ours / plain-bf16, text tokens", "3.00 (2.50 to 3.50)", "3 or more"),
    ]
    # bench.py takes the flags, and has the sides of this size.
    args = bench_parser().parse_args(ran[0][2:])
    assert args.device == "cuda" and args.rows is None
    assert all(has_side(args.sizes, side) for side in args.sides.split(","))
