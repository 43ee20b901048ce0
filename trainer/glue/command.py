"""What a fine-tuning command does around its runs: find model and files, pass over what is done already, write results.

{out_dir}/{task}/seed_{seed}/ has a run's model, predictions and eval_results.json; {out_dir}/{task}/eval_results.json those of
all its seeds; {out_dir}/eval_results.json and .md those of all tasks.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from common.errors import DataError, UserError, user_errors
from common.files import atomic_file, file_digest, remove
from common.wording import counted
from dataset.glue.features import cached_features
from dataset.glue.glue_dataset import GlueAssembler
from dataset.glue.glue_tasks import DIAGNOSTICS, METRICS, TASKS, UNBOUNDED, Task
from dataset.glue.tables import words_of_labels
from dataset.reading.file_kinds import expanded
from dataset.tokenizing.encoder import DocumentEncoder
from dataset.tokenizing.vocabulary import check_known
from trainer.advice import common_warnings, is_changed, warnings_of
from trainer.glue.loss import metric_of
from trainer.glue.model import find_model, init_model, open_tokenizer
from trainer.glue.settings import GlueSettings
from trainer.job import Surroundings
from trainer.launch import claim, make_folder
from trainer.machine.devices import pick_dtype
from trainer.machine.ranks import compare_with_main, first_rank_first, on_main
from trainer.reporting.reporter import Reporter, Say, finite
from trainer.saving.places import check_writable

RESULTS = "eval_results.json"
# What a finished run must have been made with to count as done, beside its data and model.
COMPARED = (
    "from_scratch", "dropout", "max_seq_len", "batch_size", "accumulation_steps", "rows_per_update", "grad_clip", "epochs",
    "max_steps", "learning_rate", "lr_schedule", "weight_decay", "warmup_share", "warmup_steps", "layer_decay",
    "adam_bias_correction", "adam_epsilon", "do_train", "do_eval", "do_predict", "eval_all_checkpoints", "save_steps",
)  # fmt: skip
Figures = Mapping[str, float | None]


class Data(NamedTuple):
    """The files of a task, as GlueAssemblers."""

    name: str
    task: Task
    # Changes with each file, the tokenizer and the length.
    key: str
    # None: nothing is trained.
    train: GlueAssembler | None
    # {suffix of the metrics' names: ...}.
    dev: dict[str, GlueAssembler]
    # {leaderboard's name: ...}.
    test: dict[str, GlueAssembler]


@dataclass(frozen=True)
class Command:
    """What all runs of a command share. `settings` are those that the user gave."""

    settings: GlueSettings
    surroundings: Surroundings
    dtype: torch.dtype
    say: Say
    model_folder: Path
    # Changes with what lies in there.
    model_key: str
    tokenizer: PreTrainedTokenizerBase
    # Of the tokenizer: what it makes of a text depends on nothing else; and its entries.
    fingerprint: str
    vocab_size: int


def set_up(settings: GlueSettings, surroundings: Surroundings) -> tuple[Command, list[Data]]:
    """What the runs share, and their tasks. Whatever does not fit is found here, before hours have passed."""
    # transformers' table of weights that are not in the folder: the line on the model says it in a word.
    set_verbosity_error()
    disable_progress_bar()
    ranks = surroundings.ranks
    dtype, precision_notice = pick_dtype(settings.dtype, surroundings.device)
    compare_with_main(ranks, {"precision": str(dtype)})
    say = Reporter(ranks.is_main).say
    out = Path(settings.out_dir)
    with user_errors():
        # Rank 0 looks first: its error ends all ranks, and is told once.
        folders = on_main(ranks, lambda: task_folders(settings, say))
        own = on_main(ranks, lambda: own_task(settings)) if settings.kind else None
        folder = on_main(ranks, lambda: find_model(settings.model_path))
        on_main(ranks, lambda: check_earlier(settings, out, folders, folder))
        tokenizer = open_tokenizer(settings, folder)
        encoder = DocumentEncoder(tokenizer)
        model_key = on_main(ranks, lambda: key_of_model(folder, settings.from_scratch))
        command = Command(
            settings, surroundings, dtype, say, folder, model_key, tokenizer, encoder.fingerprint, encoder.vocab_size
        )
        tasks = [read_task(command, name, place, own or TASKS[name]) for name, place in folders.items()]
        for data in tasks:
            # A package that is missing, or a model that does not fit the last task, would be found out after the training.
            for metric in data.task.metrics if settings.do_eval else ():
                metric_of(metric)
        on_main(ranks, lambda: [init_model(settings, data.task, folder, command.vocab_size) for data in tasks] and None)
        claim(ranks, *(out / name for name in folders))
        on_main(ranks, lambda: make_room(settings, out, folders))
    if passed_over := settings.passed_over():
        say(f"passed over, since they do nothing here: {', '.join(passed_over)}")
    cases = [
        ("epochs", bool(settings.epochs and settings.max_steps), f"--max_steps {settings.max_steps} overrides it"),
        ("lower_case", is_changed(settings, "lower_case") and not settings.vocab_path, "the tokenizer folder says it"),
        ("num_seeds", settings.num_seeds > 1 and not settings.do_train, "one evaluation is like another"),
    ]
    precision = [precision_notice] if precision_notice else []
    for line in (*precision, *warnings_of(settings, cases), *common_warnings(settings, ranks)):
        say(line)
    return command, tasks


def seeds(settings: GlueSettings) -> range:
    """The seeds of the runs of each task."""
    return range(settings.seed, settings.seed + (settings.num_seeds if settings.do_train else 1))


def key_of_model(folder: Path, from_scratch: bool) -> str:
    """Changes with what a run begins with: the config in a folder, and the weights beside it."""
    patterns = ["config.json"] if from_scratch else ["config.json", "model*.safetensors", "pytorch_model*.bin"]
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return hashlib.sha256("".join(map(file_digest, paths)).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------- the files


def task_folders(settings: GlueSettings, say: Say) -> dict[str, Path]:
    """{task: folder of its files} of --task. Errors: UserError where there is none."""
    if settings.kind:
        return {settings.task: Path()}
    assert settings.data_dir is not None
    top = expanded(settings.data_dir)
    wanted = list(TASKS) if settings.task == "all" else settings.task.split(",")
    found = {name: top / TASKS[name].folder for name in wanted if (top / TASKS[name].folder).is_dir()}
    absent = [TASKS[name].folder for name in wanted if name not in found]
    if len(wanted) == 1 and absent and any((top / file).exists() for file in ("train.tsv", TASKS[wanted[0]].dev[0][1])):
        # --data_dir is the folder of the only task.
        return {wanted[0]: top}
    if absent and (settings.task != "all" or not found):
        raise UserError(f"--data_dir {top}: neither a folder {absent[0]} nor its train.tsv is in there")
    if absent:
        say(f"not in {top}, so left out: {', '.join(absent)}")
    return found


def own_task(settings: GlueSettings) -> Task:
    """The Task that flags describe. Errors: DataError."""
    assert settings.kind is not None
    given = (settings.train_file, settings.dev_file, settings.test_file)
    train, dev, test = (str(expanded(file or "")) for file in given)
    for file in filter(None, given):
        if Path(file).suffix not in (".tsv", ".jsonl"):
            raise DataError(f"{file}: a .tsv or .jsonl file is wanted")
    task = Task(
        folder=settings.task,
        text=tuple(settings.text),
        label=settings.label,
        labels=tuple(settings.labels),
        metrics=tuple(settings.metrics) or METRICS[settings.kind][:1],
        dev=(("", dev),),
        test=((settings.task, test),),
        train=train,
        bounds=UNBOUNDED,
    )
    if settings.kind == "classification" and not task.labels:
        task = task._replace(labels=words_of_labels(Path(train), task))
        if len(task.labels) < 2:
            raise DataError(f"--train_file {train}: all labels are {task.labels[0]!r}; two or more are wanted")
    return task


def read_task(command: Command, name: str, folder: Path, task: Task) -> Data:
    """The Data of a task; the files that this command needs must be there, those of the test may be absent."""
    settings = command.settings
    ranks = command.surroundings.ranks
    keys = []

    def read(file: str, labelled: bool = True) -> GlueAssembler:
        path = folder / file

        def features() -> Any:
            overwrite = settings.overwrite_cache and ranks.local_rank == 0
            options = (settings.max_seq_len, labelled, settings.cache_dir, overwrite, command.say)
            return cached_features(path, task, command.tokenizer, command.fingerprint, *options)

        # What is wrong with the file is told by rank 0 alone. Other machines may have a cache of their own.
        on_main(ranks, lambda: features() and None)
        found, key = first_rank_first(ranks, features)
        compare_with_main(ranks, {str(path): key})
        keys.append(key)
        what = f"{path}, --model_path {settings.model_path}"
        check_known(found.tokens, command.tokenizer.unk_token_id, what, command.tokenizer.all_special_ids)
        if found.skipped:
            command.say(f"{path}: skipped {counted(int(found.skipped), 'line')} with too few fields")
        return GlueAssembler(found, command.tokenizer, settings.max_seq_len)

    train = read(task.train) if settings.do_train else None
    dev = {suffix: read(file) for suffix, file in task.dev} if settings.do_eval else {}
    test = {}
    for target, usual in task.test if settings.do_predict else ():
        places = DIAGNOSTICS if target == "AX" else (usual,)
        there = next((file for file in places if (folder / file).exists()), None)
        if there:
            test[target] = read(there, labelled=False)
        else:
            command.say(f"{folder / usual} is not there: no predictions {target}.tsv")
    return Data(name, task, " ".join(keys), train, dev, test)


def check_earlier(settings: GlueSettings, out: Path, names: Mapping[str, Path], model: Path) -> None:
    """Errors: UserError where an earlier command has left results that nobody has asked to go on with or to replace, and where
    the model to begin with is among what is replaced."""
    for name in names:
        replaced = [out / name / f"seed_{seed}" for seed in seeds(settings)]
        if not settings.from_resume:
            replaced += out.glob(f"{name}/seed_*")
            if any(out.glob(f"{name}/seed_*/*")) and not settings.overwrite_output_dir:
                raise UserError(
                    f"--out_dir: {out / name} holds results already: name another folder, replace them with "
                    "--overwrite_output_dir 1, or go on where they stop with --from_resume 1"
                )
        for path in replaced:
            if model.resolve().is_relative_to(path.resolve()):
                raise UserError(
                    f"--model_path {settings.model_path} lies in {path}, which this command replaces: copy the model "
                    "elsewhere, or name another --out_dir"
                )


def make_room(settings: GlueSettings, out: Path, names: Mapping[str, Path]) -> None:
    """Remove the results that are to be replaced, and find out whether new ones can be written."""
    for name in names:
        if not settings.from_resume:
            for path in (*out.glob(f"{name}/seed_*"), out / name / RESULTS):
                remove(path)
        make_folder(out / name)
        check_writable(out / name / name)


# ------------------------------------------------------------------------------------------------- the results


def done_before(command: Command, folder: Path, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The results of a finished run that --from_resume 1 passes over; None: it is to be made.

    Errors: UserError where it was made in another way.
    """
    earlier = read_json(folder / RESULTS) if command.settings.from_resume else None
    if earlier is None:
        return None
    before = earlier.get("settings", {})
    others = [f"--{name}" for name, value in record["settings"].items() if before.get(name) != value]
    others += [f"another {name}" for name in ("data", "model", "dtype") if earlier.get(name) != record[name]]
    if others:
        raise UserError(
            f"--from_resume 1: {folder} was finished with {', '.join(others)} of other values: name another --out_dir, or "
            "replace it with --overwrite_output_dir 1 and without --from_resume"
        )
    return earlier


def summary(results: Sequence[Figures]) -> dict[str, dict[str, float | None]]:
    """{metric: mean, median and deviation (of a sample; None of one run)} over the {metric: value} of several runs; NaN where a
    value is not a number."""
    found: dict[str, dict[str, float | None]] = {}
    for name in results[0]:
        # None becomes NaN.
        values = np.array([result[name] for result in results], dtype=np.float64)
        deviation = float(values.std(ddof=1)) if len(values) > 1 else None
        found[name] = {"mean": float(values.mean()), "median": float(np.median(values)), "deviation": deviation}
    return found


def write_for_task(command: Command, data: Data, runs: Mapping[int, Mapping[str, Any]]) -> None:
    """{out_dir}/{task}/eval_results.json, of all seeds."""
    metrics = summary([run["results"] for run in runs.values()])
    write_json(Path(command.settings.out_dir) / data.name / RESULTS, {"metrics": metrics, "seeds": runs})


def show_table(command: Command) -> None:
    """Print and write the table of all tasks that are in --out_dir, those of earlier commands too; figures times 100."""
    out = Path(command.settings.out_dir)
    names = dict.fromkeys((*TASKS, *sorted(path.parent.name for path in out.glob(f"*/{RESULTS}"))))
    found = {name: results for name in names if (results := read_json(out / name / RESULTS))}
    lines = ["| task | metric | mean | median | deviation | runs |", "|---|---|---:|---:|---:|---:|"]
    for name, of_task in found.items():
        for metric, values in of_task["metrics"].items():
            cells = [figure(values[what]) for what in ("mean", "median", "deviation")]
            lines.append(f"| {name} | {metric} | {' | '.join(cells)} | {len(of_task['seeds'])} |")
    write_json(out / RESULTS, found)
    with atomic_file(out / "eval_results.md") as file:
        file.write(("\n".join(lines) + "\n").encode())
    for line in ("", *lines, "", f"written: {out / RESULTS}, {out / 'eval_results.md'}"):
        command.say(line)


def figure(value: float | None) -> str:
    """A figure times 100, or a dash."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.2f}"


def line_of(results: Figures) -> str:
    """Metrics in a line, times 100."""
    return ", ".join(f"{name} {figure(value)}" for name, value in results.items())


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all; null for what is not finite."""
    with atomic_file(path) as file:
        file.write(json.dumps(finite(content), indent=2).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """What write_json wrote; None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path.read_bytes())
        return found
    return None
