"""Which flags learn more from as many floating-point operations, with the spread of the seeds.

    python benchmarks/sweep.py --flops 1e13 --hidden_size 128 --data_path en.jsonl --val_path valid.jsonl \\
        --variants "half the batch=--batch_size 2" "higher rates=--muon_lr 0.02 --learning_rate 0.016"

The first line of the table is the trainer's own plan for that size; each variant is the same with its flags. Every line is
trained with all of `--seeds`. "better" and "worse": the means differ by more than the larger of the two deviations. Finished
runs are kept in `--work`: the same command with one variant more trains that alone, and other programs change nothing.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import sweep_parser

    sweep_parser().parse_args()

import argparse
import shlex
from collections.abc import Sequence
from statistics import mean, stdev

from benchmarks.arguments import sweep_parser
from benchmarks.trained import Outcome, flag_words, text_words, trained
from common.errors import UserError
from trainer.machine.command_line import run_cli

AS_PLANNED = "as planned"


def variants_of(words: Sequence[str]) -> dict[str, list[str]]:
    """{name: its flags} of NAME=FLAGS, the plan itself first. Errors: UserError for a word that is none."""
    found: dict[str, list[str]] = {AS_PLANNED: []}
    for word in words:
        name, equals, flags = word.partition("=")
        if not equals or not name or name in found:
            raise UserError(f'--variants "{word}": give NAME=FLAGS, each name once, as "half the batch=--batch_size 2"')
        try:
            found[name] = shlex.split(flags)
        except ValueError as error:
            raise UserError(f'--variants "{word}": {error}') from error
    return found


def run(args: argparse.Namespace, name: str, flags: Sequence[str], seed: int) -> Outcome:
    """Train a variant with one seed, unless an earlier start has done it."""
    folder = Path(args.work) / f"{args.flops:g}_{args.hidden_size}_{name}_seed{seed}".replace(" ", "_")
    own = {"budget_flops": f"{args.flops:g}", "hidden_size": args.hidden_size, "seed": seed, "report": 0}
    end = trained(folder, [*flag_words(own), *text_words(args), *args.flags, *flags])
    print(f"{name}, seed {seed}: {end.bits_per_byte:.4f} bits per byte", flush=True)
    return end


def verdict(figures: Sequence[float], planned: Sequence[float]) -> str:
    """How the bits per byte of a variant's seeds compare with those of the plan's."""
    if len(figures) < 2:
        return "one seed"
    difference = mean(figures) - mean(planned)
    if abs(difference) <= max(stdev(figures), stdev(planned)):
        return "within the spread"
    return "better" if difference < 0 else "worse"


def row(name: str, flags: Sequence[str], ends: Sequence[Outcome], planned: Sequence[Outcome]) -> str:
    """A line of the table."""
    figures = [end.bits_per_byte for end in ends]
    of_plan = [end.bits_per_byte for end in planned]
    deviation = f" ± {stdev(figures):.4f}" if len(figures) > 1 else ""
    said = "" if name == AS_PLANNED else verdict(figures, of_plan)
    ratio = mean(figures) / mean(of_plan)
    return f"| {name} | `{shlex.join(flags)}` | {mean(figures):.4f}{deviation} | {ratio:.4f} | {said} |"


def main() -> None:
    args = sweep_parser().parse_args()
    variants = variants_of(args.variants)
    Path(args.work).mkdir(parents=True, exist_ok=True)
    ends: dict[str, list[Outcome]] = {}
    for name, flags in variants.items():
        ends[name] = [run(args, name, flags, seed) for seed in args.seeds]
    print("\n| run | flags | bits per byte | of the plan's | |\n|---|---|---|---|---|")
    for name, flags in variants.items():
        print(row(name, flags, ends[name], ends[AS_PLANNED]))


if __name__ == "__main__":
    run_cli(main)
