"""How `--batch_size auto` cuts an update into micro-batches: into as few as fit.

A GPU computes a large micro-batch about as fast as the host can launch a small one. An update keeps the rows that it has
without the flag, those of --accumulation_steps micro-batches of the usual rows (`usual_rows`, the default of --batch_size).
Its loss does not depend on how it is cut (docs/design.md), but for the last bits. What the flags count in micro-batches,
as --log_interval does, they count in those of the usual rows with "auto" too, and it is converted here.

On a GPU the largest micro-batch is tried: it is computed and thrown away, and halved until it fits. On a CPU, where a
try would end the process, the formula of footprint.py decides. A resume keeps the rows of its run, since others would
change the last bits.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from common.errors import UserError
from common.flags import LARGEST
from common.wording import counted
from dataset.corpus import Corpus
from dataset.loader import Batch
from dataset.packing import Totals
from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.budget.plan import MOST_ROWS_OF_MICRO_BATCH
from trainer.machine.collectives import least_of_ranks, on_main
from trainer.machine.devices import autocast
from trainer.machine.out_of_memory import is_out_of_memory
from trainer.machine.ranks import Ranks
from trainer.pretrain.footprint import STATE_BYTES, training_bytes
from trainer.pretrain.loss import pretrain_loss
from trainer.pretrain.settings import AUTO_ROWS, PretrainSettings
from trainer.saving.checkpoint import Checkpoints

# share of the free memory that --batch_size auto takes on a CPU
SAFE_SHARE = 0.85


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
    device_type: str,
    ranks: Ranks,
    fits: Callable[[int], bool],
) -> tuple[PretrainSettings, list[str]]:
    """The settings with a number of rows in the place of AUTO_ROWS, and a line that tells it. A collective.

    stem: path of the run's files without their endings. rows_of_epoch: of all ranks. fits: whether a micro-batch of so many
    rows does, on all ranks. Errors: UserError for a number of processes that do not divide the update.
    """
    if settings.batch_size != AUTO_ROWS:
        return settings, []
    recorded = on_main(ranks, partial(recorded_rows, settings, stem))
    # Another machine may divide itself into another number of processes.
    if recorded is not None and recorded % ranks.sharing == 0:
        return with_rows(settings, recorded), [f"{update_text(settings, recorded)}, as before the resume"]
    usual = settings.usual_rows()
    rows_of_update = usual * settings.accumulation_steps
    # A micro-batch of more rows than there are would never be full, and what is compiled is compiled for full ones.
    most = min(MOST_ROWS_OF_MICRO_BATCH[device_type], math.ceil(rows_of_epoch / ranks.micro_batches_at_once))
    choices = row_choices(rows_of_update, max(most, ranks.sharing), ranks.sharing, usual * settings.warmup_iters)
    if why_whole(config):
        choices = [usual]
    if not choices:
        raise UserError(
            f"--cpu_processes {ranks.sharing} --batch_size auto: updates of {rows_of_update:,} rows cannot be divided so that all "
            "processes have the same; take another number, or auto"
        )
    rows = choices[0]
    while not fits(rows):
        smaller = [choice for choice in choices if 2 * choice <= rows]
        if not smaller:
            # The run itself will say what helps.
            break
        rows = smaller[0]
    why = "" if rows == choices[0] else f", since {counted(choices[0], 'row')} do not fit"
    return with_rows(settings, rows), [f"{update_text(settings, rows)}{why}"]


def settle_on_rows(
    settings: PretrainSettings,
    stem: Path,
    model: MiniMindForCausalLM,
    corpus: Corpus,
    pad_id: int,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    free: float | None,
) -> tuple[PretrainSettings, list[str]]:
    """`settle` with the model and the data of a run. free: bytes of memory. A collective."""
    fits = partial(fits_all_ranks, settings, model, corpus, pad_id, dtype, device, ranks, free)
    return settle(settings, stem, model.config, corpus.plan(0).n_rows, device.type, ranks, fits)


def fits_all_ranks(
    settings: PretrainSettings,
    model: MiniMindForCausalLM,
    corpus: Corpus,
    pad_id: int,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    free: float | None,
    rows: int,
) -> bool:
    """Whether a micro-batch of so many rows fits all ranks: tried on a GPU, by the formula elsewhere. A collective."""
    plan = corpus.plan(0)
    if device.type != "cuda":
        needed = training_bytes(
            model.config,
            rows,
            plan.T,
            half=dtype.itemsize,
            compiled=settings.use_compile != "0",
            recomputes=settings.gradient_checkpointing,
            device_type=device.type,
            sharing=ranks.sharing,
        )
        return free is None or needed <= SAFE_SHARE * free
    first_rows = range(min(rows, plan.n_rows))
    batch = corpus.assembler(pad_id, rows)[plan.recipe(first_rows)]
    moments = STATE_BYTES // 2 * sum(p.numel() for p in model.parameters())
    own = fits_gpu(model, batch, plan.totals(0, len(first_rows)), device, dtype, moments)
    return least_of_ranks(ranks, float(own), device) > 0


def fits_gpu(
    model: MiniMindForCausalLM,
    batch: Batch,
    totals: Totals,
    device: torch.device,
    dtype: torch.dtype,
    optimizer_bytes: int,
) -> bool:
    """Whether a GPU has the memory for a micro-batch in the midst of an update. Nothing of it is left.

    It is computed by the plain code, which takes no less than the compiled one.
    """
    fitted = True
    with torch.random.fork_rng(devices=[device]):
        try:
            # What is there at a later micro-batch of a later update: the optimiser's moments, and all gradients.
            moments = torch.empty(optimizer_bytes, dtype=torch.uint8, device=device)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            with autocast(device, dtype):
                loss, _ = pretrain_loss(model, batch.to(device), totals)
            loss.backward()
            del moments, loss
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fitted = False
    # Behind the block: within it the error holds the tensors that filled the memory.
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    # The peak in the log is that of the run.
    torch.cuda.reset_peak_memory_stats(device)
    return fitted


def row_choices(rows_of_update: int, most: int, sharing: int = 1, rows_of_warmup: int = 0) -> list[int]:
    """The numbers of rows that a micro-batch may have, the largest first.

    They divide the update and, so that each learning rate stays what it is, the rows of the warm-up. The ranks that share a
    micro-batch get equal parts of it.
    """
    found = []
    for rows in range(min(most, rows_of_update), 0, -1):
        if rows_of_update % rows == 0 and rows_of_warmup % rows == 0 and rows % sharing == 0:
            found.append(rows)
    return found


def update_text(settings: PretrainSettings, rows: int) -> str:
    """How an update of the settings is cut into micro-batches of so many rows."""
    steps = settings.usual_rows() * settings.accumulation_steps // rows
    cut = f"{counted(steps, 'micro-batch', 'micro-batches')} of {counted(rows, 'row')}"
    return f"--batch_size auto: an update is {cut}"


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
