"""The flags of the benchmarks. Nothing here needs torch, so `--help` and a wrong flag are answered at once.

What only torch knows, the number of threads and the device, is None here and filled in by the benchmark.
"""

import argparse
import shlex
from typing import Any

from common.flags import HelpWithDefaults, Parser, not_negative, positive, seed
from common.paths import ROOT
from trainer.budget.settings import amount, duration

# Shapes of the model by name: what differs from MiniMindConfig's defaults
STEP_SIZES: dict[str, dict[str, Any]] = {
    "26m": {},
    "104m": {"hidden_size": 768, "num_hidden_layers": 16},
    "64m": {"generation": "minimind3"},
    "moe": {"use_moe": True},
}
MINIMIND_SIZES: dict[str, dict[str, Any]] = {"tiny": {"hidden_size": 64, "num_hidden_layers": 2}, **STEP_SIZES}
# What bench.py compares. The networks of electra have configs of their own, see electra_sides.py.
SIZES: dict[str, dict[str, Any]] = {**MINIMIND_SIZES, "electra": {}}
# plain-bf16 is of electra alone, hf and hf-compiled are of all others.
SIDES = ("plain", "plain-bf16", "hf", "hf-compiled", "ours")
# What worth.py calls the network without pretraining.
WITHOUT = "none"
DATA_SECTIONS = ("tokenise", "start", "packing", "planning", "loader", "mixture")
# Of gpu.py, in their order
GPU_SECTIONS = (
    "machine",
    "compiling",
    "numbers",
    "trainer",
    "waiting",
    "bad numbers",
    "throughput",
    "against the plain loop",
    "profile",
    "parts",
    "a step of ELECTRA",
    "ELECTRA and GLUE",
)
# Those of them that run where nothing else is asked for: they fit nine minutes.
USUAL_SECTIONS = tuple(range(10))
ALL_CORES = "of torch (default: one a core)"
BEST_DEVICE = "cuda:0, mps or cpu (default: the first of them that is there)"


def new_parser(name: str, description: str) -> Parser:
    return Parser(name, description, HelpWithDefaults)


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
    workers = "ours: processes that load batches (default: 1 on a GPU; on a CPU 0, each takes time from the training)"
    p.add_argument("--num_workers", type=not_negative(int), help=workers)
    p.add_argument("--cold", action="store_true", help="begin with an empty compile cache")
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
    p.add_argument("--seconds", type=positive(float), default=90, help="of the turns that tell how fast each is")
    p.add_argument("--seed", type=seed, default=42, help="of all runs")
    p.add_argument("--work", default=str(ROOT / "out" / "budget"), help="folder of the runs")
    return p


def _add_paths(p: Parser) -> None:
    """The text of runs of the trainer."""
    p.add_argument("--data_path", nargs="+", required=True, help="as of the trainer")
    p.add_argument("--val_path", required=True, help="as of the trainer")


def _add_flags_of_runs(p: Parser) -> None:
    """Those of benchmarks that train models with as many floating-point operations."""
    _add_paths(p)
    p.add_argument(
        "--flags", type=shlex.split, default=[], metavar='"--FLAG VALUE ..."', help="of the trainer, for all runs"
    )


def isoflop_parser() -> Parser:
    """The flags of isoflop.py."""
    p = new_parser("isoflop.py", "The best size for as many floating-point operations, and the law of the loss.")
    _add_flags_of_runs(p)
    p.add_argument("--flops", type=amount, nargs="+", default=[1e13, 4e13, 1.6e14], help="of a run")
    p.add_argument("--widths", type=positive(int), nargs="+", default=[64, 96, 128, 192, 256], help="of the models")
    p.add_argument("--seeds", type=seed, nargs="+", default=[42], help="each size is trained with each of them")
    p.add_argument("--max_seq_len", type=positive(int), default=512, help="positions in a row")
    p.add_argument("--work", default=str(ROOT / "out" / "isoflop"), help="folder of the runs")
    return p


def sweep_parser() -> Parser:
    """The flags of sweep.py."""
    p = new_parser("sweep.py", "Which flags learn more from as many floating-point operations.")
    _add_flags_of_runs(p)
    p.add_argument("--flops", type=amount, default=1e13, help="of a run")
    p.add_argument("--hidden_size", type=positive(int), default=128, help="width of the model")
    p.add_argument("--seeds", type=seed, nargs="+", default=[42, 43, 44], help="each line is trained with each of them")
    p.add_argument(
        "--variants",
        nargs="+",
        required=True,
        metavar='NAME="--FLAG VALUE ..."',
        help="what each differs in from the plan",
    )
    p.add_argument("--work", default=str(ROOT / "out" / "sweep"), help="folder of the runs")
    return p


def worth_parser() -> Parser:
    """The flags of worth.py."""
    p = new_parser("worth.py", "What pretraining is worth on GLUE, against the same network without.")
    p.add_argument("--data_dir", required=True, help="the benchmark's folder (with CoLA, SST-2 ...)")
    p.add_argument(
        "--networks",
        nargs="+",
        required=True,
        metavar="NAME=FOLDER",
        help="folders of runs of train_electra.py, or of save_pretrained; the first one's shape is fine-tuned without "
        "pretraining too",
    )
    p.add_argument("--task", default="cola,mrpc,stsb,sst2,rte", help="some of these, between commas")
    p.add_argument(
        "--num_seeds",
        type=positive(int),
        default=5,
        help="runs of each network on each task that the tables count; one more tries each of four tunings",
    )
    p.add_argument("--seed", type=seed, default=42, help="of the first run; the others have the next ones")
    p.add_argument("--work", default=str(ROOT / "out" / "worth"), help="folder of the fine-tunings")
    return p


def data_parser() -> Parser:
    """The flags of data.py."""
    p = new_parser("data.py", "The figures of the data engine: tokenising, loading, start, packing, memory.")
    p.add_argument("--only", default=",".join(DATA_SECTIONS), help="sections, with commas")
    p.add_argument("--huge", type=positive(float), metavar="GB", help="train on a jsonl of so many GB instead")
    p.add_argument("--work", help="folder for the data made here (default: a temporary one, removed at the end)")
    return p


def evaluate_parser() -> Parser:
    """The flags of evaluate.py."""
    p = new_parser("evaluate.py", "Minimal pairs per second of scripts/evaluate.py against the obvious scorer.")
    p.add_argument("--weight", help="a .pth (default: random weights of the default shape, 26 M)")
    p.add_argument("--data_path", nargs="+", help="jsonl (default: 1,000 pairs made of Python's documentation)")
    p.add_argument("--pairs", type=positive(int), default=1000, help="how many to make")
    p.add_argument("--slices", type=positive(int), default=10, help="turns of each scorer")
    p.add_argument("--batch_tokens", type=positive(int), default=1024, help="positions per forward")
    p.add_argument("--threads", type=positive(int), help=ALL_CORES)
    dtypes = ("float32", "bfloat16", "float16")
    p.add_argument("--dtypes", nargs="+", choices=dtypes, default=["float32", "bfloat16"], help="of ours")
    return p


def generate_parser() -> Parser:
    """The flags of generate.py."""
    p = new_parser("generate.py", "Tokens/s of scripts/generate.py against the loop that computes all text anew.")
    p.add_argument("--weight", help="a .pth (default: random weights of the default shape, 26 M)")
    p.add_argument("--tokens", type=positive(int), default=256, help="to generate")
    p.add_argument("--rounds", type=positive(int), default=3, help="turns of each side")
    p.add_argument("--threads", type=positive(int), help=ALL_CORES)
    return p


def gpu_parser() -> Parser:
    """The flags of gpu.py."""
    p = new_parser("gpu.py", "Whether training is right and fast on this GPU.")
    p.add_argument(
        "--sections", type=int, nargs="+", choices=range(len(GPU_SECTIONS)), help="their numbers (default: 0 to 9)"
    )
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: whether this command itself works")
    p.add_argument("--seconds", choices=("full", "small"), default="full", help="small: little models, short turns")
    p.add_argument("--out", default=str(ROOT / "out" / "gpu.jsonl"), help="all results, one in a line, as they come")
    # This process is that section.
    p.add_argument("--section", type=int, choices=range(len(GPU_SECTIONS)), help=argparse.SUPPRESS)
    return p


def guards_parser() -> Parser:
    """The flags of guards.py."""
    p = new_parser("guards.py", "What the guards against bad numbers and a save cost, on the 26 M model.")
    p.add_argument("--rows", type=positive(int), default=4, help="rows of 512 tokens an update")
    p.add_argument("--pairs", type=positive(int), default=20, help="guarded and plain updates to compare")
    p.add_argument("--saves", type=positive(int), default=4, help="saves to time")
    p.add_argument("--device", help=BEST_DEVICE)
    p.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of matrix products (autocast)"
    )
    return p


def optimizers_parser() -> Parser:
    """The flags of optimizers.py."""
    p = new_parser("optimizers.py", "Tokens that Muon needs for the validation loss that tuned AdamW reaches.")
    p.add_argument("--hidden_size", type=positive(int), default=256, help="width of the model")
    p.add_argument("--tokens", type=positive(int), default=4_000_000, help="that AdamW trains")
    p.add_argument("--num_seeds", type=positive(int), default=3, help="runs of each")
    p.add_argument("--rates", type=positive(float), nargs="+", default=[2.5e-4, 5e-4, 1e-3, 2e-3], help="of AdamW")
    p.add_argument("--muon_rate", type=positive(float), default=2e-3, help="of what AdamW trains beside Muon")
    p.add_argument("--shares", type=positive(float), nargs="+", default=[0.6], help="of the tokens, for Muon")
    p.add_argument("--work", default=str(ROOT / "out" / "optimizers"), help="folder for data and runs")
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


def plain_loop_parser() -> Parser:
    """The flags of plain_loop.py."""
    p = new_parser("plain_loop.py", "The plain MiniMind loop, the reference of speed and learning.")
    p.add_argument("--data_path", required=True, help="jsonl to train on")
    p.add_argument("--val_path", required=True, help="jsonl to evaluate on")
    p.add_argument("--updates", type=positive(int), default=300, help="how many")
    p.add_argument("--batch_size", type=positive(int), default=8, help="rows of an update")
    p.add_argument("--max_seq_len", type=positive(int), default=512, help="positions in a row")
    p.add_argument("--learning_rate", type=positive(float), default=1e-3, help="what the schedule multiplies")
    p.add_argument("--hidden_size", type=positive(int), default=512, help="width of the model")
    p.add_argument("--seed", type=seed, default=42, help="of weights and data order")
    return p


def step_parser() -> Parser:
    """The flags of step.py."""
    p = new_parser("step.py", "One training micro-batch: tokens/s and its share of the best bf16 matrix-product rate.")
    p.add_argument("--size", choices=STEP_SIZES, default="26m", help="of the model")
    p.add_argument("--compile", choices=("0", "1"), default="1", help="torch.compile")
    p.add_argument("--threads", type=positive(int), help=ALL_CORES)
    p.add_argument("--rows", type=positive(int), default=8, help="of a micro-batch")
    p.add_argument("--max_seq_len", type=positive(int), default=512, help="positions in a row")
    p.add_argument("--mean_length", type=positive(int), default=320, help="of a document, in tokens")
    p.add_argument("--steps", type=positive(int), default=8, help="to time")
    p.add_argument(
        "--pause", type=not_negative(float), default=0.0, help="seconds before each step; see docs/performance.md"
    )
    p.add_argument("--gradient_checkpointing", action="store_true", help="recompute activations")
    p.add_argument("--profile", action="store_true", help="print the operators that take the time")
    p.add_argument("--device", help=BEST_DEVICE)
    return p


def host_work_parser() -> Parser:
    """The flags of host_work.py."""
    p = new_parser("host_work.py", "What the host does for each micro-batch on a GPU, counted and timed without one.")
    p.add_argument("--size", choices=STEP_SIZES, default="26m", help="of the model")
    p.add_argument("--rows", type=positive(int), default=32, help="of a small micro-batch")
    p.add_argument("--merged", type=positive(int), default=256, help="rows of a large micro-batch")
    p.add_argument("--max_seq_len", type=positive(int), default=512, help="positions in a row")
    p.add_argument("--times", type=positive(int), default=2, help="to time each; the best counts")
    return p


def processes_parser() -> Parser:
    """The flags of processes.py."""
    p = new_parser("processes.py", "One process with all threads against several with few, on a CPU.")
    p.add_argument("--size", choices=STEP_SIZES, default="26m", help="of the model")
    p.add_argument("--rows", type=positive(int), default=16, help="of an update, 512 positions each")
    p.add_argument("--batch_size", type=positive(int), default=16, help="rows of a micro-batch, for all processes")
    p.add_argument("--processes", type=positive(int), nargs="+", default=[2], help="of the sides beside one process")
    p.add_argument("--threads", type=positive(int), help=ALL_CORES)
    p.add_argument("--seconds", type=positive(float), default=200, help="of the turns, all in all")
    p.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="of all sides")
    return p


def parallel_parser() -> Parser:
    """The flags of parallel.py."""
    p = new_parser("parallel.py", "Ranks on a CPU: ways to add up gradients, and the memory of a sharded model.")
    p.add_argument("--size", choices=STEP_SIZES, default="26m", help="of the model")
    p.add_argument(
        "--rows", type=positive(int), default=4, help="of an update and rank in the turns, 128 positions each"
    )
    p.add_argument("--ranks", type=positive(int), nargs="+", default=[2, 4], help="numbers of them, for the memory")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of matrix products")
    p.add_argument(
        "--seconds", type=not_negative(float), default=40, help="of the turns, all in all; 0: the memory alone"
    )
    # This process measures the memory of so many ranks, with one way to add up gradients.
    p.add_argument("--memory_of", nargs=2, help=argparse.SUPPRESS)
    return p


def scaling_parser() -> Parser:
    """The flags of scaling.py."""
    p = new_parser(
        "scaling.py", "What ranks send each other, measured and by formula, and what follows for many of them."
    )
    p.add_argument("--size", choices=MINIMIND_SIZES, default="26m", help="of the model")
    p.add_argument("--ranks", type=positive(int), nargs="+", default=[2, 4], help="numbers of them, for the bytes")
    p.add_argument("--slow_mbit", type=positive(float), default=100, help="of the slow network, megabits a second")
    p.add_argument("--only_simulate", action="store_true", help="leave out what is measured in network namespaces")
    p.add_argument("--rows", type=positive(int), default=4, help="of a micro-batch, 512 positions each")
    p.add_argument("--accumulation_steps", type=positive(int), default=8, help="micro-batches of an update and rank")
    p.add_argument("--forward_s", type=positive(float), help="seconds of a forward pass (default: measured here)")
    p.add_argument("--backward_s", type=positive(float), help="seconds of a backward pass (default: measured here)")
    p.add_argument(
        "--gbit", type=positive(float), nargs="+", default=[1, 10], help="of a rank's link, gigabits a second"
    )
    p.add_argument("--latency_us", type=positive(float), default=50, help="until a message is there, microseconds")
    # This process measures updates of so many ranks, of which so many have one model together.
    p.add_argument("--updates_of", nargs=2, help=argparse.SUPPRESS)
    return p


def readers_parser() -> Parser:
    """The flags of readers.py."""
    p = new_parser("readers.py", "One model in several programs: the same tokens, logits and greedy texts?")
    p.add_argument(
        "--weight",
        nargs="+",
        help=".pth files (default: four small models with random weights, one of each kind)",
    )
    p.add_argument(
        "--data_path",
        nargs="+",
        help="files of documents, as in training (default: the documentation inside Python)",
    )
    p.add_argument("--documents", type=positive(int), default=300, help="of each file, the first ones")
    p.add_argument("--tokenizer_path", default=str(ROOT / "model"), help="folder of the tokenizer")
    p.add_argument("--transformers4", help="folder that `pip install --no-deps --target` has put a transformers 4 into")
    p.add_argument("--llama_cpp", help="the same with llama-cpp-python (default: that of this environment)")
    p.add_argument("--minimind2", help="checkout of the public repository of the minimind2 generation")
    p.add_argument("--minimind3", help="checkout of the public repository of the minimind3 generation")
    p.add_argument("--out", help="file for the table too")
    return p
