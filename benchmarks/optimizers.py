"""Tokens that Muon needs for the validation loss that tuned AdamW reaches.

    python benchmarks/optimizers.py                                    # 7 M model, 4 M tokens, 3 seeds: an hour and a half on two cores
    python benchmarks/optimizers.py --hidden_size 512 --shares 0.6     # the 26 M model: about 4 hours
    python benchmarks/optimizers.py --tokens 100000 --num_seeds 1 --rates 2e-3     # to see it work

AdamW trains `--tokens` tokens of en_wiki and zh_wiki with each of `--rates`, and with every seed at the best of them.
Muon trains `--shares` of the tokens with every seed. Where MINIMIND_REFERENCE leads to no corpora, the embedded corpus
is the text. Both sides are trained by the trainer itself, in the same model, initialisation, batch and linear schedule,
which ends with the run. Finished runs are kept in `--work`: the same command goes on where it was stopped.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    from common.start import begin

    begin(ends_at_ctrl_c=False)
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from benchmarks.arguments import optimizers_parser

    optimizers_parser().parse_args()

import argparse
import itertools
import json
from collections.abc import Sequence
from statistics import mean

from benchmarks.arguments import optimizers_parser
from benchmarks.bench import sources
from benchmarks.trained import flag_words, trained
from common.errors import UserError
from common.files import atomic_file
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from trainer.machine.command_line import run_cli

# Documents of each source, the first ones; training begins after them.
VALIDATION = 60


def write_corpora(work: Path, sizes: Sequence[int]) -> None:
    """For each number of tokens {size}.jsonl of the documents that hold so many, and valid.jsonl, which comes last: where it is
    there, all of them are. Errors: UserError."""
    encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
    texts = itertools.chain.from_iterable(zip(*sources(), strict=False))
    held_out = [line_of(text) for text in itertools.islice(texts, VALIDATION * len(sources()))]
    documents = []
    # Tokens to train up to the end of each document.
    ends = [0]
    for text in texts:
        documents.append(line_of(text))
        ends.append(ends[-1] + len(encoder.encode([text])[0]) - 1)
        if ends[-1] >= max(sizes):
            break
    if ends[-1] < max(sizes):
        raise UserError(
            f"the texts have {ends[-1]:,} tokens, and {max(sizes):,} are asked for: give a smaller --tokens"
        )
    for size in sizes:
        kept = sum(end <= size for end in ends[1:])
        write_lines(work / f"{size}.jsonl", documents[:kept])
    write_lines(work / "valid.jsonl", held_out)


def line_of(text: str) -> str:
    """A document as a line of jsonl."""
    return json.dumps({"text": text}) + "\n"


def write_lines(path: Path, lines: Sequence[str]) -> None:
    with atomic_file(path) as file:
        file.write("".join(lines).encode())


def val_loss(work: Path, args: argparse.Namespace, size: int, optimizer: str, rate: float, seed: int) -> float:
    """Validation loss after training on {size}.jsonl once."""
    out = work / f"{optimizer}_{rate:g}_{size}_{args.hidden_size}_seed{seed}"
    settings = {
        "data_path": work / f"{size}.jsonl", "val_path": work / "valid.jsonl", "eval_interval": 0,
        "optimizer": optimizer, "learning_rate": rate, "lr_schedule": "linear", "warmup_iters": 20, "seed": seed,
        "hidden_size": args.hidden_size, "init_scheme": "zero_out", "batch_size": 8, "accumulation_steps": 1,
        "num_workers": 0, "report": 0,
    }  # fmt: skip
    loss = trained(out, flag_words(settings)).val_loss
    print(f"{optimizer:6} learning rate {rate:g}, {size:,} tokens, seed {seed}: validation loss {loss:.4f}", flush=True)
    return loss


def main() -> None:
    args = optimizers_parser().parse_args()
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    shares = {share: round(args.tokens * share) for share in args.shares}
    sizes = [args.tokens, *shares.values()]
    if not all((work / f"{name}.jsonl").exists() for name in ("valid", *sizes)):
        write_corpora(work, sizes)

    swept = {rate: val_loss(work, args, args.tokens, "adamw", rate, 1) for rate in args.rates}
    best = min(swept, key=swept.__getitem__)
    adamw = [val_loss(work, args, args.tokens, "adamw", best, seed) for seed in range(1, args.num_seeds + 1)]
    print(
        f"AdamW, {args.tokens:,} tokens, learning rate {best:g}: {mean(adamw):.4f} ({min(adamw):.4f} to {max(adamw):.4f})"
    )
    for share, size in shares.items():
        muon = [val_loss(work, args, size, "muon", args.muon_rate, seed) for seed in range(1, args.num_seeds + 1)]
        verdict = "missed"
        if mean(muon) <= mean(adamw):
            verdict = "reached on average"
        if max(muon) <= mean(adamw):
            verdict = "reached by all"
        print(f"Muon, {share:.0%} of the tokens: {mean(muon):.4f} ({min(muon):.4f} to {max(muon):.4f}): {verdict}")


if __name__ == "__main__":
    run_cli(main)
