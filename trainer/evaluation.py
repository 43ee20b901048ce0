"""Validation loss over whole documents, and samples, while training."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from dataset.corpus import ValidationBatches
from dataset.loader import Batch
from dataset.packing import Totals
from dataset.tokenizing.encoder import DocumentEncoder
from model.model_minimind import MiniMindForCausalLM
from trainer.engine import Engine
from trainer.machine.random_state import rng_state, set_rng_state
from trainer.machine.ranks import on_main, until_all_are_ready
from trainer.machine.signals import StopSignals
from trainer.saving.weights import beyond_float16, in_dtype


@torch.no_grad()
def sums_over_batches(
    engine: Engine[Any, Any],
    n_batches: int,
    figures_of: Callable[[int], Sequence[float]],
    n_figures: int,
    signals: StopSignals,
) -> tuple[list[float], int]:
    """(the sums of a batch's n_figures over all batches, identical on every world size; number of a stop signal, or 0).

    Floating-point sums depend on their order, and figures must not depend on the number of ranks. So batch i is computed
    by rank i mod world size into slots of its own; the sum over the ranks adds zeros to them, and then every rank adds up
    the slots in the same order. Where the ranks have sharded the model they compute together: one that has no batch left
    computes the last one, and nothing comes of it.
    """
    ranks = engine.ranks
    # Without dropout.
    engine.model.eval()
    n_slots = n_figures * n_batches
    # The figures of each batch; behind them the signal of each rank.
    slots = torch.zeros(n_slots + ranks.world_size, dtype=torch.float64)
    for first in range(0, n_batches, ranks.world_size):
        i = first + ranks.rank
        has_batch = i < n_batches
        if engine.largest(signals.signum):
            slots[n_slots + ranks.rank] = signals.signum
            break
        if not has_batch and engine.shards is None:
            break
        figures = figures_of(i if has_batch else n_batches - 1)
        if has_batch:
            slots[n_figures * i : n_figures * (i + 1)] = torch.tensor(figures, dtype=torch.float64)
    engine.model.train()
    if ranks.world_size > 1:
        slots = slots.to(engine.device)
        dist.all_reduce(slots)
    slots = slots.cpu()
    table = slots[:n_slots].view(n_batches, n_figures)
    # One column at a time: as Python's numbers all of them would take four times the memory.
    sums = [math.fsum(table[:, number].tolist()) for number in range(n_figures)]
    return sums, int(slots[n_slots:].max())


# Positions that are evaluated at once. Rows of up to 2,048 are all those of a batch. Of longer ones there are fewer: the mask of a
# row has the square of its positions, and 16 rows of 32,768 would have one of 17 GB.
MOST_POSITIONS = 32_768


def rows_at_once(rows: int, T: int) -> int:
    """Of a batch of so many rows of T positions, how many are evaluated together."""
    return max(1, min(rows, MOST_POSITIONS // T))


def evaluate(
    engine: Engine[Batch, Totals], batches: ValidationBatches, signals: StopSignals
) -> tuple[dict[str, float], int]:
    """Validation figures, identical on every world size: (dict, number of a stop signal that came meanwhile, or 0).

    The dict: val_loss in nats per target, perplexity, and bits_per_byte over the text's UTF-8 bytes where these are known.
    """
    model = cast(MiniMindForCausalLM, engine.model)

    def figures_of(number: int) -> tuple[float, int]:
        batch = batches[number].to(engine.device)
        R, T = batch.input_ids.shape
        step = rows_at_once(R, T)
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
def undisturbed(engine: Engine[Any, Any]) -> Iterator[None]:
    """The engine's model without dropout; what is drawn within does not change what the training draws next."""
    before = rng_state(engine.device)
    engine.model.eval()
    try:
        yield
    finally:
        engine.model.train()
        set_rng_state(before, engine.device)


# How a sample is drawn. The snippet in an export's README.md draws the same way.
SAMPLE_TOKENS = 120
TEMPERATURE = 0.7
TOP_P = 0.9
# What transformers takes where nothing is said.
TOP_K = 50


def samples(
    engine: Engine[Batch, Totals],
    tokenizer: PreTrainedTokenizerBase,
    encoder: DocumentEncoder,
    prompts: Sequence[str],
    signals: StopSignals,
    seed: int,
    is_last: bool,
    with_prompt: bool = True,
) -> tuple[list[tuple[str, str]], int]:
    """([(prompt, text)], number of a stop signal that came meanwhile, or 0), the same on all ranks, which share the work.

    They meet after each round, so that none waits longer than for one text, and a stop ends it for all. A text may take longer
    than they wait for a message. Where they have sharded the model they compute together, and a rank without a prompt continues
    the last one, of which nothing comes.
    is_last: the weights are those that the run leaves. Then the samples are made by the model of the weight file, see
    `model_as_saved`, so that whoever has the file or an export of it can draw them again.
    with_prompt: a text begins with its prompt, as the model was given it.
    """
    found: list[tuple[str, str]] = []
    ranks = engine.ranks
    together = engine.shards is not None
    if is_last and together:
        return last_samples_of_main(engine, tokenizer, encoder, prompts, signals, seed, with_prompt)
    as_saved = None
    if is_last:
        with until_all_are_ready(ranks):
            if ranks.rank < len(prompts):
                as_saved = model_as_saved(engine, engine.weights())
    for first in range(0, len(prompts), ranks.world_size):
        # One prompt for each rank; the last round may have fewer prompts than ranks.
        mine = first + ranks.rank
        has_prompt = mine < len(prompts)
        stops = engine.largest(signals.signum) > 0
        own = []
        # Ranks that compute together meet in each layer.
        with contextlib.nullcontext() if together else until_all_are_ready(ranks):
            if (has_prompt or together) and not stops:
                prompt = prompts[mine if has_prompt else -1]
                text = sample(engine, tokenizer, encoder, prompt, seed, as_saved=as_saved, with_prompt=with_prompt)
                if has_prompt:
                    own.append((prompt, text))
        # What each rank has, and whether it was asked to stop.
        answers = [(own, signals.signum)]
        if ranks.world_size > 1:
            answers *= ranks.world_size
            dist.all_gather_object(answers, (own, signals.signum))
        stop_signal = max(signum for _, signum in answers)
        if stop_signal:
            return [], stop_signal
        for of_rank, _ in answers:
            found += of_rank
    return found, 0


def last_samples_of_main(
    engine: Engine[Batch, Totals],
    tokenizer: PreTrainedTokenizerBase,
    encoder: DocumentEncoder,
    prompts: Sequence[str],
    signals: StopSignals,
    seed: int,
    with_prompt: bool,
) -> tuple[list[tuple[str, str]], int]:
    """The last `samples` of a sharded model, all by rank 0, which alone gets the weights of the file.

    On the CPU that may take long: it tells the other ranks that it still works.
    """
    weights = engine.weights()
    made: list[MiniMindForCausalLM] = []

    def draw(prompt: str) -> str:
        return sample(engine, tokenizer, encoder, prompt, seed, as_saved=made[0], with_prompt=with_prompt)

    on_main(engine.ranks, lambda: made.append(model_as_saved(engine, weights)))
    found: list[tuple[str, str]] = []
    stop_signal = engine.largest(signals.signum)
    while len(found) < len(prompts) and not stop_signal:
        prompt = prompts[len(found)]
        found.append((prompt, on_main(engine.ranks, partial(draw, prompt))))
        stop_signal = engine.largest(signals.signum)
    return ([] if stop_signal else found), stop_signal


def model_as_saved(engine: Engine[Batch, Totals], state: dict[str, torch.Tensor]) -> MiniMindForCausalLM:
    """The model with the numbers of its weight file, on the CPU in float32. state: its weights, whole ones.

    The weights of training are finer than those of the file, products in bfloat16 differ from machine to machine, and
    a GPU draws other random numbers than a CPU: each of the three would give other texts in the end.
    """
    model = cast(MiniMindForCausalLM, engine.model)
    # A fresh model draws its first weights, which must not change what the training draws next.
    before = rng_state(engine.device)
    try:
        as_saved = MiniMindForCausalLM(model.config)
    finally:
        set_rng_state(before, engine.device)
    dtype = torch.float16 if beyond_float16(state) is None else torch.float32
    as_saved.load_state_dict(in_dtype(state, dtype))
    return as_saved.eval()


def fitting_prompt(
    encoder: DocumentEncoder, prompt: str, positions: int, max_new_tokens: int = SAMPLE_TOKENS
) -> list[int]:
    """The ids of a prompt; of one that does not fit its end, so that the new tokens have room. positions: of the model."""
    return encoder.prompt_ids(prompt)[max_new_tokens - positions :]


@torch.no_grad()
def sample(
    engine: Engine[Batch, Totals],
    tokenizer: PreTrainedTokenizerBase,
    encoder: DocumentEncoder,
    prompt: str,
    seed: int,
    max_new_tokens: int = SAMPLE_TOKENS,
    as_saved: MiniMindForCausalLM | None = None,
    with_prompt: bool = True,
) -> str:
    """The prompt (unless not with_prompt) and its continuation, as text. The random state of training is left as it was.

    as_saved: the model to ask, on the CPU in float32; None: that of the engine, as it trains.
    """
    # The types of transformers know no model that is defined elsewhere.
    model = cast(Any, as_saved)
    device = torch.device("cpu")
    precision: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if as_saved is None:
        model = cast(Any, engine.model)
        device = engine.device
        precision = engine.autocast()
    ids = fitting_prompt(encoder, prompt, model.config.max_position_embeddings, max_new_tokens)
    with undisturbed(engine):
        model.eval()
        torch.manual_seed(seed)
        with precision:
            output = model.generate(
                # An empty prompt, with a tokenizer that has no BOS, still needs one token to begin with.
                torch.tensor([ids or [encoder.eos_id or 0]], device=device),
                max_new_tokens=max_new_tokens,
                do_sample=True,
                temperature=TEMPERATURE,
                top_p=TOP_P,
                top_k=TOP_K,
                pad_token_id=tokenizer.pad_token_id or 0,
                # A rank whose text has ended goes on computing with those whose texts have not.
                synced_gpus=engine.shards is not None and as_saved is None,
            )
    shown = output[0] if with_prompt else output[0, len(ids) :]
    return str(tokenizer.decode(shown, skip_special_tokens=True))


def read_prompts(arguments: list[str]) -> list[str]:
    """The prompts of --sample_prompts: the strings themselves, or the lines of a file that is named alone.

    Errors: UserError where one is not UTF-8 (a shell hands over any bytes), now and not at the first evaluation.
    """
    prompts = _prompts(arguments)
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError(f"--sample_prompts: {ascii(prompt)[:80]} is not UTF-8 text") from None
    return prompts


def _prompts(arguments: list[str]) -> list[str]:
    """The prompts of --sample_prompts, not checked. Errors: UserError for a file that has none."""
    if len(arguments) != 1:
        return arguments
    path = Path(arguments[0])
    is_file = False
    # A text may be too long for the name of a file.
    with contextlib.suppress(OSError):
        is_file = path.is_file()
    if not is_file and path.suffix != ".txt":
        return arguments
    try:
        prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--sample_prompts {path}: no UTF-8 text can be read from there ({reason})") from error
    if not prompts:
        raise UserError(f"--sample_prompts {path}: no prompt in there; one a line is wanted")
    return prompts
