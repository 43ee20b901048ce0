"""How `--batch_size auto` cuts an update into micro-batches: into as few as the memory allows.

A GPU computes a large micro-batch about as fast as the host can launch a small one. An update keeps the rows that it has
without the flag, those of --accumulation_steps micro-batches of the usual rows (`usual_rows`, the default of --batch_size).
Its loss does not depend on how it is cut (docs/design.md), but for the last bits. What the flags count in micro-batches,
as --log_interval does, they count in those of the usual rows with "auto" too, and it is converted here: so the flags mean
the same on each machine.

`settle` decides once, before the first update, in five steps: it keeps what the run had before a resume, since other
micro-batches would change the last bits (`recorded_rows`); lists the numbers of rows that keep the update
(`choices_of_auto`); takes the first that fits by the estimate of the memory; on a GPU tries it, with a micro-batch that is
computed and thrown away (`rows_that_ran`); and puts it into the settings of the run, where it stands like any other number
(`with_rows`), with a line that gives the reason (`reason_for`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from common.arithmetic import ceil_div
from common.errors import UserError
from common.flags import LARGEST
from common.wording import counted
from model.config import MiniMindConfig
from trainer.budget.plan import MOST_ROWS_OF_MICRO_BATCH
from trainer.machine.collectives import on_main
from trainer.machine.out_of_memory import gigabytes
from trainer.pretrain.memory_plan import MemoryPlan, MicroBatch
from trainer.pretrain.settings import AUTO_ROWS, PretrainSettings
from trainer.saving.checkpoint import Checkpoints

# Positions of a micro-batch that keep a GPU busy while the host launches the next operations.
ENOUGH_POSITIONS = 32_768

# Whether a micro-batch of so many rows fits all ranks, found out by computing one. A collective.
Trial = Callable[[int], bool]


def why_whole(config: MiniMindConfig) -> str:
    """Why the loss of a micro-batch is not the sum of its parts' losses; "" where it is."""
    if config.use_moe and not config.seq_aux:
        return "the auxiliary loss of this mixture of experts is defined over a whole micro-batch"
    return ""


def settle(
    settings: PretrainSettings,
    stem: Path,
    config: MiniMindConfig,
    rows_of_epoch: int,
    T: int,
    memory: MemoryPlan,
    free: float | None,
    trial: Trial,
) -> tuple[PretrainSettings, str]:
    """The settings with a number of rows in the place of AUTO_ROWS, and a line that tells it. A collective.

    stem: path of the run's files without their endings. rows_of_epoch: of all ranks; T: positions of a row;
    free: of `free_on_all_ranks`.
    Errors: UserError for a settings file of the run that is none, and for a number of processes that do not divide the update.
    """
    ranks = memory.ranks
    recorded = on_main(ranks, partial(recorded_rows, settings, stem))
    # Another machine may divide itself into another number of processes.
    if recorded is not None and recorded % ranks.sharing == 0:
        line = f"--batch_size auto: {update_text(settings, recorded)}, as before the resume"
        return with_rows(settings, recorded), line
    choices = choices_of_auto(settings, config, rows_of_epoch, memory)
    estimated = memory.first_that_fits(config, choices, T, free)
    rows = rows_that_ran(choices, estimated, trial) if memory.device.type == "cuda" else estimated
    if rows == estimated:
        reason = reason_for(MicroBatch(config, rows, T, settings.gradient_checkpointing), memory, free)
    else:
        reason = f"since {counted(estimated, 'row')} did not fit when tried"
    line = f"--batch_size auto: {update_text(settings, rows)}, {reason}"
    return with_rows(settings, rows), line


def reason_for(micro_batch: MicroBatch, memory: MemoryPlan, free: float | None) -> str:
    """Why this micro-batch is taken, by the estimate. free: bytes; None where the system does not tell."""
    enough = f"for which {gigabytes(memory.needed_at_most(micro_batch))} are enough"
    if free is None:
        return enough
    return f"{enough} of the {gigabytes(free)} that are free on {memory.device}"


def choices_of_auto(
    settings: PretrainSettings, config: MiniMindConfig, rows_of_epoch: int, memory: MemoryPlan
) -> list[int]:
    """The numbers of rows that may take the place of AUTO_ROWS, the largest first.

    Errors: UserError for a number of processes that do not divide the update.
    """
    usual = settings.usual_rows()
    rows_of_update = usual * settings.accumulation_steps
    choices = possible_rows(rows_of_update, usual * settings.warmup_iters, rows_of_epoch, memory)
    if why_whole(config):
        # Other micro-batches would be another loss.
        choices = [usual]
    if not choices:
        raise UserError(
            f"--cpu_processes {memory.ranks.sharing} --batch_size auto: updates of {rows_of_update:,} rows "
            "cannot be divided so that all processes have the same; take another number, or auto"
        )
    return choices


def possible_rows(rows_of_update: int, rows_of_warmup: int, rows_of_epoch: int, memory: MemoryPlan) -> list[int]:
    """`row_choices` of a run on this device, whose epochs have so many rows for all ranks."""
    ranks = memory.ranks
    most = MOST_ROWS_OF_MICRO_BATCH[memory.device.type]
    # A micro-batch of more rows than there are would never be full, and what is compiled is compiled for full ones.
    most = max(min(most, ceil_div(rows_of_epoch, ranks.micro_batches_at_once)), ranks.sharing)
    return row_choices(rows_of_update, most, ranks.sharing, rows_of_warmup)


def rows_that_ran(choices: Sequence[int], rows: int, trial: Trial) -> int:
    """The first number of rows with which a trial fits, of `rows`, half of them or fewer, and so on. A collective.

    Where not even the smallest choice fits it is taken all the same: the run will say what would help.
    """
    while not trial(rows):
        smaller = [choice for choice in choices if 2 * choice <= rows]
        if not smaller:
            break
        rows = smaller[0]
    return rows


def update_text(settings: PretrainSettings, rows: int) -> str:
    """What an update of the settings is cut into, if a micro-batch has so many rows."""
    steps = settings.usual_rows() * settings.accumulation_steps // rows
    return f"an update is {counted(steps, 'micro-batch', 'micro-batches')} of {counted(rows, 'row')}"


def row_choices(rows_of_update: int, most: int, sharing: int = 1, rows_of_warmup: int = 0) -> list[int]:
    """The numbers of rows that a micro-batch may have, the largest first.

    They divide the update and, so that each learning rate stays what it is, the rows of the warm-up. The ranks that share a
    micro-batch get equal parts of it. most: not more than these.
    """
    found = []
    for rows in range(min(most, rows_of_update), 0, -1):
        divides = rows_of_update % rows == 0 and rows_of_warmup % rows == 0
        if divides and rows % sharing == 0:
            found.append(rows)
    return found


def with_rows(settings: PretrainSettings, rows: int) -> PretrainSettings:
    """The settings with micro-batches of so many rows in the place of AUTO_ROWS, and the same updates."""
    usual = settings.usual_rows()
    return dataclasses.replace(
        settings,
        batch_size=rows,
        accumulation_steps=usual * settings.accumulation_steps // rows,
        warmup_iters=converted(settings.warmup_iters, rows, usual),
        log_interval=converted(settings.log_interval, rows, usual),
        save_interval=converted(settings.save_interval, rows, usual),
        eval_interval=converted(settings.eval_interval, rows, usual),
    )


def converted(count: int, rows: int, usual: int) -> int:
    """So many micro-batches of `usual` rows, counted in micro-batches of `rows`. 0 means never, and stays.

    It is rounded, but for a warm-up, which `row_choices` has looked at: it decides on learning rates.
    """
    if count == 0:
        return 0
    return min(max(1, round(count * usual / rows)), LARGEST)


def recorded_rows(settings: PretrainSettings, stem: Path) -> int | None:
    """The rows of a micro-batch of the run that a resume goes on with; None: there is none, or its updates are others."""
    path = Path(f"{stem}.settings.yaml")
    # A run that has saved nothing, as one that ran out of memory at once, has nothing that a resume would go on with.
    has_saved = bool(Checkpoints(f"{stem}_resume").paths())
    if not settings.from_resume or not has_saved or not path.is_file():
        return None
    before = type(settings).read(path)
    rows_of_update = before.batch_size * before.accumulation_steps
    if before.batch_size == AUTO_ROWS or rows_of_update != settings.usual_rows() * settings.accumulation_steps:
        return None
    return before.batch_size


def note_on_small(
    settings: PretrainSettings,
    config: MiniMindConfig,
    rows_of_epoch: int,
    T: int,
    memory: MemoryPlan,
    free: float | None,
) -> str | None:
    """A line for a run on a GPU whose micro-batches could be much larger; None for others. free: of `free_on_all_ranks`."""
    batch_size = settings.batch_size
    steps = settings.accumulation_steps
    is_small = memory.device.type == "cuda" and steps > 1 and batch_size * T < ENOUGH_POSITIONS
    # A budget has been planned with its micro-batches, and a resume keeps those that it has.
    has_its_rows = bool(settings.has_budget or settings.from_resume or settings.rows_per_update)
    if not is_small or has_its_rows or why_whole(config):
        return None
    rows_of_warmup = batch_size * settings.warmup_iters
    possible = possible_rows(batch_size * steps, rows_of_warmup, rows_of_epoch, memory)
    choices = [rows for rows in possible if rows >= 2 * batch_size]
    if not choices:
        return None
    rows = memory.first_that_fits(config, choices, T, free)
    if not memory.fits(MicroBatch(config, rows, T, settings.gradient_checkpointing), free):
        return None
    flags = f"--batch_size {rows} --accumulation_steps {batch_size * steps // rows}"
    if settings.warmup_iters:
        # It counts micro-batches, which are fewer now.
        flags += f" --warmup_iters {rows_of_warmup // rows}"
    if batch_size == settings.usual_rows():
        flags = "--batch_size auto"
    return (
        f"note: between micro-batches as small as {batch_size} x {T} positions a GPU waits for the host; {flags} trains the "
        f"same updates in micro-batches of {rows} rows, which fit, in less time"
    )
