"""Texts that the model in training writes (`--sample_prompts`), by all ranks together."""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from dataset.loader import Batch
from dataset.packing import Totals
from dataset.tokenizing.encoder import DocumentEncoder
from model.model_minimind import MiniMindForCausalLM
from trainer.engine import Engine
from trainer.evaluation import undisturbed
from trainer.machine.collectives import on_main, until_all_are_ready
from trainer.machine.random_state import rng_state, set_rng_state
from trainer.machine.ranks import Ranks
from trainer.machine.signals import StopSignals
from trainer.saving.weights import beyond_float16, in_dtype

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
            # Another rank has no text to make, and needs no second model.
            if ranks.rank < len(prompts):
                as_saved = model_as_saved(engine, engine.weights())
    max_new_tokens = SAMPLE_TOKENS
    if together:
        max_new_tokens = tokens_that_fit_all(engine, encoder, prompts)
    # A round: one prompt for each rank. The last round may have fewer prompts than ranks.
    for first in range(0, len(prompts), ranks.world_size):
        mine = first + ranks.rank
        has_prompt = mine < len(prompts)
        stops = engine.largest(signals.signum) > 0
        own: list[tuple[str, str]] = []
        # Ranks that compute together meet in each layer, and need no other place to meet.
        with contextlib.nullcontext() if together else until_all_are_ready(ranks):
            if (has_prompt or together) and not stops:
                prompt = prompts[mine if has_prompt else -1]
                text = sample(engine, tokenizer, encoder, prompt, seed, max_new_tokens, as_saved, with_prompt)
                if has_prompt:
                    own.append((prompt, text))
        of_round, stop_signal = texts_of_all(ranks, own, signals.signum)
        if stop_signal:
            # A resume makes all of them again.
            return [], stop_signal
        found += of_round
    return found, 0


def tokens_that_fit_all(engine: Engine[Batch, Totals], encoder: DocumentEncoder, prompts: Sequence[str]) -> int:
    """How many tokens to draw behind each prompt, where ranks compute together: a rank that has ended goes on until all have,
    and must have positions for that."""
    positions = cast(MiniMindForCausalLM, engine.model).config.max_position_embeddings
    # An empty prompt has one token to begin with, see `sample`.
    lengths = [max(1, len(encoder.prompt_ids(prompt))) for prompt in prompts]
    return min((fitting_tokens(length, positions) for length in lengths), default=SAMPLE_TOKENS)


def texts_of_all(ranks: Ranks, own: list[tuple[str, str]], signum: int) -> tuple[list[tuple[str, str]], int]:
    """(what the ranks have of [(prompt, text)], in their order; the number of a stop signal that one of them got, or 0).

    A collective. own, signum: of this rank.
    """
    answers = [(own, signum)]
    if ranks.world_size > 1:
        answers *= ranks.world_size
        dist.all_gather_object(answers, (own, signum))
    texts = [text for of_rank, _ in answers for text in of_rank]
    stop_signal = max(of_rank for _, of_rank in answers)
    return texts, stop_signal


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
    ids = encoder.prompt_ids(prompt)
    room = positions - fitting_tokens(len(ids), positions, max_new_tokens)
    return ids[max(0, len(ids) - room) :]


def fitting_tokens(prompt_length: int, positions: int, max_new_tokens: int = SAMPLE_TOKENS) -> int:
    """How many tokens to draw behind a prompt. Of a model with few positions a long prompt leaves half of them."""
    return min(max_new_tokens, max(positions - prompt_length, positions // 2))


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
    positions = model.config.max_position_embeddings
    # An empty prompt, with a tokenizer that has no BOS, still needs one token to begin with.
    ids = fitting_prompt(encoder, prompt, positions, max_new_tokens)
    given = ids or [encoder.eos_id or 0]
    with undisturbed(engine):
        model.eval()
        torch.manual_seed(seed)
        with precision:
            output = model.generate(
                torch.tensor([given], device=device),
                max_new_tokens=fitting_tokens(len(given), positions, max_new_tokens),
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
