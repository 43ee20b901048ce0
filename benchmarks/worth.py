"""What pretraining is worth on GLUE: networks of train_electra.py against the same network without pretraining.

    python benchmarks/worth.py --data_dir glue_data --networks electra=out/electra_small mlm=out/mlm_small

Each network, and one with random weights, is fine-tuned on each task by trainer/train_glue.py, one process after the other:
first once with each of TUNINGS, then with several other seeds with the one of these that had the best figure. So each network
has what suits it, chosen alike. At first some updates of each task are timed, and a line tells how long all of it will take.
What is finished is kept in `--work`: the same command goes on where it was stopped, and with another network it only
fine-tunes that. A task whose files or tunings have changed is fine-tuned anew, and another network under a known name is
refused.
Beside other programs OMP_NUM_THREADS=1 is quicker than two threads that wait for each other; then two commands with different
tasks (`--task cola,rte`) may share the work, and a third one prints the whole table.

The tables, in Markdown: each task's first metric, times 100, as mean ± deviation over the seeds; then each network against none,
and against the others that were pretrained with as much work (within 1 %). "above" and "below": the means differ by more than
the larger of the two deviations; "alike": they do not. The last table has what each network took of TUNINGS.
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
from common.arithmetic import ceil_div
from common.errors import UserError, user_errors
from common.files import file_digest
from dataset.glue.glue_tasks import TASKS, task_list
from dataset.reading.file_kinds import expanded
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.sentence_encoder import SentenceEncoder
from trainer.electra.networks import OF_FILES
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
# In --work, beside a folder for each network.
TIMING = "timing"
# Flags of the trainer, whatever an earlier start has left.
ANEW = ("--from_resume", 0, "--overwrite_output_dir", 1)


class Tuning(NamedTuple):
    """A way to fine-tune a network."""

    learning_rate: float
    dropout: float
    # What the rate is multiplied with from layer to layer, head to embeddings.
    layer_decay: float

    def __str__(self) -> str:
        return f"{self.learning_rate:g}, {self.dropout:g}, {self.layer_decay:g}"


# Four ways, because random and pretrained weights need different ones. Random weights may want dropout, and the same rate in all
# layers. What is pretrained without dropout may lose by it what it has learned to compare, and keeps more with lower rates below.
# Rates below 5e-4 were no better for networks of width 128 (docs/experiments.md, "ELECTRA with little text").
TUNINGS = (Tuning(5e-4, 0.1, 1.0), Tuning(5e-4, 0.0, 1.0), Tuning(5e-4, 0.0, 0.8), Tuning(1e-3, 0.0, 0.8))
EPOCHS = {"cola": 10, "mrpc": 3, "stsb": 10, "sst2": 1, "rte": 10}
# A trial's seed is the first counted one and this: none of those that are counted.
TRIAL_SEED_OFFSET = 1000


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
        """The fields of SHAPE in its config, None where it has no such field, unusual values of further ones, and what changes
        with its vocabulary. Errors: UserError."""
        config = read_json(self.folder / "config.json")
        if config is None:
            raise UserError(f"--networks: {self.folder / 'config.json'} is damaged")
        with user_errors():
            tokenizer = SentenceEncoder(load_tokenizer(self.folder))
        # Where all have the usual value, notes of earlier versions still hold.
        unusual = {name: config[name] for name, usual in OF_FILES.items() if config.get(name, usual) != usual}
        return {**{field: config.get(field) for field in SHAPE}, **unusual, "vocabulary": tokenizer.fingerprint[:16]}

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
        if name == TIMING:
            raise UserError(f"--networks {argument}: the folder {TIMING} is for the timed runs; give another name")
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
    for field in {**first.shape, **other.shape}:
        values = [network.shape.get(field, OF_FILES.get(field)) for network in (first, other)]
        if values[0] != values[1]:
            raise UserError(
                f"--networks: {field} is {values[0]} in {first.folder} and {values[1]} in {other.folder}; networks of "
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


class FineTuning(NamedTuple):
    """Of a network on a task in one way, with the seeds from `seed` on."""

    network: Network
    task: str
    tuning: Tuning
    seed: int
    num_seeds: int
    # Where they are kept, in a folder that has the task's name.
    folder: Path


def trial_of(args: argparse.Namespace, network: Network, task: str, tuning: Tuning) -> FineTuning:
    """The run that tells how well a tuning suits a network."""
    folder = folder_of(args, network) / "trials" / "_".join(f"{value:g}" for value in tuning)
    return FineTuning(network, task, tuning, args.seed + TRIAL_SEED_OFFSET, 1, folder)


def counted_of(args: argparse.Namespace, network: Network, task: str, tuning: Tuning) -> FineTuning:
    """The runs of which the tables tell."""
    return FineTuning(network, task, tuning, args.seed, args.num_seeds, folder_of(args, network))


def training_flags(task: str, tuning: Tuning) -> dict[str, object]:
    """Those of a task and a tuning, whatever the network."""
    return {
        "learning_rate": tuning.learning_rate,
        "epochs": EPOCHS[task],
        "batch_size": BATCH_SIZE,
        "dropout": tuning.dropout,
        "layer_decay": tuning.layer_decay,
    }


def digests_of(args: argparse.Namespace, task: str) -> dict[str, str]:
    """Those of the files of a task. Errors: UserError."""
    with user_errors():
        top = expanded(args.data_dir)
        folder = top / folder_of_task(top, task, is_alone=True)
        return {
            name: file_digest(folder / name) for name in (TASKS[task].train, *(name for _, name in TASKS[task].dev))
        }


def made_of(fine_tuning: FineTuning, digests: Mapping[str, str]) -> str:
    """Changes with the files of the task and the flags of its training."""
    return hashlib.sha256(
        json.dumps([training_flags(fine_tuning.task, fine_tuning.tuning), digests]).encode()
    ).hexdigest()


def command(args: argparse.Namespace, fine_tuning: FineTuning, *flags: object) -> list[str]:
    """That fine-tunes a network with all seeds. flags: further ones."""
    words: dict[str, object] = {
        "task": fine_tuning.task,
        "data_dir": args.data_dir,
        "model_path": fine_tuning.network.folder,
        "out_dir": fine_tuning.folder,
        **training_flags(fine_tuning.task, fine_tuning.tuning),
        "seed": fine_tuning.seed,
        "num_seeds": fine_tuning.num_seeds,
        "from_scratch": int(fine_tuning.network.is_fresh),
        "from_resume": 1,
        "report": 0,
    }
    given: list[str] = []
    for name, value in words.items():
        given += [f"--{name}", str(value)]
    return [sys.executable, str(TRAINER), *given, *map(str, flags)]


def run_command(words: Sequence[str], log: Path) -> float:
    """Run a command, its output in a file. Returns the seconds that it took. Errors: UserError where it failed."""
    began = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        ended = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise UserError(f"a fine-tuning ended with {ended.returncode}, see {log}; the same command goes on from there")
    return time.monotonic() - began


def finished(fine_tuning: FineTuning, digests: Mapping[str, str]) -> dict[str, Figures] | None:
    """{seed: its metrics} where all seeds have been fine-tuned; None: that is yet to be done. digests: of the task's files."""
    note = read_json(note_on(fine_tuning))
    found = read_json(fine_tuning.folder / fine_tuning.task / "eval_results.json", "metrics", "seeds")
    if note is None or note.get("made_of") != made_of(fine_tuning, digests) or found is None or not are_results(found):
        return None
    # An earlier start may have had more of them.
    wanted = [str(seed) for seed in range(fine_tuning.seed, fine_tuning.seed + fine_tuning.num_seeds)]
    if not all(seed in found["seeds"] for seed in wanted):
        return None
    return {seed: found["seeds"][seed]["results"] for seed in wanted}


def fine_tuned(args: argparse.Namespace, fine_tuning: FineTuning, digests: Mapping[str, str]) -> dict[str, Figures]:
    """{seed: its metrics}, of runs that are made now unless an earlier start has made them. Errors: UserError."""
    if finished(fine_tuning, digests) is None:
        made = made_of(fine_tuning, digests)
        note = read_json(note_on(fine_tuning)) or {}
        # The trainer would go on with a seed that was stopped half-way, also where its rate was another one.
        flags = () if note.get("begun", note.get("made_of", made)) == made else ANEW
        note_on(fine_tuning).parent.mkdir(parents=True, exist_ok=True)
        write_json(note_on(fine_tuning), {"begun": made})
        run_command(command(args, fine_tuning, *flags), fine_tuning.folder / f"{fine_tuning.task}.log")
        write_json(note_on(fine_tuning), {"made_of": made})
    results = finished(fine_tuning, digests)
    assert results is not None
    return results


def tuning_tried(args: argparse.Namespace, network: Network, task: str, digests: Mapping[str, str]) -> Tuning:
    """The one of TUNINGS that suits a network. The trials are made now unless an earlier start has made them."""
    return best_of(
        task, {tuning: fine_tuned(args, trial_of(args, network, task, tuning), digests) for tuning in TUNINGS}
    )


def best_of(task: str, results: Mapping[Tuning, Mapping[str, Figures]]) -> Tuning:
    """The tuning with the best figure, the first of several that are equal. results: of the trials."""
    means = {tuning: figure_of(task, of_trial).mean for tuning, of_trial in results.items()}
    return max(means, key=lambda tuning: means[tuning])


def number_left(args: argparse.Namespace, network: Network, task: str, digests: Mapping[str, str]) -> int:
    """How many fine-tunings of a network on a task an earlier start has not made."""
    trials = {tuning: finished(trial_of(args, network, task, tuning), digests) for tuning in TUNINGS}
    made = {tuning: results for tuning, results in trials.items() if results is not None}
    if len(made) < len(TUNINGS):
        return len(TUNINGS) - len(made) + args.num_seeds
    chosen = counted_of(args, network, task, best_of(task, made))
    return 0 if finished(chosen, digests) is not None else args.num_seeds


def note_on(fine_tuning: FineTuning) -> Path:
    """The file that tells what fine-tunings were made of, or while they are made what they were begun with."""
    return fine_tuning.folder / f"{fine_tuning.task}.made_of.json"


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


def timing(args: argparse.Namespace, network: Network, task: str, digests: Mapping[str, str]) -> Timing:
    """Of a short run, unless an earlier start has timed it."""
    place = Path(args.work) / TIMING
    note = place / f"{task}.json"
    fine_tuning = FineTuning(network, task, TUNINGS[0], args.seed, 1, place)
    key = made_of(fine_tuning, digests)
    earlier = read_json(note, "timing")
    if earlier is not None and earlier.get("made_of") == key:
        return Timing(**earlier["timing"])
    flags = ("--max_steps", TIMED_UPDATES, "--log_interval", TIMED_UPDATES, *ANEW)
    seconds = run_command(command(args, fine_tuning, *flags), place / f"{task}.log")
    (metrics,) = (place / task).glob("seed_*/*.metrics.jsonl")
    records = records_of(metrics)
    rows = next(record["data"]["rows"] for record in records if "started" in record)
    update = 1 / [record["updates_per_second"] for record in records if "updates_per_second" in record][-1]
    updates = ceil_div(rows, BATCH_SIZE) * EPOCHS[task]
    found = Timing(update, max(seconds - TIMED_UPDATES * update, 0.0), updates)
    write_json(note, {"made_of": key, "timing": found._asdict()})
    return found


# ----------------------------------------------------------------------------------------------- the tables


class Figure(NamedTuple):
    """Of a network on a task, over the seeds, times 100. deviation: NaN where there is one seed."""

    mean: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + ("" if math.isnan(self.deviation) else f" ± {self.deviation:.1f}")


def figure_of(task: str, results: Mapping[str, Figures]) -> Figure:
    """Of the task's first metric. A seed whose metric is not a number, as a correlation with a constant, counts as 0."""
    metric = TASKS[task].metrics[0]
    values = [100 * (of_seed[metric] or 0.0) for of_seed in results.values()]
    return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)


def verdict(one: Figure, other: Figure) -> str:
    """How far `one` is above `other`, in a cell of a table. Of one seed nobody knows how far seeds differ."""
    difference = one.mean - other.mean
    deviation = max(one.deviation, other.deviation)
    if math.isnan(deviation):
        return f"{difference:+.1f} (one seed)"
    word = "alike"
    if abs(difference) > deviation:
        word = "above" if difference > 0 else "below"
    return f"{difference:+.1f} {word}"


def table(networks: Sequence[Network], tasks: Sequence[str], figures: Mapping[tuple[str, str], Figure]) -> list[str]:
    """The figures of all networks. figures: by (network, task)."""
    lines = [header("network", "pretraining, FLOP", tasks), "|---|---:|" + "---:|" * len(tasks)]
    for network in networks:
        of_tasks = [figures[network.name, task] for task in tasks]
        cells = [str(figure) for figure in of_tasks]
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


def table_of_tunings(
    networks: Sequence[Network], tasks: Sequence[str], tunings: Mapping[tuple[str, str], Tuning]
) -> list[str]:
    """What each network took. tunings: by (network, task)."""
    lines = [header("network", "took", tasks), "|---|---|" + "---|" * len(tasks)]
    for network in networks:
        cells = [str(tunings[network.name, task]) for task in tasks]
        lines.append(f"| {network.name} | rate, dropout, --layer_decay | {' | '.join(cells)} |")
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
        if task not in EPOCHS:
            raise UserError(f"--task {task}: not one of {', '.join(EPOCHS)}")
    networks = networks_of(args.networks)
    digests = {task: digests_of(args, task) for task in tasks}
    for network in networks:
        claim_folder(args, network)
        if network.flops is None:
            print(
                f"note: the work behind {network.name} is not known, so it is compared with {WITHOUT} alone: "
                f"{network.why_unknown}",
                flush=True,
            )
    left: dict[tuple[Network, str], int] = {}
    for network in networks:
        left.update({(network, task): number_left(args, network, task, digests[task]) for task in tasks})
    timings = {task: timing(args, networks[-1], task, digests[task]) for (_, task), number in left.items() if number}
    seconds = sum(number * timings[task].seconds for (_, task), number in left.items() if number)
    print(f"{sum(left.values())} fine-tunings are left, about {seconds / 60:.0f} minutes", flush=True)
    figures: dict[tuple[str, str], Figure] = {}
    tunings: dict[tuple[str, str], Tuning] = {}
    for (network, task), number in left.items():
        began = time.monotonic()
        tuning = tuning_tried(args, network, task, digests[task])
        figure = figure_of(task, fine_tuned(args, counted_of(args, network, task, tuning), digests[task]))
        tunings[network.name, task] = tuning
        figures[network.name, task] = figure
        if number:
            minutes = (time.monotonic() - began) / 60
            print(f"{network.name}, {task}: {number} fine-tunings in {minutes:.1f} minutes", flush=True)
    tables = [
        table(networks, tasks, figures),
        comparisons(networks, tasks, figures),
        table_of_tunings(networks, tasks, tunings),
    ]
    for lines in tables:
        print("\n".join(["", *lines]))


if __name__ == "__main__":
    run_cli(main)
