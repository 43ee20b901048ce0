"""Evaluation during training: validation loss over whole documents, and sampled texts.

trainer/loop.py decides when they are due.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from common.errors import UserError, user_errors, utf8
from dataset.batches import Batch
from dataset.corpus import ValidationBatches
from dataset.loader import to_device
from dataset.tokenizing.encoder import DocumentEncoder
from model.decoding import Sampling, decode
from model.model_minimind import MiniMindLM
from trainer.engine import Engine
from trainer.machine.command_line import StopSignals
from trainer.machine.devices import rng_state, set_rng_state
from trainer.machine.measure import seconds
from trainer.machine.ranks import min_over_ranks, on_main

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@torch.no_grad()
def gather_batch_rows(
    engine: Engine,
    rows_of_batch: Sequence[Any],
    compute: Callable[[int], Any],
    shape: tuple[int, int],
    signals: StopSignals,
) -> tuple[torch.Tensor, int]:
    """Returns (a float64 table of `shape` with compute(i) in its rows rows_of_batch[i]; number of a stop signal, or 0).

    Rank i mod world size computes batch i into separate rows; the sum over the ranks adds zeros to them, so the table is the
    same on every rank and world size. If the model is sharded, all ranks compute together: one without a batch left repeats
    the last one and discards the result.
    """
    ranks = engine.ranks
    table = torch.zeros(shape, dtype=torch.float64)
    signum = 0
    with evaluation_mode(engine):
        for first in range(0, len(rows_of_batch), ranks.world_size):
            i = first + ranks.rank
            has_batch = i < len(rows_of_batch)
            signum = signals.stop_request
            if engine.is_sharded:
                # Ranks that compute together stop together, by the largest number.
                signum = int(-min_over_ranks(ranks, -signum))
            if signum or not (has_batch or engine.is_sharded):
                break
            values = compute(i if has_batch else len(rows_of_batch) - 1)
            if has_batch:
                table[rows_of_batch[i]] = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    if ranks.world_size > 1:
        table = table.to(engine.device)
        dist.all_reduce(table)
    return table.cpu(), int(-min_over_ranks(ranks, -signum))


def sums_over_batches(
    engine: Engine,
    n_batches: int,
    figures_of: Callable[[int], Sequence[float]],
    n_figures: int,
    signals: StopSignals,
) -> tuple[list[float], int]:
    """Returns (sums of the n_figures of all batches, identical on every world size; number of a stop signal, or 0).

    Floating-point sums depend on their order, and figures must not depend on the number of ranks: every rank adds up the
    figures of all batches in the same order.
    """
    table, stop_request = gather_batch_rows(engine, range(n_batches), figures_of, (n_batches, n_figures), signals)
    # One column at a time: Python floats take four times the memory.
    return [math.fsum(table[:, number].tolist()) for number in range(n_figures)], stop_request


# Maximum positions evaluated at once: a whole batch with rows of up to 2,048, fewer rows if they are longer. The mask of a row
# has the square of its positions: 16 rows of 32,768 would take 17 GB.
MAX_POSITIONS_AT_ONCE = 32_768


def evaluate(engine: Engine, batches: ValidationBatches, signals: StopSignals) -> tuple[dict[str, float], int]:
    """Returns (figures, identical on every world size; number of a stop signal received meanwhile, or 0).

    Figures: val_loss in nats per target, perplexity, and bits_per_byte over the text's UTF-8 bytes if these are known.
    """

    def figures_of(number: int) -> tuple[float, int]:
        batch = to_device(batches[number], engine.device)
        R, T = batch.input_ids.shape
        step = max(1, min(R, MAX_POSITIONS_AT_ONCE // T))
        total = sum(summed_loss(engine, batch, slice(first, first + step)) for first in range(0, R, step))
        return total, batch.n_targets

    (total, targets), stop_request = sums_over_batches(engine, len(batches), figures_of, 2, signals)
    mean = total / max(targets, 1)
    # exp(710) overflows a float.
    values = {"val_loss": mean, "perplexity": math.exp(min(mean, 700))}
    if batches.n_bytes is not None:
        values["bits_per_byte"] = total / math.log(2) / max(batches.n_bytes, 1)
    return values, stop_request


# What `evaluation_seconds` times: so many rows of a batch on a CPU (others take hardly less time for few), as often, after once to warm up
TIMED_ROWS = 2
TIMES = 5


@torch.no_grad()
def evaluation_seconds(engine: Engine, batches: ValidationBatches) -> float:
    """Seconds of an evaluation on the machine as it is now, by a few of its rows. A collective if the model is sharded."""
    batch = to_device(batches[0], engine.device)
    R, T = batch.input_ids.shape
    rows = TIMED_ROWS if engine.device.type == "cpu" else max(1, min(R, MAX_POSITIONS_AT_ONCE // T))
    with evaluation_mode(engine):
        once = partial(summed_loss, engine, batch, slice(rows))
        seconds(once, engine.device)
        # Not the mean: a pause in one of them would count for each row.
        of_rows = median(seconds(once, engine.device) for _ in range(TIMES))
    return of_rows * R / rows * math.ceil(len(batches) / engine.ranks.world_size)


def summed_loss(engine: Engine, batch: Batch, rows: slice) -> float:
    """In nats, over the targets of some rows."""
    model = cast(MiniMindLM, engine.model)
    with engine.autocast():
        loss, _ = model.training_losses(
            batch.input_ids[rows], batch.targets[rows], batch.document_ids[rows], batch.position_ids[rows]
        )
    return float(loss)


@contextlib.contextmanager
def evaluation_mode(engine: Engine) -> Iterator[None]:
    """Context with the engine's model in eval mode. Restores training mode and the random state."""
    before = rng_state(engine.device)
    engine.model.eval()
    try:
        yield
    finally:
        engine.model.train()
        if engine.is_sharded:
            # Without a backward pass the gathered parameters of the root would stay in the place of its own.
            engine.model.reshard()  # type: ignore[operator]
        set_rng_state(before, engine.device)


# ---------------------------------------------------------------------------------- samples (--sample_prompts)

SAMPLE_TOKENS = 120
# Those of an export's generation_config.json
TEMPERATURE = 0.7
TOP_P = 0.9
# transformers' default
TOP_K = 50


@dataclass(frozen=True)
class Sampler:
    """Continues some prompts with the model in training, each time from the same seed.

    with_prompt: a text starts with its prompt, as the model got it.
    """

    tokenizer: "PreTrainedTokenizerBase"
    encoder: DocumentEncoder
    prompts: Sequence[str]
    seed: int
    with_prompt: bool = True

    def __call__(self, engine: Engine, signals: StopSignals) -> tuple[list[tuple[str, str]], int]:
        """Returns ([(prompt, text)], number of a stop signal that rank 0 received meanwhile, or 0). A collective.

        Rank 0 samples while the others wait. If the model is sharded, all ranks compute the same text together.
        """
        ranks = engine.ranks
        samples: list[tuple[str, str]] = []
        for prompt in self.prompts:
            draw = partial(self.sample, engine, prompt)
            samples.append((prompt, draw() if engine.is_sharded else on_main(ranks, draw)))
            stop_request = on_main(ranks, lambda: signals.stop_request)
            if stop_request:
                # A resume samples all of them again.
                return [], stop_request
        return samples, 0

    @torch.no_grad()
    def sample(self, engine: Engine, prompt: str) -> str:
        """Returns the continuation as text, after the prompt if with_prompt. The random state of training does not change."""
        model = cast(MiniMindLM, engine.model)
        positions = model.config.max_position_embeddings
        # A model with few positions continues for half of them.
        new_tokens = min(SAMPLE_TOKENS, positions // 2)
        # If a prompt does not fit, keep its end.
        ids = self.encoder.prompt_ids(prompt)[-(positions - new_tokens) :]
        # An empty prompt without BOS still needs a token to start with.
        start = ids or [self.encoder.eos_id or 0]
        eos_ids: Any = model.config.eos_token_id
        ends = eos_ids if isinstance(eos_ids, list) else [eos_ids]
        sampling = Sampling(new_tokens, TEMPERATURE, TOP_P, TOP_K)
        with evaluation_mode(engine):
            torch.manual_seed(self.seed)
            with engine.autocast():
                # All ranks make as many passes: if rounding made their texts differ, one that ended would leave the others waiting.
                (new,) = decode(model, [start], sampling, [] if engine.is_sharded else ends)
        end = next((i for i, token in enumerate(new) if token in ends), len(new))
        shown = [*start, *new[:end]] if self.with_prompt else new[:end]
        return str(self.tokenizer.decode(shown, skip_special_tokens=True))


def read_prompts(arguments: list[str]) -> list[str]:
    """The prompts of --sample_prompts: the strings themselves, or the lines of a file that is the only argument.

    Errors: UserError for a file without prompts, and for bytes that are not UTF-8 (a shell passes any): now and not at the
    first evaluation.
    """
    prompts, source = arguments, "--sample_prompts"
    with user_errors():
        # os.path.isfile, unlike Path.is_file, does not raise for a string that is too long for a name.
        if len(arguments) == 1 and (arguments[0].endswith(".txt") or os.path.isfile(arguments[0])):
            # A prompt may contain U+2028, and Windows writes a byte-order mark.
            lines = Path(arguments[0]).read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n")
            prompts = [line for line in lines if line.strip()]
            source += f" {arguments[0]}:"
            if not prompts:
                raise UserError(f"{source} no prompts in this file; expected one per line")
    return [utf8(prompt, source) for prompt in prompts]
