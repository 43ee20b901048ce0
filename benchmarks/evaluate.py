"""Minimal pairs per second of scripts/evaluate.py against the obvious scorer: a sentence at a time, fp32, all logits.

    python benchmarks/evaluate.py                                    # 26 M random weights, 1,000 pairs
    python benchmarks/evaluate.py --weight out/pretrain_512.pth --data_path blimp/*.jsonl

The two take turns, a slice of the pairs each, so that what else the machine does meets both. Prints pairs/s, the ratio
by the clock and by CPU time (which other processes disturb less), and how far the margins are apart: the differences of
log-probability between the good and the bad sentence.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import evaluate_parser

    evaluate_parser().parse_args()

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pydoc_data import topics

import torch
from transformers import PreTrainedModel

from benchmarks.arguments import evaluate_parser
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.common import load_model
from scripts.evaluate import precision
from scripts.scoring import Group, batches, score_groups
from scripts.tasks import Limits, Pairs, records, start_ids
from trainer.machine.command_line import run_cli

# Two sentences as ids: the good one, the bad one.
Pair = list[list[int]]


@torch.no_grad()
def plain_score(model: PreTrainedModel, ids: list[int]) -> float:
    """log P(ids) without the first: one sentence, one forward, all logits."""
    logprobs = model(torch.tensor([ids[:-1]])).logits.log_softmax(-1)
    return float(logprobs[0].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).sum())


def plain_margins(model: PreTrainedModel, pairs: Sequence[Pair], chosen: range) -> list[float]:
    """Of the chosen pairs: log P(good) - log P(bad)."""
    margins = []
    for i in chosen:
        good, bad = pairs[i]
        margins.append(plain_score(model, good) - plain_score(model, bad))
    return margins


def our_margins(
    model: PreTrainedModel, groups: Sequence[Group], dtype: str, batch_tokens: int, chosen: range
) -> list[float]:
    """The same by scripts/evaluate.py, in any order of work."""
    own = [groups[i] for i in chosen]
    margins = [0.0] * len(own)
    with precision(model, dtype):
        for batch in batches(own, batch_tokens):
            scores = score_groups(model, [own[b] for b in batch])
            for b, (good, bad) in zip(batch, scores, strict=True):
                margins[b] = good.logprob - bad.logprob
    return margins


def write_pairs(path: str | Path, n: int, seed: int = 0) -> None:
    """Sentences of 5 to 12 words out of Python's documentation; the bad one has two neighbouring words exchanged."""
    words = " ".join(topics.topics[key] for key in sorted(topics.topics)).split()
    generator = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        while n:
            at = generator.randrange(len(words) - 12)
            length = generator.randint(5, 12)
            good = words[at : at + length]
            i = generator.randrange(length - 1)
            bad = [*good[:i], good[i + 1], good[i], *good[i + 2 :]]
            if good != bad:
                file.write(json.dumps({"sentence_good": " ".join(good), "sentence_bad": " ".join(bad)}) + "\n")
                n -= 1


def main() -> None:
    args = evaluate_parser().parse_args()
    args.threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = load_model(args.weight) if args.weight else MiniMindForCausalLM(MiniMindConfig()).eval()
    encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
    with tempfile.TemporaryDirectory() as folder:
        paths = args.data_path or [f"{folder}/pairs.jsonl"]
        if not args.data_path:
            write_pairs(paths[0], args.pairs)
        groups = [item.groups[0] for item in Pairs().items(paths, encoder, Limits(512, 256, " "))]
        fields = {"sentence_good": str, "sentence_bad": str}
        pairs = [[start_ids(encoder, record[name]) for name in fields] for _, record in records(paths, fields)]

    scorers: dict[str, Callable[[range], list[float]]] = {"plain, float32": partial(plain_margins, model, pairs)}
    for dtype in args.dtypes:
        scorers[f"evaluate.py, {dtype}"] = partial(our_margins, model, groups, dtype, args.batch_tokens)
    seconds = dict.fromkeys(scorers, 0.0)
    cpu = dict.fromkeys(scorers, 0.0)
    margins: dict[str, list[float]] = {name: [] for name in scorers}
    # To warm up
    for score in scorers.values():
        score(range(min(5, len(pairs))))
    for i in range(args.slices):
        chosen = range(len(pairs) * i // args.slices, len(pairs) * (i + 1) // args.slices)
        for name, score in scorers.items():
            start = time.perf_counter()
            start_cpu = time.process_time()
            margins[name] += score(chosen)
            seconds[name] += time.perf_counter() - start
            cpu[name] += time.process_time() - start_cpu
    tokens = sum(len(ids) - 1 for pair in pairs for ids in pair) / len(pairs) / 2
    print(f"{len(pairs):,} pairs, {tokens:.1f} tokens a sentence, {args.threads} threads")
    reference = margins["plain, float32"]
    for name in scorers:
        apart = max(abs(a - b) for a, b in zip(margins[name], reference, strict=True))
        same = sum((a > 0) == (b > 0) for a, b in zip(margins[name], reference, strict=True)) / len(pairs)
        wall = seconds["plain, float32"] / seconds[name]
        work = cpu["plain, float32"] / cpu[name]
        print(
            f"{name:22} {len(pairs) / seconds[name]:7.1f} pairs/s, {wall:5.2f}x ({work:.2f}x by CPU time), "
            f"margins within {apart:.1e}, {same:.1%} same verdicts"
        )


if __name__ == "__main__":
    run_cli(main)
