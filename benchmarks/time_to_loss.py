"""Does a run of --budget reach the loss of another trainer after a given number of minutes?

    python benchmarks/time_to_loss.py --rival plain --minutes 150 --budget 6m --data_path en.jsonl zh.jsonl --val_path valid.jsonl
    python benchmarks/time_to_loss.py --rival hf --minutes 60 --budget 15m --rates 5e-4 1e-3 2e-3 \\
        --data_path en.jsonl zh.jsonl --val_path valid.jsonl

    plain   the public loop with its defaults: 26 M parameters, updates of 8 x 512, one padded document a row, AdamW; float32 on
            a CPU, bfloat16 on a GPU
    hf      the Hugging Face Trainer with Llama of the same shape: bfloat16, full rows, fused AdamW, linear decay to 0

benchmarks/bench.py measures how many updates the other trainer makes in its minutes. This faster trainer then makes them in its
place, with the same model, rows, precision, optimizer and schedule, at each of `--rates`; the best one counts. The schedule ends
with the minutes. On a CPU `--dtype bfloat16` makes the plain loop's updates in less than half the time. Last comes a run of
`--budget`, from fresh weights. Nothing else should run during the first and the last part. Finished parts are kept in `--work`:
the same command resumes where it was stopped.

Not copied: the plain loop's weight decay includes the norms; in the Hugging Face Trainer a token attends to earlier documents
of its row, and its Llama starts with transformers' own random weights.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.training import LEARNING_RATE
from common.errors import UserError
from common.files import digest_of_json
from common.flags import Parser, positive, seed
from common.start import ROOT
from trainer.machine.command_line import run_cli
from trainer.pretrain.settings import duration, seconds_of
from trainer.reporting.records import METRICS_SUFFIX, RunRecords

BENCH = ROOT / "benchmarks" / "bench.py"
TRAINER = ROOT / "trainer" / "train_pretrain.py"
ROWS = 8
T = 512


@dataclass(frozen=True)
class Rival:
    """Another trainer. sides: its variants in bench.py; the fastest counts. rates: those to try. cpu_dtype: of its matrix
    products on a CPU; on a GPU all are in bfloat16. flags: make this trainer train like it."""

    sides: tuple[str, ...]
    rates: tuple[float, ...]
    cpu_dtype: str
    flags: Mapping[str, object]


RIVALS = {
    "plain": Rival(("plain",), (LEARNING_RATE,), "float32", {"pack": 0, "lr_schedule": "minimind"}),
    "hf": Rival(("hf", "hf-compiled"), (5e-4, 1e-3, 2e-3), "bfloat16", {"lr_schedule": "linear"}),
}


def flag_args(changes: Mapping[str, object]) -> list[str]:
    """{flag: value} as the words of a command line."""
    return [word for flag, value in changes.items() for word in (f"--{flag}", str(value))]


def measured(args: argparse.Namespace, rival: Rival) -> tuple[float, str]:
    """(updates a second of the rival's fastest variant, their device), measured now or by an earlier start.
    Errors: UserError if no variant could start."""
    bench_file = Path(args.work) / f"{args.rival}_bench.json"
    # bench.py creates it, empty, at its start.
    if not bench_file.exists() or not bench_file.stat().st_size:
        flags = {"sizes": "26m", "rows": ROWS, "max_seq_len": T, "seconds": args.seconds, "out": bench_file}
        words = [sys.executable, str(BENCH), *flag_args(flags), "--sides", *rival.sides]
        code = subprocess.run(words, check=False).returncode
        if code:
            raise UserError(f"bench.py ended with exit code {code} and has not measured {args.rival}")
    (bench,) = json.loads(bench_file.read_text(encoding="utf-8"))
    for name in rival.sides:
        if name not in bench["sides"]:
            print(f"{name} could not start and is left out; to measure again remove {bench_file}", flush=True)
    rates = []
    for side in bench["sides"].values():
        rates.append(median(part["updates"] / part["seconds"] for part in side["slices"]))
    return max(rates), bench["device"]


def rival_flags(rival: Rival, dtype: str, rate: float, updates: int) -> dict[str, object]:
    """The flags of this trainer for the rival's updates, with matrix products in `dtype`."""
    shape = {"max_seq_len": T, "batch_size": ROWS, "accumulation_steps": 1, "dtype": dtype}
    return {**rival.flags, **shape, "optimizer": "adamw", "learning_rate": rate, "max_updates": updates}


def trained(work: Path, name: str, flags: Sequence[str]) -> float:
    """Print the figures of a run of train_pretrain.py, and return its bits per byte. A run that an earlier start of this command has begun
    or finished is resumed.

    Errors: UserError that names the log of a failed run.
    """
    # With a digest of its flags, so that no run is taken for another
    folder = work / f"{name}_{digest_of_json(flags)[:8]}"
    folder.mkdir(exist_ok=True)
    path = folder / "log.txt"
    command = [sys.executable, str(TRAINER), *flags, "--out_dir", str(folder), "--from_resume", "1"]
    with open(path, "a", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise UserError(f"{TRAINER.name} ended with exit code {code}; its log: {path}")
    (metrics,) = folder.glob(f"*{METRICS_SUFFIX}")
    run = RunRecords.read(metrics)
    figures = dict(run.figures())
    parameters = run.start_record("model")["parameters"]
    print(f"{name}: {parameters:,} parameters;", ", ".join(map(" ".join, figures.items())), flush=True)
    return float(figures["bits per byte"])


def main(argv: Sequence[str] | None = None) -> None:
    p = Parser(
        prog="time_to_loss.py",
        description="Does a run of --budget reach the loss of another trainer after some minutes?",
    )
    p.add_argument("--data_path", nargs="+", required=True, help="as for the trainer")
    p.add_argument("--val_path", nargs="+", required=True, help="as for the trainer")
    p.add_argument(
        "--work", default=str(ROOT / "out" / "time_to_loss"), help="folder of the runs (default: out/time_to_loss)"
    )
    p.add_argument("--rival", choices=tuple(RIVALS), required=True, help="the other trainer")
    p.add_argument("--minutes", type=positive(float), required=True, help="training time of the rival")
    p.add_argument("--budget", type=duration, required=True, help="of this trainer's run")
    p.add_argument("--rates", type=positive(float), nargs="+", help="learning rates (default: plain its own, hf three)")
    p.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="precision in which the rival's updates are made here (default: the rival's)",
    )
    p.add_argument("--seconds", type=positive(float), default=240, help="to measure the rival's speed (default 240)")
    p.add_argument("--seed", type=seed, default=42, help="of all runs (default 42)")
    args = p.parse_args(argv)
    rival = RIVALS[args.rival]
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    updates_per_second, device = measured(args, rival)
    updates = max(1, int(60 * args.minutes * updates_per_second))
    print(f"{args.rival}: {updates_per_second:.2f} updates/s, {updates:,} in {args.minutes:g} minutes", flush=True)
    dtype = args.dtype or (rival.cpu_dtype if device == "cpu" else "bfloat16")
    # The token cache is for all runs.
    shared = {"cache_dir": work / "cache", "eval_interval": 0, "seed": args.seed, "report": 0}
    flags = ["--data_path", *args.data_path, "--val_path", *args.val_path, *flag_args(shared)]
    bits = []
    for rate in args.rates or rival.rates:
        name = f"{args.rival}_{updates}_updates_{dtype}_rate_{rate:g}"
        bits.append(trained(work, name, [*flags, *flag_args(rival_flags(rival, dtype, rate, updates))]))
    goal = f"the loss that {args.rival} has after {args.minutes:g} minutes"
    if trained(work, f"budget_{args.budget}", [*flags, "--budget", args.budget]) <= min(bits):
        ratio = 60 * args.minutes / seconds_of(args.budget)
        print(f"\n--budget {args.budget} reaches {goal}: {ratio:.1f} times as fast, or faster.")
    else:
        print(f"\n--budget {args.budget} does not reach {goal}.")


if __name__ == "__main__":
    run_cli(main)
