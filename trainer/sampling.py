"""Texts that the model in training writes (`--sample_prompts`)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from common.errors import UserError, user_errors
from dataset.tokenizing.encoder import DocumentEncoder
from trainer.engine import Engine
from trainer.evaluation import undisturbed
from trainer.machine.command_line import StopSignals
from trainer.machine.ranks import on_main

# How a sample is drawn. The snippet in an export's README.md draws the same way.
SAMPLE_TOKENS = 120
TEMPERATURE = 0.7
TOP_P = 0.9
# What transformers takes where nothing is said.
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
            found.append((prompt, draw() if engine.shards is not None else on_main(ranks, draw)))
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
                    synced_gpus=engine.shards is not None,
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
            lines = Path(arguments[0]).read_text(encoding="utf-8").splitlines()
            prompts = [line for line in lines if line.strip()]
            if not prompts:
                raise UserError(f"--sample_prompts {arguments[0]}: no prompt in there; one a line is wanted")
        "".join(prompts).encode()
    return prompts
