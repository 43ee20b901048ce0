"""The parts of a run: tokenizer, model, text and batching, opened in the order of trainer/tour.py."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.errors import user_errors
from dataset.corpus import Corpus, ValidationBatches
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import vocabulary_digest
from model.model_minimind import MiniMindLM
from trainer.batching import Batching
from trainer.evaluation import read_prompts
from trainer.job import RunContext
from trainer.launch import lock_files
from trainer.machine.devices import pick_dtype, seed_everything
from trainer.machine.ranks import Ranks, first_rank_first, wait_for_all_ranks
from trainer.pretrain.data import DOCUMENTS, TextKind, open_corpus
from trainer.pretrain.initial_model import open_model, settings_of_folder
from trainer.pretrain.memory import resolve_batch_size
from trainer.pretrain.settings import PretrainSettings


@dataclass(frozen=True)
class Parts:
    """What a run is made of.

    settings: of the run, with a number in place of --batch_size auto. dtype: of matrix products. vocabulary: digest of the
    tokenizer's. stem: path of the run's files without suffix. notices: lines for the user.
    """

    settings: PretrainSettings
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    prompts: list[str]
    tokenizer: Any
    encoder: DocumentEncoder
    vocabulary: str
    model: MiniMindLM
    stem: Path
    corpus: Corpus
    validation: ValidationBatches | None
    batching: Batching
    notices: list[str]


def open_run(
    settings: PretrainSettings, run_context: RunContext, free: float | None, kind: TextKind = DOCUMENTS
) -> Parts:
    """Open everything that can fail, quick steps first. A collective.

    free: bytes of memory before anything took some of it, for --batch_size auto. kind: documents or, to fine-tune, conversations.
    Errors: UserError, in one line, for flags that do not fit.
    """
    ranks, device = run_context.ranks, run_context.device
    dtype, notices = pick_dtype(settings.dtype, device)
    # The same seed on all ranks, so that all start with the same weights.
    seed_everything(settings.seed)
    with user_errors():
        prompts = read_prompts(settings.sample_prompts)
        # A folder of --from_weight sets the shape and the tokenizer; without one the settings stay as they are. AutoTokenizer reads its
        # config.json too, and builds the config class that it names, so that file is checked first.
        settings, config = settings_of_folder(settings)
        assert settings.tokenizer_path is not None
        tokenizer = load_tokenizer(settings.tokenizer_path)
        encoder = kind.make_encoder(tokenizer, settings)
        vocabulary = vocabulary_digest(tokenizer)
        model, lines = open_model(settings, config, tokenizer, vocabulary, encoder.vocab_size, ranks, device)
        notices += lines

        # From here on no other run may write these files.
        stem = settings.stem(model.config.hidden_size, model.config.use_moe)
        lock_files(ranks, stem)

        # The first run on a corpus tokenises it here, which may take long: all else was checked before.
        corpus = first_rank_first(ranks, partial(open_corpus, settings, encoder, ranks, kind))
        with wait_for_all_ranks(ranks):
            # Raises if there is nothing to train.
            corpus.plan(0)
        model.train()

        # From here on --batch_size is a number.
        settings, lines = resolve_batch_size(settings, stem, model, corpus, dtype, device, ranks, free)
        notices += lines
    return Parts(
        settings=settings,
        ranks=ranks,
        device=device,
        dtype=dtype,
        prompts=prompts,
        tokenizer=tokenizer,
        encoder=encoder,
        vocabulary=vocabulary,
        model=model,
        stem=stem,
        corpus=corpus,
        validation=corpus.validation(),
        batching=Batching.of(settings, ranks),
        notices=notices,
    )
