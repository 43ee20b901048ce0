"""How long a run of --budget takes to the loss that another trainer has after so many minutes.

    python benchmarks/time_to_loss.py --rival plain --minutes 150 --budget 6m --data_path en.jsonl zh.jsonl --val_path valid.jsonl
    python benchmarks/time_to_loss.py --rival hf --minutes 60 --budget 15m --rates 5e-4 1e-3 2e-3 \\
        --data_path en.jsonl zh.jsonl --val_path valid.jsonl

    plain   the public loop with its defaults: 26 M parameters, updates of 8 x 512, one padded document a row, AdamW, float32
    hf      the Hugging Face Trainer with Llama of the same shape: bfloat16, full rows, fused AdamW, a rate that falls to 0

benchmarks/bench.py measures how many updates the other trainer makes in its minutes. This trainer then makes them in its place,
with the same mathematics on faster code, at each of `--rates`; the best one counts. Its schedule ends with its minutes. Last comes
a run of `--budget`, from fresh weights. Nothing else should run beside the first part and the last one. What is finished is kept
in `--work`: the same command goes on where it was stopped.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import time_to_loss_parser

    time_to_loss_parser().parse_args()

import argparse
import json
import subprocess
from dataclasses import dataclass
from typing import Any

from benchmarks.arguments import time_to_loss_parser
from benchmarks.trained import Outcome, flag_words, text_words, trained
from trainer.budget.settings import seconds_of

BENCH = ROOT / "benchmarks" / "bench.py"
ROWS = 8
T = 512


@dataclass(frozen=True)
class Rival:
    """Another trainer. sides: what bench.py calls its forms, the fastest of which counts. positions: of an update, as bench.py
    counts them. flags: what makes this trainer's mathematics those of the other one."""

    sides: tuple[str, ...]
    positions: int
    rates: tuple[float, ...]
    flags: dict[str, object]


RIVALS = {
    # The last token of a row is a target alone.
    "plain": Rival(("plain",), ROWS * (T - 1), (5e-4,), {"pack": 0, "dtype": "float32", "lr_schedule": "minimind"}),
    "hf": Rival(("hf", "hf-compiled"), ROWS * T, (5e-4, 1e-3, 2e-3), {"dtype": "bfloat16", "lr_schedule": "linear"}),
}


def updates_in(minutes: float, positions_per_second: float, rival: Rival) -> int:
    """The whole updates that a trainer makes in so many minutes."""
    return int(60 * minutes * positions_per_second / rival.positions)


def fastest(record: dict[str, Any], rival: Rival) -> float:
    """Positions a second of the rival's fastest form. record: of bench.py. Errors: SystemExit where none could start."""
    rates = [record["sides"][name]["positions_per_second"] for name in rival.sides if name in record["sides"]]
    if not rates:
        raise SystemExit(f"bench.py could not start {' or '.join(rival.sides)}")
    return float(max(rates))


def measured(args: argparse.Namespace, rival: Rival) -> float:
    """Positions a second of the rival, unless an earlier start has measured them."""
    kept = Path(args.work) / f"{args.rival}_speed.json"
    if not kept.exists():
        flags = {"sizes": "26m", "rows": ROWS, "max_seq_len": T, "seconds": args.seconds, "out": kept}
        words = [sys.executable, str(BENCH), "--sides", ",".join((*rival.sides, "ours")), *flag_words(flags)]
        subprocess.run(words, check=True)
    (record,) = json.loads(kept.read_text(encoding="utf-8"))
    return fastest(record, rival)


def rival_flags(rival: Rival, rate: float, updates: int) -> dict[str, object]:
    """The flags of this trainer for the updates of the other one."""
    of_all = {"optimizer": "adamw", "max_seq_len": T, "batch_size": ROWS, "accumulation_steps": 1}
    return {**of_all, **rival.flags, "learning_rate": rate, "max_updates": updates}


def run(args: argparse.Namespace, name: str, flags: dict[str, object]) -> Outcome:
    """Train, unless an earlier start has done it."""
    own = {"eval_interval": 0, "seed": args.seed, "report": 0}
    end = trained(Path(args.work) / name, [*text_words(args), *flag_words({**own, **flags})])
    print(f"{name}: {end.bits_per_byte:.4f} bits per byte", flush=True)
    return end


def row(name: str, minutes: float, end: Outcome) -> str:
    """A line of the table."""
    return (
        f"| {name} | {minutes:g} | {end.parameters / 1e6:.2f} M | {end.updates:,} | {end.tokens / 1e6:.2f} M | {end.val_loss:.3f} "
        f"| {end.bits_per_byte:.4f} |"
    )


def main() -> None:
    args = time_to_loss_parser().parse_args()
    rival = RIVALS[args.rival]
    Path(args.work).mkdir(parents=True, exist_ok=True)
    per_second = measured(args, rival)
    updates = updates_in(args.minutes, per_second, rival)
    print(f"{args.rival}: {per_second:,.0f} positions/s, {updates:,} updates in {args.minutes:g} minutes", flush=True)
    ends = {}
    for rate in args.rates or rival.rates:
        name = f"{args.rival}, {updates} updates, rate {rate:g}".replace(", ", "_").replace(" ", "_")
        ends[rate] = run(args, name, rival_flags(rival, rate, updates))
    best = min(ends, key=lambda rate: ends[rate].bits_per_byte)
    ours = run(args, f"budget_{args.budget}", {"budget": args.budget})
    minutes = seconds_of(args.budget) / 60
    print(
        "\n| trainer | minutes | parameters | updates | tokens | loss | bits per byte |\n|---|---|---|---|---|---|---|"
    )
    for rate, end in ends.items():
        print(row(f"{args.rival}, rate {rate:g}", args.minutes, end))
    print(row(f"--budget {args.budget}", minutes, ours))
    goal = f"the loss that {args.rival} has after {args.minutes:g} minutes"
    if ours.bits_per_byte <= ends[best].bits_per_byte:
        print(f"\n--budget {args.budget} reaches {goal}: {args.minutes / minutes:.1f} times as fast.")
    else:
        print(f"\n--budget {args.budget} does not reach {goal}.")


if __name__ == "__main__":
    main()
