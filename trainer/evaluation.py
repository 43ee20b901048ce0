"""What is found out of a model while it trains: its validation loss, over whole documents, and texts that it writes.

trainer/loop.py decides when they are due.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from common.errors import UserError, user_errors
from dataset.corpus import ValidationBatches
from dataset.loader import to_device
from dataset.tokenizing.encoder import DocumentEncoder
from model.model_minimind import MiniMindForCausalLM
from trainer.engine import Engine
from trainer.machine.command_line import StopSignals
from trainer.machine.devices import rng_state, set_rng_state
from trainer.machine.ranks import on_main


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
            if engine.is_sharded:
                # Ranks that compute together stop together.
                largest = torch.tensor(signum, device=engine.device)
                dist.all_reduce(largest, dist.ReduceOp.MAX)
                signum = int(largest.item())
            if signum:
                table[shape[0] + ranks.rank, 0] = signals.signum
                break
            if not has_batch and not engine.is_sharded:
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


# ------------------------------------------------------------------------------------ texts (--sample_prompts)

# How a sample is drawn. The snippet in an export's README.md draws the same way.
SAMPLE_TOKENS = 120
TEMPERATURE = 0.7
TOP_P = 0.9
# transformers' own default
TOP_K = 50


@dataclass(frozen=True)
class Sampler:
    """Continues some prompts with the model in training, each time with the same random numbers.

    with_prompt: a text begins with its prompt, as the model was given it.
    """

    tokenizer: PreTrainedTokenizerBase
    encoder: DocumentEncoder
    prompts: Sequence[str]
    seed: int
    with_prompt: bool = True

    def __call__(self, engine: Engine, signals: StopSignals) -> tuple[list[tuple[str, str]], int]:
        """([(prompt, text)], the number of a stop signal that rank 0 got meanwhile, or 0). All ranks must call it.

        Rank 0 makes the texts, and the others hear that it still works. Where they have sharded the model each of them computes
        the same text with the others.
        """
        ranks = engine.ranks
        found: list[tuple[str, str]] = []
        for prompt in self.prompts:
            draw = partial(self.sample, engine, prompt)
            found.append((prompt, draw() if engine.is_sharded else on_main(ranks, draw)))
            stop_signal = on_main(ranks, lambda: signals.signum)
            if stop_signal:
                # A resume makes all of them again.
                return [], stop_signal
        return found, 0

    @torch.no_grad()
    def sample(self, engine: Engine, prompt: str, max_new_tokens: int = SAMPLE_TOKENS) -> str:
        """The prompt (unless not with_prompt) and its continuation, as text. The random state of training is left as it was."""
        # The types of transformers know no model that is defined elsewhere.
        model: Any = engine.model
        positions = model.config.max_position_embeddings

        def new_tokens(length: int) -> int:
            # A long prompt leaves half of the positions of a model with few.
            return min(max_new_tokens, max(positions - length, positions // 2))

        # The end of a prompt that does not fit.
        ids = self.encoder.prompt_ids(prompt)
        ids = ids[max(0, len(ids) + new_tokens(len(ids)) - positions) :]
        # An empty prompt, with a tokenizer that has no BOS, still needs one token to begin with.
        given = ids or [self.encoder.eos_id or 0]
        with undisturbed(engine):
            torch.manual_seed(self.seed)
            with engine.autocast():
                output = model.generate(
                    torch.tensor([given], device=engine.device),
                    max_new_tokens=new_tokens(len(given)),
                    do_sample=True,
                    temperature=TEMPERATURE,
                    top_p=TOP_P,
                    top_k=TOP_K,
                    pad_token_id=self.tokenizer.pad_token_id or 0,
                    # A rank whose text has ended goes on computing with those whose texts have not.
                    synced_gpus=engine.is_sharded,
                )
        shown = output[0] if self.with_prompt else output[0, len(ids) :]
        return str(self.tokenizer.decode(shown, skip_special_tokens=True))


def read_prompts(arguments: list[str]) -> list[str]:
    """The prompts of --sample_prompts: the strings themselves, or the lines of a file that is named alone.

    Errors: UserError for a file without prompts, and for what is not UTF-8 (a shell hands over any bytes): now and not at the
    first evaluation.
    """
    prompts = arguments
    with user_errors():
        # Unlike Path.is_file, this one has no errors of its own for a text that is too long for a name.
        if len(arguments) == 1 and (arguments[0].endswith(".txt") or os.path.isfile(arguments[0])):
            # A prompt may hold a U+2028, and Windows writes a byte-order mark.
            lines = Path(arguments[0]).read_text(encoding="utf-8-sig").split("\n")
            prompts = [line for line in lines if line.strip()]
            if not prompts:
                raise UserError(f"--sample_prompts {arguments[0]}: no prompt in there; one a line is wanted")
        "".join(prompts).encode()
    return prompts
