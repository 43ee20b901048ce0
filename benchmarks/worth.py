"""What pretraining is worth on GLUE: networks of train_electra.py against the same network without pretraining.

    python benchmarks/worth.py --data_dir glue_data --networks electra=out/electra_small mlm=out/mlm_small

Each network, and one with random weights, is fine-tuned on each task with several seeds by trainer/train_glue.py, one process
after the other. At first some updates of each task are timed, and a line tells how long all of it will take. What is
finished is kept in `--work`: the same command goes on where it was stopped, and with another network it only fine-tunes that.
A task whose files or tuning have changed is fine-tuned anew, and another network under a known name is refused.
Beside other programs OMP_NUM_THREADS=1 is quicker than two threads that wait for each other; then two commands with different
tasks (`--task cola,rte`) may share the work, and a third one prints the whole table.

The tables, in Markdown: each task's first metric, times 100, as mean ± deviation over the seeds; then each network against none,
and against the others that were pretrained with as much work (within 1 %). "above" and "below": the means differ by more than
the larger of the two deviations; "alike": they do not.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import worth_parser

    worth_parser().parse_args()

import argparse
import hashlib
import json
import math
import re
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from benchmarks.arguments import WITHOUT, worth_parser
from common.errors import UserError, user_errors
from common.files import file_digest
from dataset.glue.glue_tasks import TASKS, task_list
from dataset.loader import ceil_div
from dataset.reading.file_kinds import expanded
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.sentence_encoder import SentenceEncoder
from trainer.glue.command import key_of_model
from trainer.glue.files import folder_of_task
from trainer.glue.results import Figures, are_results, read_json, write_json
from trainer.machine.command_line import run_cli
from trainer.reporting.records import METRICS_SUFFIX, START_FIELDS, has_fields, is_number

TRAINER = ROOT / "trainer" / "train_glue.py"
# Where a run of train_electra.py has the network to fine-tune.
ENCODERS = ("discriminator", "encoder")
# The fields of a config that all networks must have in common: else they differ in more than their pretraining.
SHAPE = (
    "vocab_size",
    "embedding_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "initializer_range",
    "position_init",
)
# As much work: the updates of a run are whole, so two runs are never quite equal.
SAME_WORK = 0.01
BATCH_SIZE = 32
TIMED_UPDATES = 12


class Tuning(NamedTuple):
    """How a task is fine-tuned."""

    learning_rate: float
    epochs: int


# Chosen with other small networks, see "ELECTRA with little text" in docs/experiments.md; the same for every network.
TUNINGS = {
    "cola": Tuning(2e-4, 10),
    "mrpc": Tuning(3e-4, 3),
    "stsb": Tuning(5e-4, 10),
    "sst2": Tuning(5e-4, 1),
    "rte": Tuning(3e-4, 10),
}


class WorkUnknown(Exception):
    """Why nobody knows how much work is behind a network."""


@dataclass(frozen=True)
class Network:
    """One that is fine-tuned. folder: of save_pretrained; flops: of its pretraining, all stages together; None: not known, and
    why_unknown says why."""

    name: str
    folder: Path
    flops: float | None
    why_unknown: str = ""

    @property
    def is_fresh(self) -> bool:
        """Whether it begins with random weights."""
        return self.name == WITHOUT

    @cached_property
    def shape(self) -> dict[str, Any]:
        """The fields of SHAPE in its config, None where it has no such field, and what changes with its vocabulary. Errors:
        UserError."""
        config = read_json(self.folder / "config.json")
        if config is None:
            raise UserError(f"--networks: {self.folder / 'config.json'} is damaged")
        with user_errors():
            tokenizer = SentenceEncoder(load_tokenizer(self.folder))
        return {**{field: config.get(field) for field in SHAPE}, "vocabulary": tokenizer.fingerprint[:16]}

    def key(self) -> str:
        """Changes with what its fine-tunings begin with."""
        if self.is_fresh:
            # Another network of this shape begins with the same random weights.
            content = json.dumps(self.shape)
        else:
            with user_errors():
                content = f"{key_of_model(self.folder, from_scratch=False)} {self.shape['vocabulary']}"
        return hashlib.sha256(content.encode()).hexdigest()


# ------------------------------------------------------------------------------------------- the networks


def networks_of(arguments: Sequence[str]) -> list[Network]:
    """The networks of NAME=FOLDER arguments, behind the one without pretraining. Errors: UserError."""
    found: list[Network] = []
    for argument in arguments:
        name, _, folder = argument.partition("=")
        if not folder or not re.fullmatch(r"[\w.-]+", name):
            raise UserError(
                f"--networks {argument}: NAME=FOLDER is wanted, a name of letters, digits, '.', '-' and '_'"
            )
        if name in (WITHOUT, *(network.name for network in found)):
            raise UserError(f"--networks {argument}: another network is called {name} already")
        try:
            found.append(Network(name, encoder_of(Path(folder)), work_of(Path(folder))))
        except WorkUnknown as reason:
            found.append(Network(name, encoder_of(Path(folder)), None, str(reason)))
    first = found[0]
    for network in found[1:]:
        check_shape(first, network)
    return [Network(WITHOUT, first.folder, 0.0), *found]


def encoder_of(folder: Path) -> Path:
    """The network to fine-tune in the folder of a run, or the folder itself. Errors: UserError."""
    for place in (folder, *(folder / name for name in ENCODERS)):
        if (place / "config.json").is_file():
            return place
    raise UserError(f"--networks: no config.json in {folder}, nor in its {' or '.join(ENCODERS)}")


def check_shape(first: Network, other: Network) -> None:
    """Errors: UserError where two networks differ in more than their weights."""
    for field, value in first.shape.items():
        if other.shape[field] != value:
            raise UserError(
                f"--networks: {field} is {value} in {first.folder} and {other.shape[field]} in {other.folder}; networks of "
                "one shape and vocabulary are wanted"
            )


def work_of(folder: Path, begun_from: Sequence[Path] = ()) -> float:
    """The floating-point operations of a run of train_electra.py, with those of the runs that it began with. folder: of the
    run, or of its network; begun_from: later runs, which began with this one. Errors: WorkUnknown."""
    folder = folder.resolve()
    files = list(folder.glob(f"*{METRICS_SUFFIX}"))
    if not files and folder.name in ENCODERS:
        return work_of(folder.parent, begun_from)
    if folder in begun_from:
        raise WorkUnknown(f"a run in {folder} began with networks that are no more: others are in their place")
    if len(files) != 1:
        raise WorkUnknown(f"{'several files' if files else 'no file'} *{METRICS_SUFFIX} in {folder}")
    flops, before = work_of_records(records_of(files[0]), files[0])
    return flops if before is None else flops + work_of(Path(before), [*begun_from, folder])


def work_of_records(records: Sequence[dict[str, Any]], path: Path) -> tuple[float, str | None]:
    """(the operations of a run without those of earlier ones, the folder that it began with if there is one). Errors:
    WorkUnknown."""
    starts = [number for number, record in enumerate(records) if has_fields(record, START_FIELDS)]
    if not starts:
        raise WorkUnknown(f"no start of a run in {path}")
    updates = max(record["update"] for record in records[starts[-1] :])
    flops = 0.0
    # From the last start to the first. A resume goes on from a checkpoint: what was trained behind that is trained anew, and
    # counts once. Each start may have a batch of its own.
    for number in reversed(starts):
        start = records[number]
        if not is_number(start["model"].get("flops_of_update")):
            raise WorkUnknown(f"{path} does not tell the work of an update")
        if start["update"] < updates:
            flops += start["model"]["flops_of_update"] * (updates - start["update"])
            updates = start["update"]
        if not start["update"]:
            return flops, start["settings"].get("model_path")
    raise WorkUnknown(f"the run's first start is not in {path}")


def records_of(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file that tell their update, without a line that a kill has cut off."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(record.get("update")) is int:
            found.append(record)
    return found


# ----------------------------------------------------------------------------------------- the fine-tunings


def training_flags(task: str) -> dict[str, object]:
    """Those of a task, whatever its network."""
    tuning = TUNINGS[task]
    return {
        "learning_rate": tuning.learning_rate,
        "epochs": tuning.epochs,
        "batch_size": BATCH_SIZE,
        "dropout": 0.1,
        "layer_decay": 1,
    }


def made_of(args: argparse.Namespace, task: str) -> str:
    """Changes with the files of a task and the flags of its training. Errors: UserError."""
    digests = {}
    with user_errors():
        folder = folder_of_task(expanded(args.data_dir), task, is_alone=True)
        for name in (TASKS[task].train, *(name for _, name in TASKS[task].dev)):
            digests[name] = file_digest(folder / name)
    return hashlib.sha256(json.dumps([training_flags(task), digests]).encode()).hexdigest()


def command(args: argparse.Namespace, network: Network, task: str, out: Path, *flags: object) -> list[str]:
    """That fine-tunes a network on a task with all seeds. flags: further ones."""
    words: dict[str, object] = {
        "task": task,
        "data_dir": args.data_dir,
        "model_path": network.folder,
        "out_dir": out,
        **training_flags(task),
        "seed": args.seed,
        "num_seeds": args.num_seeds,
        "from_scratch": int(network.is_fresh),
        "from_resume": 1,
        "report": 0,
    }
    given: list[str] = []
    for name, value in words.items():
        given += [f"--{name}", str(value)]
    return [sys.executable, str(TRAINER), *given, *map(str, flags)]


def run(words: Sequence[str], log: Path) -> float:
    """Run a command, its output in a file. Returns the seconds that it took. Errors: UserError where it failed."""
    began = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        ended = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise UserError(f"a fine-tuning ended with {ended.returncode}, see {log}; the same command goes on from there")
    return time.monotonic() - began


def finished(args: argparse.Namespace, network: Network, task: str, key: str) -> dict[str, Figures] | None:
    """{seed: its metrics} where a task has been fine-tuned with all seeds; None: it is yet to be done. key: of `made_of`."""
    folder = folder_of(args, network)
    note = read_json(note_on_task(args, network, task))
    found = read_json(folder / task / "eval_results.json", "metrics", "seeds")
    if note is None or note.get("made_of") != key or found is None or not are_results(found):
        return None
    # An earlier start may have had more of them.
    wanted = [str(seed) for seed in range(args.seed, args.seed + args.num_seeds)]
    if not all(seed in found["seeds"] for seed in wanted):
        return None
    return {seed: found["seeds"][seed]["results"] for seed in wanted}


def note_on_task(args: argparse.Namespace, network: Network, task: str) -> Path:
    """The file that tells what the fine-tunings of a network on a task were made of."""
    return folder_of(args, network) / f"{task}.made_of.json"


def folder_of(args: argparse.Namespace, network: Network) -> Path:
    """Where the fine-tunings of a network are kept."""
    return Path(args.work) / network.name


def claim_folder(args: argparse.Namespace, network: Network) -> None:
    """Note whose fine-tunings a folder has. Errors: UserError where they are of other weights or another vocabulary."""
    key = network.key()
    note = folder_of(args, network) / "network.json"
    earlier = read_json(note)
    # A note of an earlier version has no key. It says nothing of single tasks either, so the trainer compares these.
    if earlier is not None and earlier.get("key", key) != key:
        raise UserError(
            f"{note.parent} has fine-tunings of another network than {network.folder}: give it another name, or name "
            "another --work"
        )
    note.parent.mkdir(parents=True, exist_ok=True)
    write_json(note, {"folder": str(network.folder), "key": key})


class Timing(NamedTuple):
    """Of a task, in seconds: an update, and what a run takes beside its updates, evaluation included. updates: of a run."""

    update: float
    rest: float
    updates: int

    @property
    def seconds(self) -> float:
        """Of a run with one seed."""
        return self.updates * self.update + self.rest


def timing(args: argparse.Namespace, network: Network, task: str, key: str) -> Timing:
    """Of a short run, unless an earlier start has timed it. key: of `made_of`."""
    place = Path(args.work) / "timing"
    note = place / f"{task}.json"
    earlier = read_json(note, "timing")
    if earlier is not None and earlier.get("made_of") == key:
        return Timing(**earlier["timing"])
    flags = ("--num_seeds", 1, "--max_steps", TIMED_UPDATES, "--log_interval", TIMED_UPDATES, "--from_resume", 0)
    words = command(args, network, task, place, *flags, "--overwrite_output_dir", 1)
    seconds = run(words, place / f"{task}.log")
    (metrics,) = (place / task).glob("seed_*/*.metrics.jsonl")
    records = records_of(metrics)
    rows = next(record["data"]["rows"] for record in records if "started" in record)
    update = 1 / [record["updates_per_second"] for record in records if "updates_per_second" in record][-1]
    updates = ceil_div(rows, BATCH_SIZE) * TUNINGS[task].epochs
    found = Timing(update, max(seconds - TIMED_UPDATES * update, 0.0), updates)
    write_json(note, {"made_of": key, "timing": found._asdict()})
    return found


# ----------------------------------------------------------------------------------------------- the tables


class Figure(NamedTuple):
    """Of a network on a task, over the seeds, times 100."""

    mean: float
    deviation: float


def figure_of(task: str, results: Mapping[str, Figures]) -> Figure:
    """Of the task's first metric. A seed whose metric is not a number, as a correlation with a constant, counts as 0."""
    metric = TASKS[task].metrics[0]
    values = [100 * (of_seed[metric] or 0.0) for of_seed in results.values()]
    return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)


def verdict(one: Figure, other: Figure) -> str:
    """How far `one` is above `other`, in a cell of a table."""
    difference = one.mean - other.mean
    deviation = max(one.deviation, other.deviation)
    word = "alike"
    if abs(difference) > deviation:
        word = "above" if difference > 0 else "below"
    return f"{difference:+.1f} {word}"


def table(networks: Sequence[Network], tasks: Sequence[str], figures: Mapping[tuple[str, str], Figure]) -> list[str]:
    """The figures of all networks. figures: by (network, task)."""
    lines = [header("network", "pretraining, FLOP", tasks), "|---|---:|" + "---:|" * len(tasks)]
    for network in networks:
        of_tasks = [figures[network.name, task] for task in tasks]
        cells = [f"{mean:.1f} ± {deviation:.1f}" for mean, deviation in of_tasks]
        work = "-" if network.flops is None else f"{network.flops:.3g}"
        lines.append(f"| {network.name} | {work} | {' | '.join(cells)} |")
    return lines


def comparisons(
    networks: Sequence[Network], tasks: Sequence[str], figures: Mapping[tuple[str, str], Figure]
) -> list[str]:
    """Each network against none, and against the others with as much work behind them."""
    lines = [header("", "above", tasks), "|---|---:|" + "---|" * len(tasks)]
    for one, other in pairs(networks):
        cells = [verdict(figures[one.name, task], figures[other.name, task]) for task in tasks]
        above = sum(cell.endswith("above") for cell in cells)
        lines.append(f"| {one.name} against {other.name} | {above} of {len(tasks)} | {' | '.join(cells)} |")
    return lines


def header(first: str, second: str, tasks: Sequence[str]) -> str:
    return f"| {first} | {second} | {' | '.join(TASKS[task].folder for task in tasks)} |"


def pairs(networks: Sequence[Network]) -> Iterator[tuple[Network, Network]]:
    """Those that are compared. The first network is the one without pretraining."""
    none, *pretrained = networks
    for network in pretrained:
        yield network, none
    for number, network in enumerate(pretrained):
        for other in pretrained[number + 1 :]:
            if network.flops and other.flops and abs(network.flops / other.flops - 1) <= SAME_WORK:
                yield network, other


def main() -> None:
    args = worth_parser().parse_args()
    tasks = task_list(args.task).split(",")
    for task in tasks:
        if task not in TUNINGS:
            raise UserError(f"--task {task}: not one of {', '.join(TUNINGS)}")
    networks = networks_of(args.networks)
    keys = {task: made_of(args, task) for task in tasks}
    for network in networks:
        claim_folder(args, network)
        if network.flops is None:
            print(
                f"note: the work behind {network.name} is not known, so it is compared with {WITHOUT} alone: "
                f"{network.why_unknown}",
                flush=True,
            )
    left: list[tuple[Network, str]] = []
    for network in networks:
        left += [(network, task) for task in tasks if finished(args, network, task, keys[task]) is None]
    tasks_left = {task for _, task in left}
    timings = {task: timing(args, networks[-1], task, keys[task]) for task in tasks if task in tasks_left}
    minutes = sum(args.num_seeds * timings[task].seconds for _, task in left) / 60
    print(
        f"{len(left)} fine-tunings with {args.num_seeds} seeds each are left, about {minutes:.0f} minutes", flush=True
    )
    for number, (network, task) in enumerate(left, 1):
        out = folder_of(args, network)
        seconds = run(command(args, network, task, out), out / f"{task}.log")
        write_json(note_on_task(args, network, task), {"made_of": keys[task]})
        print(f"{number} of {len(left)}: {network.name}, {task}, {seconds / 60:.1f} minutes", flush=True)
    figures = {}
    for network in networks:
        for task in tasks:
            results = finished(args, network, task, keys[task])
            assert results is not None
            figures[network.name, task] = figure_of(task, results)
    lines = [*table(networks, tasks, figures), "", *comparisons(networks, tasks, figures)]
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    run_cli(main)
