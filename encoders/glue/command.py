"""What train_glue.py does with its tasks and seeds: find and read their files, train each, show a table of results."""

import contextlib
import gc
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from common.errors import DataError, UserError, optional_package, user_errors
from common.files import atomic_file, file_digest, read_object, remove, remove_if_possible
from dataset.reading.file_kinds import expand_user
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import vocabulary_digest
from encoders.glue.examples import GlueAssembler, cached_features, examples_of
from encoders.glue.job import GlueJob, TaskData, init_model, predicted
from encoders.glue.settings import IGNORED, GlueSettings
from encoders.glue.tasks import MAX_SCORE, METRICS, TASKS, Task
from encoders.vocabulary import load_wordpiece
from trainer.advice import OUT_OF_MEMORY_ADVICE, common_warnings, warnings_of
from trainer.batching import Batching
from trainer.job import RunContext
from trainer.launch import launch, lock_files
from trainer.loop import Trainer
from trainer.machine.devices import pick_dtype
from trainer.machine.measure import out_of_memory_as_user_error
from trainer.machine.ranks import Ranks, compare_with_main, first_rank_first, on_main
from trainer.reporting.reporter import Reporter, Say, publishable

RESULTS = "eval_results.json"
# Settings that a resume must share with its run, and a finished run to count as done, besides data, tokenizer and model
COMPARED = (
    "from_scratch", "dropout", "max_seq_len", "grad_clip", "epochs", "max_steps", "learning_rate", "lr_schedule",
    "weight_decay", "warmup_share", "warmup_steps", "layer_decay", "adam_bias_correction", "adam_epsilon", "do_train",
    "do_eval", "do_predict", "eval_all_checkpoints", "save_steps",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune with these flags (None: this process's own). Returns the exit code."""
    return launch(train, GlueSettings.parse(argv), argv)


def train(settings: GlueSettings, run_context: RunContext) -> int:
    """Fine-tune on every task with every seed, and show the table. Returns the exit code."""
    # Hides transformers' table of missing weights: our line on the model names the new parts.
    set_verbosity_error()
    disable_progress_bar()
    ranks = run_context.ranks
    say = Reporter(ranks.is_main).say
    tasks = set_up(settings, run_context, say)
    n_seeds = settings.num_seeds if settings.do_train else 1
    for data in tasks:
        runs: dict[int, dict[str, Any]] = {}
        for seed in range(settings.seed, settings.seed + n_seeds):
            exit_code, runs[seed] = run_seed(settings, run_context, data, seed, say)
            if exit_code:
                return exit_code
        results = {"metrics": summary([run["results"] for run in runs.values()]), "seeds": runs}
        path = Path(settings.out_dir) / data.name / RESULTS
        on_main(ranks, partial(write_json, path, results))
    on_main(ranks, lambda: show_table(Path(settings.out_dir), say))
    return 0


# --------------------------------------------------------------------------------------------- before the runs


def set_up(settings: GlueSettings, run_context: RunContext, say: Say) -> list[TaskData]:
    """The tasks. Every mismatch is found here, before hours of training. Errors: UserError, DataError."""
    ranks = run_context.ranks
    dtype, precision_notices = pick_dtype(settings.dtype, run_context.device)
    compare_with_main(ranks, {"precision": str(dtype)})
    out = Path(settings.out_dir)
    with user_errors():
        if settings.do_eval:
            # scikit-learn brings scipy.
            optional_package("sklearn", "for the metrics", package="scikit-learn")
        # Rank 0 checks first: its error ends all ranks, and is reported once.
        folders = on_main(ranks, lambda: task_folders(settings))
        model = on_main(ranks, lambda: find_model(settings.model_path))
        on_main(ranks, lambda: check_earlier(settings, out, folders, model))
        tasks = read_tasks(settings, ranks, folders, model, say)
        # Otherwise a model that does not fit the last task would fail after the training of the others.
        on_main(ranks, lambda: [init_model(settings, data.task, model, data.tokenizer) for data in tasks] and None)
        lock_files(ranks, *(out / name / name for name in folders), sized=True)

        def make_room() -> None:
            for name in folders:
                for path in (*out.glob(f"{name}/seed_*"), out / name / RESULTS):
                    remove(path)

        if not settings.from_resume:
            on_main(ranks, make_room)
    absent = [TASKS[name].folder for name in TASKS if name not in folders]
    if settings.task == "all" and absent:
        say(f"not in {settings.data_dir}, so left out: {', '.join(absent)}")
    compiles = settings.use_compile == "1"
    no_training = "" if settings.do_train else "--do_train is off"
    no_evaluation = no_training or ("" if settings.do_eval else "--do_eval is off")
    not_custom = "" if settings.kind else "the files of the benchmark's tasks are those in --data_dir"
    fixed_warmup = "one_cycle has its own warm-up" if settings.lr_schedule == "one_cycle" else ""
    reasons = {
        "use_compile": "compiling needs batches of one length, which cost as much as it gains" if compiles else "",
        "num_seeds": no_training,
        "eval_all_checkpoints": no_evaluation,
        "evaluate_during_training": no_evaluation,
        "eval_interval": "" if settings.evaluate_during_training else "--evaluate_during_training is off",
        "epochs": "--max_steps says when the run ends" if settings.max_steps > 0 else "",
        "warmup_share": fixed_warmup or ("" if settings.warmup_steps is None else "--warmup_steps is given"),
        "warmup_steps": fixed_warmup,
        "accumulation_steps": "--rows_per_update is given" if settings.rows_per_update else "",
        "data_dir": "with --kind each file has a flag" if settings.kind else "",
        **dict.fromkeys(("train_file", "dev_file", "text", "label"), not_custom),
        **dict.fromkeys(IGNORED, "run.py needed it"),
        "test_file": not_custom or ("" if settings.do_predict else "--do_predict is off"),
    }
    for line in (*precision_notices, *warnings_of(settings, reasons), *common_warnings(settings, ranks)):
        say(line)
    return tasks


def task_folders(settings: GlueSettings) -> dict[str, tuple[Path, Task]]:
    """{name: (folder of its files, task)} of --task. Errors: UserError if there is none."""
    if settings.kind:
        return {settings.task: (Path(), custom_task(settings, settings.kind))}
    assert settings.data_dir is not None
    top = expand_user(settings.data_dir)
    names = list(TASKS) if settings.task == "all" else settings.task.split(",")
    folders = {name: (top / TASKS[name].folder, TASKS[name]) for name in names if (top / TASKS[name].folder).is_dir()}
    first = TASKS[names[0]]
    if not folders and len(names) == 1 and any((top / file).exists() for file in (first.train, first.dev[0][1])):
        # --data_dir is the folder of the only task.
        return {names[0]: (top, first)}
    absent = [TASKS[name].folder for name in names if name not in folders]
    if absent and not (settings.task == "all" and folders):
        raise UserError(f"--data_dir {top}: neither a folder {absent[0]} nor its train.tsv is in there")
    return folders


def custom_task(settings: GlueSettings, kind: str) -> Task:
    """The Task that flags describe; its classes are those of the training file. Errors: DataError."""
    files = (settings.train_file, settings.dev_file, settings.test_file)
    train, dev, test = (str(expand_user(file or "")) for file in files)
    task = Task(
        folder=settings.task,
        text=tuple(settings.text),
        label=settings.label,
        labels=(),
        metrics=METRICS[kind],
        dev=(("", dev),),
        test=((settings.task, test),),
        train=train,
        bounds=(-MAX_SCORE, MAX_SCORE),
    )
    if kind == "classification":
        classes = sorted({example.label for example in examples_of(Path(train), task, labelled=True)})
        if len(classes) < 2:
            raise DataError(f"--train_file {train}: all labels are {classes[0]!r}; expected two or more")
        task = task._replace(labels=tuple(classes))
    return task


def find_model(model_path: str) -> Path:
    """The folder that --model_path names; a name is looked up in the local cache of Hugging Face. Errors: UserError."""
    path = expand_user(model_path)
    if (path / "config.json").exists():
        return path
    with contextlib.suppress(OSError, ValueError):
        if cached := cached_file(model_path, "config.json", local_files_only=True):
            return Path(cached).parent
    raise UserError(
        f"--model_path {model_path}: no config.json there, nor such a name in the local Hugging Face cache; "
        "train_electra.py leaves electra_small/discriminator"
    )


def check_earlier(settings: GlueSettings, out: Path, folders: Mapping[str, Any], model: Path) -> None:
    """Errors: UserError if results of an earlier command are neither resumed nor replaced, and if the initial model is
    among the results of its task."""
    for name in folders:
        may_be_there = settings.from_resume or settings.overwrite_output_dir
        if any(out.glob(f"{name}/seed_*/*")) and not may_be_there:
            raise UserError(
                f"--out_dir: {out / name} already holds results: name another folder, replace them with "
                "--overwrite_output_dir 1, or continue them with --from_resume 1"
            )
        if model.resolve().is_relative_to((out / name).resolve()):
            raise UserError(
                f"--model_path {settings.model_path} lies in {out / name}, which this command replaces: copy the model "
                "elsewhere, or name another --out_dir"
            )


def read_tasks(
    settings: GlueSettings, ranks: Ranks, folders: Mapping[str, tuple[Path, Task]], model: Path, say: Say
) -> list[TaskData]:
    """The TaskData of the tasks. The files that this command needs must exist; test files are optional."""
    path = expand_user(settings.vocab_path) if settings.vocab_path else model
    tokenizer = load_tokenizer(path) if path.is_dir() else load_wordpiece(path, settings.lower_case)
    if tokenizer.pad_token_id is None:
        raise UserError(f"{path}: the tokenizer has no padding token; use that of an encoder such as ELECTRA")
    if read_object(model / "config.json").get("model_type") == "xlnet":
        # Its head reads the last position, which must be no padding.
        tokenizer.padding_side = "left"
    # XLM's tokenizer is pure Python, which DocumentEncoder does not take.
    fingerprint = DocumentEncoder(tokenizer).fingerprint if tokenizer.is_fast else vocabulary_digest(tokenizer)

    # Files that a run starts from: a config, and the weights beside it.
    patterns = ["config.json"] if settings.from_scratch else ["config.json", "model*.safetensors", "pytorch_model*.bin"]
    paths = sorted(path for pattern in patterns for path in model.glob(pattern))
    of_model = on_main(ranks, lambda: hashlib.sha256("".join(map(file_digest, paths)).encode()).hexdigest()[:16])

    def read(task: Task, path: Path, keys: list[str], labelled: bool = True) -> GlueAssembler:
        overwrite = settings.overwrite_cache and ranks.local_rank == 0
        options = (settings.max_seq_len, labelled, settings.cache_dir, overwrite, say)
        features = cache(partial(cached_features, path, task, tokenizer, fingerprint, *options))
        # Only rank 0 reports a faulty file. Other machines may have other caches.
        on_main(ranks, lambda: features() and None)
        loaded, key = first_rank_first(ranks, features)
        keys.append(key)
        return GlueAssembler(loaded, tokenizer, settings.max_seq_len)

    tasks = []
    for name, (folder, task) in folders.items():
        keys: list[str] = []
        train = read(task, folder / task.train, keys) if settings.do_train else None
        dev = {suffix: read(task, folder / file, keys) for suffix, file in task.dev} if settings.do_eval else {}
        test = {}
        tests = (task.test or ((task.folder, "test.tsv"),)) if settings.do_predict else ()
        for target, file in tests:
            if (folder / file).exists():
                test[target] = read(task, folder / file, keys, labelled=False)
        for target, file in dict(tests).items():
            if target not in test:
                say(f"{folder / file} is not there: no predictions {target}.tsv")
        digests = {
            # first, since the digest of the data depends on it
            "tokenizer": fingerprint[:16],
            "data": " ".join(keys),
            "model (--model_path, --from_scratch)": of_model,
        }
        tasks.append(TaskData(name, task, digests, model, tokenizer, train, dev, test))
    return tasks


# ------------------------------------------------------------------------------------------------------ a run


def run_seed(
    settings: GlueSettings, run_context: RunContext, data: TaskData, seed: int, say: Say
) -> tuple[int, dict[str, Any]]:
    """Train, evaluate and predict with one seed. Returns (exit code, content of its eval_results.json)."""
    folder = Path(settings.out_dir) / data.name / f"seed_{seed}"
    ranks = run_context.ranks
    dtype, _ = pick_dtype(settings.dtype, run_context.device)
    made_with = {"dtype": str(dtype), **data.digests, "examples of an update": Batching.of(settings, ranks).rows}
    made_with |= {name: getattr(settings, name) for name in COMPARED}

    def done_before() -> dict[str, Any] | None:
        """The results of a finished run, which is skipped; None: it has to run."""
        if not (settings.from_resume and (folder / RESULTS).exists()):
            return None
        earlier: dict[str, Any] = json.loads((folder / RESULTS).read_bytes())
        # Version 1.0.0 recorded less.
        if others := [name for name, value in made_with.items() if earlier["made_with"].get(name, value) != value]:
            raise UserError(
                f"--from_resume 1: {folder} was finished with another {', another '.join(others)}: name another --out_dir, or "
                "replace it with --overwrite_output_dir 1 and without --from_resume"
            )
        return earlier

    result = on_main(ranks, done_before)
    if result is not None:
        say(f"{data.name}, seed {seed}: done before, {line_of(result['results']) or 'not evaluated'}")
    else:
        say(f"--- {data.name}, seed {seed}")
        # With these the saved settings are enough to repeat the run.
        settings = replace(settings, task=data.name, seed=seed, num_seeds=1)
        # The network of the run before is in reference cycles, and would take memory beside this one.
        gc.collect()
        job = GlueJob(settings, run_context, data, made_with)
        trainer = Trainer(job, run_context)
        if settings.do_train and (exit_code := trainer.run()):
            return exit_code, {}
        result = {"task": data.name, "seed": seed, "made_with": made_with, "updates": trainer.progress.update}
        # All is saved: a stop signal ends the process at once, and a resume begins here.
        run_context.signals.disarm()
        with out_of_memory_as_user_error(job.device, lambda: OUT_OF_MEMORY_ADVICE):
            evaluate_and_predict(job, trainer, result, say)
        # The evaluation has used the engine again after the run's end.
        trainer.engine.close()
        on_main(ranks, partial(write_json, folder / RESULTS, result))
    # A finished run is not resumed, and its checkpoints take three times the model, per seed.
    on_main(ranks, lambda: remove_if_possible(folder / f"{data.name}_{folder.name}_resume"))
    return 0, result


def evaluate_and_predict(job: GlueJob, trainer: Trainer, result: dict[str, Any], say: Say) -> None:
    """Evaluate and predict at the end of a run, into `result` and files."""
    settings = job.settings
    where = f"{result['task']}, seed {result['seed']}"

    def metrics_after(update: int) -> dict[str, float]:
        # The end of training has evaluated the last one.
        evaluated, values = trainer.evaluated
        if update != evaluated:
            values, _ = job.evaluate(job.engine, trainer.signals, update)
        return {name: value for name, value in values.items() if name != "val_loss"}

    result["results"] = metrics_after(result["updates"]) if settings.do_eval else {}
    if settings.do_eval:
        say(f"{where}: {line_of(result['results'])}")
    for name, assembler in job.data.test.items():
        logits, _ = trainer.verifier.at_rest(partial(job.outputs, assembler, trainer.signals))
        target = job.folder / "predictions" / f"{name}.tsv"
        # All ranks have the same logits; one writes.
        on_main(job.ranks, partial(write_predictions, target, job.data.task, logits))
        say(f"predictions: {target}")
    if settings.eval_all_checkpoints and settings.do_eval:
        result["checkpoints"] = {}
        saved = {int(path.name.removeprefix("checkpoint-")): path for path in job.folder.glob("checkpoint-*[0-9]")}
        for update, path in sorted(saved.items()):
            job.engine.load_weights(load_file(path / "model.safetensors"))
            result["checkpoints"][str(update)] = metrics = metrics_after(update)
            say(f"{where}, update {update}: {line_of(metrics)}")


def write_predictions(path: Path, task: Task, logits: torch.Tensor) -> None:
    """Write a TSV of class names, or of scores, as the leaderboard expects it. logits: [N, n]."""
    values = predicted(task, logits)
    if task.is_regression:
        # The leaderboard's scores have bounds.
        words = [f"{score:.7g}" for score in values.clip(*task.bounds)]
    else:
        words = [task.labels[number] for number in values]
    lines = ["index\tprediction", *(f"{i}\t{word}" for i, word in enumerate(words))]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(("\n".join(lines) + "\n").encode())


# ------------------------------------------------------------------------------------------------- the results


def summary(results: Sequence[Mapping[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """{metric: mean, median and sample deviation (None for a single run)} over the {metric: value} of several runs; NaN
    if a value is not a number."""
    statistics: dict[str, dict[str, float | None]] = {}
    for name in results[0]:
        # None becomes NaN.
        values = np.array([result[name] for result in results], dtype=np.float64)
        deviation = float(values.std(ddof=1)) if len(values) > 1 else None
        statistics[name] = {"mean": float(values.mean()), "median": float(np.median(values)), "deviation": deviation}
    return statistics


def show_table(out: Path, say: Say) -> None:
    """Print and write the table of all tasks in --out_dir, those of earlier commands too; values times 100."""
    # Not those of other programs, nor the table of an --out_dir below this one.
    paths = [path for path in sorted(out.glob(f"*/{RESULTS}")) if any(path.parent.glob(f"seed_*/{RESULTS}"))]
    tasks = {path.parent.name: json.loads(path.read_bytes()) for path in paths}
    lines = ["| task | metric | mean | median | deviation | runs |", "|---|---|---:|---:|---:|---:|"]
    for name, of_task in tasks.items():
        for metric, values in of_task["metrics"].items():
            cells = [figure(values[what]) for what in ("mean", "median", "deviation")]
            lines.append(f"| {name} | {metric} | {' | '.join(cells)} | {len(of_task['seeds'])} |")
    write_json(out / RESULTS, tasks)
    with atomic_file(out / "eval_results.md") as file:
        file.write(("\n".join(lines) + "\n").encode())
    for line in ("", *lines, "", f"written: {out / RESULTS}, {out / 'eval_results.md'}"):
        say(line)


def figure(value: float | None) -> str:
    """A value times 100, or a dash."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.2f}"


def line_of(results: Mapping[str, float | None]) -> str:
    """Metrics in one line, times 100."""
    return ", ".join(f"{name} {figure(value)}" for name, value in results.items())


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically; null for values that are not finite."""
    with atomic_file(path) as file:
        file.write(json.dumps(publishable(content), indent=2).encode() + b"\n")
