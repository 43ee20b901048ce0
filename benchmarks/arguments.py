"""The flags of the benchmarks. Nothing here needs torch, so `--help` and a wrong flag are answered at once.

What only torch knows, the number of threads and the device, is None here and filled in by the benchmark.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from common.flags import Parser, positive, seed
from common.paths import ROOT
from trainer.budget.settings import duration

# Measuring corpora, public tokenizers, GLUE files and golden outputs, which the repository does not hold: docs/corpora.md tells
# how to make them. Tests that need them are skipped where they are absent, and benchmarks take the embedded corpus.
REFERENCE = Path(os.environ.get("MINIMIND_REFERENCE") or ROOT.parent / "shared")
CORPORA = REFERENCE / "corpora"
# Shapes of the model by name: what differs from MiniMindConfig's defaults
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2},
    "26m": {},
    "104m": {"hidden_size": 768, "num_hidden_layers": 16},
    "64m": {"generation": "minimind3"},
    "moe": {"use_moe": True},
}
# sides of bench.py
SIDES = ("plain", "hf", "hf-compiled", "ours")
DATA_SECTIONS = ("tokenise", "packing", "planning", "loader")
# Of gpu.py, in their order
GPU_SECTIONS = (
    "machine",
    "throughput",
    "trainer",
    "numbers",
    "waiting and graphs",
    "bad numbers",
    "against the plain loop",
    "ELECTRA and GLUE",
)
# sections that run where nothing else is asked for: they fit nine minutes
USUAL_SECTIONS = tuple(range(7))
# Of gpu_bits.py: a model, how it is computed, and what trains it; or the trainer with flags.
GPU_BITS_CASES = (
    "plain",
    "plain float32",
    "compiled with PyTorch's attention",
    "Flex",
    "Flex Muon",
    "Flex minimind3",
    "Flex minimind2 MoE",
    # Two equal micro-batches had other gradients in front of the norm behind attention.
    "Flex minimind2 MoE 2 x 511",
    "Flex 26m",
    # Between two lines of the log nobody waits for the device.
    "trainer --use_compile 0 --log_interval 50",
    "trainer --use_compile 1 --log_interval 50",
    "trainer --use_compile 1 --cuda_graphs 0 --log_interval 50",
    "trainer --use_compile 1 --use_moe 1 --optimizer muon --log_interval 50",
)
BEST_DEVICE = "cuda:0, mps or cpu (default: the first of them that is there)"


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds each flag's default to its help, unless the help tells it in words or there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told_in_words = "default" in (action.help or "")
        has_none = action.default is None or action.default == []
        if told_in_words or has_none:
            return action.help
        return super()._get_help_string(action)


def new_parser(name: str, description: str) -> Parser:
    return Parser(prog=name, description=description, formatter_class=HelpWithDefaults)


def counts(text: str) -> list[int]:
    """Positive numbers between commas. Errors: ArgumentTypeError."""
    return [positive(int)(part) for part in text.split(",")]


def bench_parser() -> Parser:
    """The flags of bench.py."""
    p = new_parser("bench.py", "Training speed against the plain MiniMind loop and the Hugging Face Trainer.")
    p.add_argument("--sizes", default="26m", help=f"of {', '.join(SIZES)}")
    p.add_argument("--threads", type=counts, help="such as 1,2: one run for each (default: one a core)")
    p.add_argument("--sides", default=",".join(SIDES), help="those to compare")
    p.add_argument("--seconds", type=positive(float), default=240, help="for one size and thread count, all in all")
    p.add_argument(
        "--slice", type=positive(float), default=3.0, help="seconds of a turn; a turn is one update at least"
    )
    p.add_argument("--rows", type=positive(int), help="of a micro-batch (default: 32 on a GPU, 8 on a CPU)")
    p.add_argument("--max_seq_len", type=positive(int), default=512, help="positions in a row")
    p.add_argument("--documents", type=positive(int), default=4000, help="how many")
    p.add_argument("--use_compile", choices=("0", "1"), default="1", help="ours")
    p.add_argument("--device", help=BEST_DEVICE)
    p.add_argument("--out", default=str(ROOT / "out" / "bench.json"), help="all figures, in JSON")
    # This process is that side.
    p.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    p.add_argument("--started", type=float, help=argparse.SUPPRESS)
    p.add_argument("--documents_file", help=argparse.SUPPRESS)
    return p


def budget_parser() -> Parser:
    """The flags of budget.py."""
    p = new_parser("budget.py", "A plan of --budget against configurations that a person would try around it.")
    p.add_argument("--budget", type=duration, default="3m", help="of each run")
    _add_paths(p)
    p.add_argument("--only", nargs="+", help="names of the configurations to try (default: all)")
    p.add_argument("--timed_updates", type=positive(int), default=40, help="of a short run that tells the speed")
    p.add_argument("--seed", type=seed, default=42, help="of all runs")
    p.add_argument("--work", default=str(ROOT / "out" / "budget"), help="folder of the runs")
    return p


def _add_paths(p: Parser) -> None:
    """The text of runs of the trainer."""
    p.add_argument("--data_path", nargs="+", required=True, help="as of the trainer")
    p.add_argument("--val_path", nargs="+", required=True, help="as of the trainer")


def data_parser() -> Parser:
    """The flags of data.py."""
    p = new_parser("data.py", "The figures of the data engine: tokenising, loading, start, packing, memory.")
    p.add_argument("--only", default=",".join(DATA_SECTIONS), help="sections, with commas")
    p.add_argument("--documents", type=positive(int), default=20_000_000, help="to plan an epoch of")
    return p


def gpu_parser() -> Parser:
    """The flags of gpu.py."""
    p = new_parser("gpu.py", "Whether training is right and fast on this GPU.")
    p.add_argument(
        "--sections", type=int, nargs="+", choices=range(len(GPU_SECTIONS)), help="their numbers (default: 0 to 6)"
    )
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: whether this command itself works")
    p.add_argument("--seconds", choices=("full", "small"), default="full", help="small: little models, short turns")
    p.add_argument("--out", default=str(ROOT / "out" / "gpu.jsonl"), help="all results, one in a line, as they come")
    p.add_argument(
        "--cache", default=str(ROOT / "out" / "gpu_cache"), help="folder of compiled code, kept for the next time"
    )
    # This process is that section.
    p.add_argument("--section", type=int, choices=range(len(GPU_SECTIONS)), help=argparse.SUPPRESS)
    return p


def gpu_bits_parser() -> Parser:
    """The flags of gpu_bits.py."""
    p = new_parser("gpu_bits.py", "Which tensor differs first between two equal runs on this GPU.")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: whether this command itself works")
    p.add_argument("--cases", nargs="+", choices=GPU_BITS_CASES, help="some of them (default: all)")
    # This process is a side of that case.
    p.add_argument("--side", choices=GPU_BITS_CASES, help=argparse.SUPPRESS)
    return p


def optimizers_parser() -> Parser:
    """The flags of optimizers.py."""
    p = new_parser("optimizers.py", "Tokens that Muon needs for the validation loss that tuned AdamW reaches.")
    _add_paths(p)
    p.add_argument("--hidden_size", type=positive(int), default=256, help="width of the model")
    p.add_argument("--tokens", type=positive(int), default=4_000_000, help="that AdamW trains")
    p.add_argument("--num_seeds", type=positive(int), default=3, help="runs of each")
    p.add_argument("--rates", type=positive(float), nargs="+", default=[2.5e-4, 5e-4, 1e-3, 2e-3], help="of AdamW")
    p.add_argument("--muon_rate", type=positive(float), default=2e-3, help="of what AdamW trains beside Muon")
    p.add_argument("--shares", type=positive(float), nargs="+", default=[0.6], help="of the tokens, for Muon")
    p.add_argument("--work", default=str(ROOT / "out" / "optimizers"), help="folder of the runs")
    return p


def time_to_loss_parser() -> Parser:
    """The flags of time_to_loss.py."""
    p = new_parser(
        "time_to_loss.py", "Whether a run of --budget reaches the loss that another trainer has after so many minutes."
    )
    p.add_argument("--rival", choices=("plain", "hf"), required=True, help="the other trainer")
    p.add_argument("--minutes", type=positive(float), required=True, help="that it trains")
    p.add_argument("--budget", type=duration, required=True, help="of this trainer's run")
    p.add_argument(
        "--rates", type=positive(float), nargs="+", help="of the other trainer (default: plain its own, hf three)"
    )
    p.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the matrix products of its updates, as they are made here (default: as it makes them itself)",
    )
    _add_paths(p)
    p.add_argument(
        "--seconds", type=positive(float), default=240, help="in which the rival is started and its speed measured"
    )
    p.add_argument("--seed", type=seed, default=42, help="of all runs")
    p.add_argument("--work", default=str(ROOT / "out" / "time_to_loss"), help="folder of the runs")
    return p
