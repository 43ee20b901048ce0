"""The validation loss, over whole documents, while training.

When it is due and what is logged of it is in trainer/loop.py; the texts that come with it are in trainer/sampling.py.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from dataset.corpus import ValidationBatches
from dataset.loader import to_device
from model.model_minimind import MiniMindForCausalLM
from trainer.engine import Engine
from trainer.machine.command_line import StopSignals
from trainer.machine.devices import rng_state, set_rng_state


@torch.no_grad()
def rows_of_batches(
    engine: Engine,
    places: Sequence[Any],
    compute: Callable[[int], Any],
    shape: tuple[int, int],
    signals: StopSignals,
) -> tuple[torch.Tensor, int]:
    """(float64 table of `shape`, in which compute(i) fills the rows places[i]; number of a stop signal, or 0).

    Batch i is computed by rank i mod world size into rows of its own; the sum over the ranks adds zeros to them, so that the
    table is the same on every rank and world size. Where the ranks have sharded the model they compute together: one that has
    no batch left computes the last one, and nothing comes of it.
    """
    ranks = engine.ranks
    # Behind the rows the signal of each rank.
    table = torch.zeros(shape[0] + ranks.world_size, shape[1], dtype=torch.float64)
    with undisturbed(engine):
        for first in range(0, len(places), ranks.world_size):
            i = first + ranks.rank
            has_batch = i < len(places)
            signum = signals.signum
            if engine.shards is not None:
                # Ranks that compute together stop together.
                largest = torch.tensor(signum, device=engine.device)
                dist.all_reduce(largest, dist.ReduceOp.MAX)
                signum = int(largest.item())
            if signum:
                table[shape[0] + ranks.rank, 0] = signals.signum
                break
            if not has_batch and engine.shards is None:
                break
            rows = compute(i if has_batch else len(places) - 1)
            if has_batch:
                table[places[i]] = torch.as_tensor(rows, dtype=torch.float64, device="cpu")
    if ranks.world_size > 1:
        table = table.to(engine.device)
        dist.all_reduce(table)
    table = table.cpu()
    return table[: shape[0]], int(table[shape[0] :, 0].max())


def sums_over_batches(
    engine: Engine,
    n_batches: int,
    figures_of: Callable[[int], Sequence[float]],
    n_figures: int,
    signals: StopSignals,
) -> tuple[list[float], int]:
    """(the sums of a batch's n_figures over all batches, identical on every world size; number of a stop signal, or 0).

    Floating-point sums depend on their order, and figures must not depend on the number of ranks: every rank adds up the
    figures of all batches in the same order.
    """
    table, stop_signal = rows_of_batches(engine, range(n_batches), figures_of, (n_batches, n_figures), signals)
    # One column at a time: as Python's numbers all of them would take four times the memory.
    return [math.fsum(table[:, number].tolist()) for number in range(n_figures)], stop_signal


# Positions that are evaluated at once. Rows of up to 2,048 are all those of a batch. Of longer ones there are fewer: the mask of a
# row has the square of its positions, and 16 rows of 32,768 would have one of 17 GB.
MOST_POSITIONS = 32_768


def evaluate(engine: Engine, batches: ValidationBatches, signals: StopSignals) -> tuple[dict[str, float], int]:
    """Validation figures, identical on every world size: (dict, number of a stop signal that came meanwhile, or 0).

    The dict: val_loss in nats per target, perplexity, and bits_per_byte over the text's UTF-8 bytes where these are known.
    """
    model = cast(MiniMindForCausalLM, engine.model)

    def figures_of(number: int) -> tuple[float, int]:
        batch = to_device(batches[number], engine.device)
        R, T = batch.input_ids.shape
        step = max(1, min(R, MOST_POSITIONS // T))
        total = 0.0
        for first in range(0, R, step):
            rows = slice(first, first + step)
            with engine.autocast():
                loss, _ = model.training_losses(
                    batch.input_ids[rows], batch.targets[rows], batch.document_ids[rows], batch.position_ids[rows]
                )
            total += float(loss)
        return total, batch.n_targets

    (total, targets), stop_signal = sums_over_batches(engine, len(batches), figures_of, 2, signals)
    mean = total / max(targets, 1)
    values = {
        "val_loss": mean,
        # exp(710) is beyond what a float holds.
        "perplexity": math.exp(min(mean, 700)),
    }
    if batches.n_bytes is not None:
        values["bits_per_byte"] = total / math.log(2) / max(batches.n_bytes, 1)
    return values, stop_signal


@contextlib.contextmanager
def undisturbed(engine: Engine) -> Iterator[None]:
    """The engine's model without dropout; what is drawn within does not change what the training draws next."""
    before = rng_state(engine.device)
    engine.model.eval()
    try:
        yield
    finally:
        engine.model.train()
        set_rng_state(before, engine.device)
