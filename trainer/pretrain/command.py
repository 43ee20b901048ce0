"""What train_pretrain.py and train_sft.py do between their flags and the loop: divide the process, plan a budget, train."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from trainer.budget.kept_plan import check_out_dir, refuse_forgotten_budget
from trainer.budget.planner import ADVICE_ON_MEMORY, plan_run
from trainer.job import Surroundings
from trainer.launch import launch
from trainer.loop import Trainer
from trainer.machine.collectives import on_main
from trainer.machine.cpu_ranks import divide
from trainer.machine.measure import available_memory
from trainer.machine.out_of_memory import told_in_a_line
from trainer.pretrain.job import PretrainJob
from trainer.pretrain.micro_batch import micro_batch_of
from trainer.pretrain.settings import AUTO_ROWS, PretrainSettings


def run_command(
    job_kind: type[PretrainJob],
    settings: PretrainSettings,
    given: Collection[str],
    argv: Sequence[str],
    is_own_command: bool = False,
) -> int:
    """Train what the flags say. Returns the exit code.

    given: the settings that the user has said. argv: the flags as they were typed. is_own_command: this process was started
    for it. Another program may have computed something before, and then cannot be divided by copying it.
    """
    if settings.batch_size == AUTO_ROWS:
        # It is left open, as if nothing had been said of it.
        given = set(given) - {"batch_size"}
    division = divide(settings, partial(micro_batch_of, settings, given), by_itself=is_own_command)
    work = partial(train, job_kind=job_kind, given=given)
    return launch(work, f"trainer/{settings.prog}", settings, argv, settings.ddp, division)


def train(
    settings: PretrainSettings,
    surroundings: Surroundings,
    job_kind: type[PretrainJob] = PretrainJob,
    given: Collection[str] = (),
) -> int:
    """Set everything up, train, and show what came out."""
    if settings.has_budget:
        if not settings.dry_run:
            # A plan takes a while: a folder that cannot be written is told before.
            on_main(surroundings.ranks, partial(check_out_dir, settings))
        # A plan leaves compiled code and a heap in this process, for which the run's own estimate has room.
        surroundings = replace(surroundings, available_memory=available_memory(surroundings.device))
        with told_in_a_line(surroundings.device, lambda: ADVICE_ON_MEMORY):
            planned = plan_run(settings, given, surroundings, job_kind.kind)
        if planned is None:
            return 0
        settings = planned
    elif settings.from_resume:
        on_main(surroundings.ranks, partial(refuse_forgotten_budget, settings, given))
    job = job_kind(settings, surroundings)
    return Trainer(job, surroundings).run()
