"""What a fine-tuning command does around its runs: set up, find what is done already, evaluate, write the results."""

import contextlib
import copy
import hashlib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from common.errors import user_errors
from common.files import file_digest, remove
from common.settings import default_of
from dataset.reading.file_kinds import expanded
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.sentence_encoder import SentenceEncoder
from dataset.tokenizing.wordpiece import load_wordpiece
from model.electra.saved_network import load_config
from trainer.electra.original import ORIGINAL, take_rates
from trainer.encoder_folder import find_model
from trainer.glue.ensemble import FOLDER, OUTPUTS, ensemble
from trainer.glue.files import Data, check_place, data_top, make_room, read_task, refuse_earlier, task_folders
from trainer.glue.job import Command, GlueJob, update_schedule
from trainer.glue.measures import packages_for
from trainer.glue.model import check_models
from trainer.glue.notices import notices
from trainer.glue.own_task import own_task, with_own_files
from trainer.glue.predictions import PREDICTIONS
from trainer.glue.results import are_figures, line_of, read_json, show_table, write_json, written_alone
from trainer.glue.scores import look_back
from trainer.glue.settings import SCHEDULE_FLAGS, GlueSettings, OwnTaskSettings
from trainer.glue.submission import write_submission
from trainer.job import Surroundings
from trainer.launch import claim
from trainer.loop import Trainer
from trainer.machine.agreement import compare_precision
from trainer.machine.collectives import on_main
from trainer.machine.devices import pick_dtype
from trainer.machine.out_of_memory import plain_advice, told_in_a_line
from trainer.machine.signals import name_of
from trainer.reporting.reporter import Reporter
from trainer.saving.checkpoint import Checkpoints
from trainer.sharding import group_size_of

WEIGHTS = Path("model", "model.safetensors")
OWN_TASK = tuple(field.name for field in fields(OwnTaskSettings))
# What a finished run must have been made with to count as done
COMPARED = (
    *OWN_TASK,
    "model_path",
    "from_scratch",
    "head",
    "dropout",
    "max_seq_len",
    "batch_size",
    "accumulation_steps",
    "rows_per_update",
    "grad_clip",
    *SCHEDULE_FLAGS,
    "do_train",
    "do_eval",
    "do_predict",
    "eval_all_checkpoints",
)
# Those that change nothing of the training: the key of the training file tells where one of them changes its data.
EVALUATION = {"do_eval", "do_predict", "eval_all_checkpoints", *OWN_TASK}


def set_up(settings: GlueSettings, surroundings: Surroundings) -> tuple[Command, list[Data]]:
    """What the runs share, and their tasks. Whatever does not fit is found here, before hours have passed."""
    # transformers' table of weights that are not in the folder: the line on the model says it in a word.
    set_verbosity_error()
    disable_progress_bar()
    ranks = surroundings.ranks
    dtype, precision_notice = pick_dtype(settings.dtype, surroundings.device)
    compare_precision(ranks, dtype)
    say = Reporter(ranks.is_main).say
    out = Path(settings.out_dir)
    # Errors: UserError. The jobs ask again, behind the notices.
    group_size_of(settings.shard, ranks)
    with user_errors():
        # Rank 0 looks and decides. Then each rank opens what its own flags name: machines may have files in other places.
        own = None
        if settings.kind:
            own = with_own_files(on_main(ranks, lambda: own_task(settings, say)), settings)
            folders = {own.folder: Path()}
        else:
            below = on_main(ranks, lambda: task_folders(settings, say))
            folders = {name: data_top(settings) / place for name, place in below.items()}
        on_main(ranks, lambda: refuse_earlier(settings, out, folders))
        # Rank 0 looks first: its error ends all ranks, and is told once.
        on_main(ranks, lambda: str(find_model("--model_path", settings.model_path)))
        folder = find_model("--model_path", settings.model_path)
        published_rates = None
        if settings.recipe == ORIGINAL:
            config = load_config(f"--model_path {settings.model_path}", folder)
            published_rates = take_rates(settings, getattr(config, "hidden_size", None))
        tokenizer = open_tokenizer(settings, folder)
        key = on_main(ranks, lambda: key_of_model(folder, settings.from_scratch))
        command = Command(settings, surroundings, dtype, say, folder, key, tokenizer, SentenceEncoder(tokenizer))
        on_main(ranks, lambda: check_place(settings, out, folders, folder))
        tasks = [read_task(command, name, place, own) for name, place in folders.items()]
        kinds = [data.task for data in tasks]
        if settings.do_eval:
            # A package that is missing would be found out after the training.
            packages_for(kinds)
        checked = on_main(ranks, lambda: check_models(settings, kinds, folder, command.encoder.vocab_size, dtype))
        command = replace(command, dtype=checked.dtype)
        claim(ranks, *(out / name for name in folders))
        on_main(ranks, lambda: make_room(settings, out, folders))
    precision = [precision_notice] if precision_notice else []
    for line in (*precision, *checked.lines, *notices(settings, ranks, kinds, published_rates)):
        say(line)
    return command, tasks


def key_of_model(folder: Path, from_scratch: bool) -> str:
    """Changes with what a run begins with: the config in a folder, and the weights beside it."""
    patterns = ["config.json"]
    if not from_scratch:
        patterns += ["model*.safetensors", "pytorch_model*.bin"]
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{path.name} {file_digest(path)}\n".encode())
    return digest.hexdigest()[:16]


def open_tokenizer(settings: GlueSettings, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of --vocab_path, or that in the model's folder. Errors: ValueError."""
    if settings.vocab_path is None:
        return load_tokenizer(folder)
    path = expanded(settings.vocab_path)
    return load_tokenizer(path) if path.is_dir() else load_wordpiece(path, settings.lower_case)


def write_for_task(command: Command, data: Data, results: dict[str, Any]) -> None:
    """On rank 0, {out_dir}/{task}/eval_results.json, with the ensemble of the seeds where there are several."""
    folder = Path(command.settings.out_dir) / data.name

    def write() -> None:
        together = ensemble_of_task(command, data, [folder / f"seed_{seed}" for seed in results["seeds"]])
        of_ensemble = {} if together is None else {"ensemble": together}
        write_json(folder / "eval_results.json", {**results, **of_ensemble})

    on_main(command.ranks, write)


def ensemble_of_task(command: Command, data: Data, runs: list[Path]) -> dict[str, float] | None:
    """The metrics of the ensemble of all seeds, whose files it writes, or None where there is none. runs: their folders."""
    folder = Path(command.settings.out_dir) / data.name
    # That of an earlier command is of other seeds or files.
    remove(folder / FOLDER)
    if len(runs) == 1 or not (data.dev or data.test):
        return None
    together = ensemble(data, folder, runs)
    if together is None:
        command.say(f"{data.name}: no ensemble, as the outputs of a seed are not there")
    if together:
        command.say(f"{data.name}, ensemble of {len(runs)} seeds: {line_of(together)}")
    return together


def show_results(command: Command, out: Path) -> None:
    """Print and write the tables of all tasks that are in a folder, and what goes to the leaderboard."""
    with written_alone(out):
        found = show_table(out, command.say)
        if command.settings.do_predict:
            write_submission(out, found, command.settings.submit, command.say)


# -------------------------------------------------------------------------------------------------- a run


def one_run(command: Command, data: Data, folder: Path, seed: int) -> tuple[int, Any]:
    """Train and evaluate once. Returns (exit code, what {folder}/eval_results.json holds then)."""
    settings = run_settings(command, data, seed)
    ranks = command.ranks
    compared = {name: getattr(settings, name) for name in COMPARED}
    earlier = on_main(ranks, lambda: done_before(command, settings, data, folder, compared))
    if earlier is not None and not earlier.changed:
        command.say(f"{data.name}, seed {seed}: done before, {line_of(earlier.result['results'])}")
        return 0, earlier.result
    command.say(f"--- {data.name}, seed {seed}")
    is_trained = earlier is not None and earlier.is_trained
    if earlier is not None and settings.do_train:
        again = "a finished run has no checkpoint, so it begins anew"
        if is_trained:
            again = "what is trained is evaluated again"
        command.say(f"done before with another {', '.join(earlier.changed)}: {again}")
    on_main(ranks, lambda: forget(folder))
    result = {
        "task": data.name,
        "seed": seed,
        "updates": 0,
        "settings": compared,
        "data": data.key,
        "model": command.model_key,
        "dtype": dtype_name(command),
        "evaluated": data.eval_keys,
        "results": {},
    }
    if is_trained and earlier is not None:
        result["updates"] = earlier.result.get("updates", 0)
    exit_code = train_and_evaluate(command, settings, data, folder, is_trained, result)
    return exit_code, None if exit_code else result


def train_and_evaluate(
    command: Command, settings: GlueSettings, data: Data, folder: Path, is_trained: bool, result: dict[str, Any]
) -> int:
    """Train, unless an earlier command has, evaluate, and write `result` with the metrics. Returns the exit code."""
    surroundings = command.surroundings
    job = GlueJob(command, settings, data, folder, folder / WEIGHTS if is_trained else None)
    trainer = Trainer(job, surroundings)
    if settings.do_train and not is_trained:
        exit_code = trainer.run()
        if exit_code:
            return exit_code
        result["updates"] = trainer.progress.update
    evaluation = job.evaluation(trainer.engine, surroundings.signals)
    with told_in_a_line(job.device, partial(plain_advice, settings, "a smaller --max_seq_len or model")):
        stop_signal = look_back(settings, data, folder, evaluation, result, command.say)
    # Computed with again after the run's own end.
    trainer.engine.close()
    if job.engine.shards is not None:
        job.engine.shards.leave_groups()
    if stop_signal:
        command.say(
            f"stopped by {name_of(stop_signal)}; the same command with --from_resume 1 evaluates what is trained"
        )
        return 128 + stop_signal
    on_main(command.ranks, lambda: write_results(job.files.stem, result))
    return 0


def run_settings(command: Command, data: Data, seed: int) -> GlueSettings:
    """The settings of one run: its seed, its epochs, and how often it is evaluated."""
    settings = copy.copy(command.settings)
    settings.seed = seed
    settings.epochs = settings.epochs or data.task.epochs
    if not settings.evaluate_during_training:
        # At the end alone.
        settings.eval_interval = 0
    elif settings.do_train:
        updates_of_an_epoch = update_schedule(settings, command.ranks, data).n_updates
        settings.eval_interval = settings.eval_interval or updates_of_an_epoch
    return settings


class Earlier(NamedTuple):
    """A run of an earlier command."""

    # Of its eval_results.json.
    result: dict[str, Any]
    # The flags and files that differ now.
    changed: list[str]
    # Whether its model is the one that the new ones would train.
    is_trained: bool


def done_before(
    command: Command, settings: GlueSettings, data: Data, folder: Path, compared: Mapping[str, Any]
) -> Earlier | None:
    """What an earlier command has left in a folder, if it is to be gone on with."""
    earlier = read_json(folder / "eval_results.json", "settings", "results") if settings.from_resume else None
    if not earlier or not are_figures(earlier["results"]):
        return None
    before = earlier["settings"]
    # Results of earlier versions do not have every setting. What they trained with is the default.
    different = [name for name in COMPARED if before.get(name, default_of(GlueSettings, name)) != compared[name]]
    changed = [f"--{name}" for name in different]
    # Results of earlier versions do not say what they were trained on, or from, or in which precision.
    begins_with = {"data": data.key, "model": command.model_key, "dtype": dtype_name(command)}
    others = [what for what, key in begins_with.items() if earlier.get(what, key) != key]
    changed += others
    has_model = (folder / WEIGHTS).is_file()
    # With such a flag another choice of files is told already.
    same_kinds = {"do_eval", "do_predict"}.isdisjoint(different)
    if same_kinds and evaluated_on_others(earlier, data, has_model):
        changed.append("development or test file")
    is_trained = settings.do_train and not others and EVALUATION.issuperset(different) and has_model
    return Earlier(earlier, changed, is_trained)


def dtype_name(command: Command) -> str:
    """The precision that is computed in: --dtype may say one that machine or model do not have."""
    return str(command.dtype).removeprefix("torch.")


def evaluated_on_others(earlier: Mapping[str, Any], data: Data, has_model: bool) -> bool:
    """Whether results are of another development or test file."""
    evaluated = earlier.get("evaluated")
    if not isinstance(evaluated, dict):
        # Those of earlier versions do not say. Where the model is there, that is found out by evaluating it.
        return has_model
    return evaluated != data.eval_keys


def forget(folder: Path) -> None:
    """Remove what was made of the outputs of a run that is to be made or evaluated again."""
    of_task = folder.parent
    for path in (folder / OUTPUTS, folder / PREDICTIONS, of_task / FOLDER, of_task / "eval_results.json"):
        remove(path)


def write_results(stem: Path, result: dict[str, Any]) -> None:
    """{folder}/eval_results.json of one run."""
    write_json(stem.parent / "eval_results.json", result)
    if result["settings"]["do_train"]:
        # Nobody goes on from the checkpoints of a finished run: they are three times the model, per seed.
        with contextlib.suppress(OSError):
            Checkpoints(f"{stem}_resume").remove_all()
