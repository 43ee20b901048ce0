"""What train_pretrain.py and train_sft.py do between their flags and the loop: split into processes, plan a budget, train."""

import contextlib
from collections.abc import Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.processes import restart_clock
from common.wording import announce
from model.config import ModelConfig, parameter_count
from model.weight_record import tokenizer_beside
from trainer.budget.advice import advise
from trainer.budget.clock import clock_of
from trainer.budget.plan import forgotten_budget
from trainer.budget.planner import plan_run
from trainer.calls import Caller, Result
from trainer.job import RunContext, RunFiles
from trainer.launch import launch
from trainer.loop import Trainer
from trainer.machine.cpu_ranks import IS_CALL, processes_of, run_ranks
from trainer.machine.ranks import on_main, ranks_of_launcher
from trainer.pretrain.data import announce_embedded_corpus, refuse_too_little_text
from trainer.pretrain.initial_model import settings_of_folder
from trainer.pretrain.job import PretrainJob
from trainer.pretrain.memory import MAX_MICRO_ROWS, free_memory, why_not_divisible
from trainer.pretrain.parts import open_run
from trainer.pretrain.settings import AUTO_ROWS, DEFAULT_TOKENIZER, MODEL_FLAGS, PretrainSettings
from trainer.reporting.records import RunRecords
from trainer.saving.run_folder import check_writable
from trainer.saving.weights import is_kept


def run_command(
    job_class: type[PretrainJob], settings: PretrainSettings, argv: Sequence[str] | None, caller: Caller | None = None
) -> int:
    """Train what the flags say. Returns the exit code.

    argv: the flags of a function's call, by a program that goes on. None: this process was started for the run. caller: of
    `trainer.train`, gets the result.
    """
    if argv is not None and caller is None:
        # start of the --budget clock
        restart_clock()
    if settings.ddp and ranks_of_launcher() is None:
        raise UserError("--ddp needs a launcher: start with torchrun --nproc_per_node 2 in place of python")
    n_ranks, notices = cpu_processes(settings, is_call=argv is not None)
    return run_ranks(n_ranks, partial(launch, partial(train, job_class=job_class), settings, argv, notices, caller))


# Assumed vocabulary of a tokenizer that is not opened yet: larger than most, to overestimate memory rather than underestimate it
LARGE_VOCABULARY = 64_000


def cpu_processes(settings: PretrainSettings, is_call: bool) -> tuple[int, list[str]]:
    """As `processes_of`; 1 if flags or a folder of weights are wrong: the job reports why. is_call: of a function."""
    try:
        _, config = settings_of_folder(settings)
        if config is None:
            config = ModelConfig(**{name: getattr(settings, name) for name in MODEL_FLAGS})
            if settings.tokenizer_path != DEFAULT_TOKENIZER or settings.has_budget:
                config.vocab_size = LARGE_VOCABULARY
    except (ValueError, OSError):
        return 1, []
    # The plan, or the job, chooses the rows.
    is_open = settings.batch_size == AUTO_ROWS or (settings.has_budget and "batch_size" not in settings.user_set)
    rows = MAX_MICRO_ROWS["cpu"] if is_open else settings.batch_size
    obstacle = IS_CALL if is_call else why_not_divisible(config)
    positions, parameters = settings.max_seq_len, parameter_count(config)
    return processes_of(settings.cpu_processes, settings.device, rows, positions, parameters, obstacle, is_open)


def train(settings: PretrainSettings, run_context: RunContext, job_class: type[PretrainJob]) -> int:
    """Set up, train, and report."""
    # before the planner's measurements and the model take some of it
    free = free_memory(run_context.device, run_context.ranks)
    on_main(run_context.ranks, lambda: announce_embedded_corpus(settings, job_class.kind))
    budget: dict[str, Any] = {}
    if settings.has_budget:
        if not settings.dry_run:
            # Planning takes a while, so first create the folder and check that it is writable. The width in the file names is not known yet.
            on_main(run_context.ranks, partial(check_writable, Path(settings.out_dir) / settings.save_weight))
        settings = plan_run(settings, run_context, free, job_class.kind)
        if settings.dry_run:
            return 0
    elif settings.planned_for and not settings.from_resume:
        line = f"note: --config has a plan for {settings.planned_for}: its updates are trained, without planning and without a clock"
        on_main(run_context.ranks, partial(announce, line))
    elif settings.from_resume:
        budget = on_main(run_context.ranks, partial(forgotten_budget, settings))
    parts = open_run(settings, run_context, free, job_class.kind)
    if not settings.has_budget:
        # The planner has checked that of a budget, and its clock may ask for more updates than there is text for.
        refuse_too_little_text(settings, parts.corpus)
    job = job_class(parts)
    # What the loop and the job take from the planner is handed in here.
    job.advise = partial(advise, parts)
    job.length.clock = clock_of(parts, job.engine)
    if settings.has_budget:
        # A plan is for one budget: no flag makes its run longer.
        job.length.flag = ""
    # Its file has the budget too: a planned run that goes on by its flags can also go on by its budget afterwards.
    job.files.settings = copy(parts.settings)
    vars(job.files.settings).update(budget)
    if is_kept(parts.tokenizer):
        # The folder that it was read from may be emptied, as that of a plan.
        job.files.settings.tokenizer_path = str(tokenizer_beside(job.files.outputs["weights"]))
    exit_code = Trainer(job, run_context).run()
    if run_context.caller:
        run_context.caller.result = result_of(job.files, exit_code)
    return exit_code


def result_of(files: RunFiles, exit_code: int) -> Result:
    """The result of a run that has ended."""
    metrics, report = (Path(f"{files.stem}.{ending}") for ending in ("metrics.jsonl", "report.html"))
    records = RunRecords(metrics)
    # Only rank 0 has them, perhaps on another machine.
    with contextlib.suppress(OSError):
        records.read_new_lines()
    return Result(
        reason="stopped" if exit_code else "finished",
        weights=files.outputs["weights"],
        training_loss=records.last("loss"),
        val_loss=records.last("val_loss"),
        report=report if report.is_file() and not exit_code else None,
        samples=tuple((prompt, text) for update, prompt, text in records.samples if update == records.samples[-1][0]),
    )
