"""Minimal pairs per second of scripts/evaluate.py against the obvious scorer: a sentence at a time, fp32, all logits.

    python benchmarks/evaluate.py                                    # 26 M random weights, 1,000 pairs
    python benchmarks/evaluate.py --weight out/pretrain_512.pth --data_path blimp/*.jsonl

The two take turns, a slice of the pairs each, so that what else the machine does meets both. Prints pairs/s, the ratio
by the clock and by CPU time (which other processes disturb less), and how far the differences of log-probability between good and bad are apart.
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
from pydoc_data import topics

import torch

from benchmarks.arguments import evaluate_parser
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.common import load_model
from scripts.evaluate import precision
from scripts.scoring import batches, score_groups
from scripts.tasks import Limits, Pairs, records, start_ids


@torch.no_grad()
def plain_score(model, ids):
    """log P(ids) without the first: one sentence, one forward, all logits."""
    logprobs = model(torch.tensor([ids[:-1]])).logits.log_softmax(-1)
    return float(logprobs[0].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).sum())


def write_pairs(path, n, seed=0) -> None:
    """Sentences of 5 to 12 words out of Python's documentation; the bad one has two neighbouring words exchanged."""
    words = " ".join(topics.topics[key] for key in sorted(topics.topics)).split()
    generator = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        while n:
            at, length = generator.randrange(len(words) - 12), generator.randint(5, 12)
            good = words[at : at + length]
            i = generator.randrange(length - 1)
            bad = [*good[:i], good[i + 1], good[i], *good[i + 2 :]]
            if good != bad:
                file.write(json.dumps({"sentence_good": " ".join(good), "sentence_bad": " ".join(bad)}) + "\n")
                n -= 1


def main(argv=None):
    args = evaluate_parser().parse_args(argv)
    args.threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = load_model(args.weight) if args.weight else MiniMindForCausalLM(MiniMindConfig()).eval()
    encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
    with tempfile.TemporaryDirectory() as folder:
        paths = args.data_path or [f"{folder}/pairs.jsonl"]
        if not args.data_path:
            write_pairs(paths[0], args.pairs)
        groups = [item.groups[0] for item in Pairs.items(paths, encoder, Limits(512, 256, " "))]
        fields = {"sentence_good": str, "sentence_bad": str}
        pairs = [[start_ids(encoder, record[name]) for name in fields] for _, record in records(paths, fields)]

    def plain(chosen):
        return [plain_score(model, pairs[i][0]) - plain_score(model, pairs[i][1]) for i in chosen]

    def ours(dtype):
        def score(chosen):
            margins = [0.0] * len(chosen)
            with precision(model, dtype):
                for batch in batches([groups[i] for i in chosen], args.batch_tokens):
                    for b, (good, bad) in zip(
                        batch, score_groups(model, [groups[chosen[b]] for b in batch]), strict=True
                    ):
                        margins[b] = good.logprob - bad.logprob
            return margins

        return score

    scorers = {"plain, float32": plain, **{f"evaluate.py, {dtype}": ours(dtype) for dtype in args.dtypes}}
    seconds, cpu, margins = dict.fromkeys(scorers, 0.0), dict.fromkeys(scorers, 0.0), {name: [] for name in scorers}
    for score in scorers.values():
        score(range(5))
    for i in range(args.slices):
        chosen = range(len(pairs) * i // args.slices, len(pairs) * (i + 1) // args.slices)
        for name, score in scorers.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            margins[name] += score(chosen)
            seconds[name] += time.perf_counter() - start
            cpu[name] += time.process_time() - start_cpu
    tokens = sum(len(ids) - 1 for pair in pairs for ids in pair) / len(pairs) / 2
    print(f"{len(pairs):,} pairs, {tokens:.1f} tokens a sentence, {args.threads} threads")
    reference = margins["plain, float32"]
    for name in scorers:
        apart = max(abs(a - b) for a, b in zip(margins[name], reference, strict=True))
        same = sum((a > 0) == (b > 0) for a, b in zip(margins[name], reference, strict=True)) / len(pairs)
        wall, work = (spent["plain, float32"] / spent[name] for spent in (seconds, cpu))
        print(
            f"{name:22} {len(pairs) / seconds[name]:7.1f} pairs/s, {wall:5.2f}x ({work:.2f}x by CPU time), "
            f"margins within {apart:.1e}, {same:.1%} same verdicts"
        )
    return cpu


if __name__ == "__main__":
    main()
