"""What a plan must know of the text: how much there is, and how hard it is."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from dataset.corpus import EVAL_ROWS, split_by_hash
from dataset.tokenizing.encoder import load_tokenizer
from trainer.budget import laws
from trainer.machine.ranks import Ranks
from trainer.pretrain.data import DOCUMENTS, TextKind, open_corpus
from trainer.pretrain.memory import mean_context
from trainer.pretrain.settings import PretrainSettings

# Held out where the user names no validation data: no more than this part of the documents, and no more than about so
# many tokens, but some documents in any case. Of fewer documents than FEWEST_DOCUMENTS nothing is held out. All four are guesses:
# little text is lost, an evaluation stays short, and ten documents are at most a twentieth of them.
HELD_OUT_PART = 0.02
HELD_OUT_TOKENS = 100_000
FEWEST_HELD_OUT = 10
FEWEST_DOCUMENTS = 200
# No smaller part of a text that is one document is held out.
FEWEST_HELD_OUT_TOKENS = 1000


@dataclass(frozen=True)
class Data:
    """The text of a run.

    tokens_of_pass: that one pass reads, each with a target; parts: of a mixture each source, since its later passes bring other
    text. most: tokens that a run can train where shares change over the run; None: any number. T: positions of a row; fill:
    share of them that hold a token; length: that of the documents in a row, as `mean_context` in trainer/pretrain/memory.py has
    it. evaluated: positions of one evaluation. val_fraction: of the documents, that is held out. text_scale: how hard the text
    is, relative to that of the law.
    """

    vocab_size: int
    tokens_of_pass: float
    T: int
    fill: float
    length: float
    bytes_per_token: float
    evaluated: int
    val_fraction: float
    text_scale: float
    parts: tuple[laws.Part, ...] = ()
    most: float | None = None


def look_at_data(settings: PretrainSettings, given: Collection[str], ranks: Ranks, kind: TextKind = DOCUMENTS) -> Data:
    """Tokenise what is new, and count. given: what the user has said. Errors: DataError, UserError."""
    assert settings.tokenizer_path is not None
    tokenizer = load_tokenizer(settings.tokenizer_path)
    encoder = kind.encoder(tokenizer, settings)
    corpus = open_corpus(settings, encoder, ranks, kind)
    plan = corpus.plan(0)
    bytes_per_token = corpus.bytes_per_token(encoder.added_tokens)
    val_fraction = settings.val_fraction
    # What is held out already is not in the plan of the corpus.
    trained_part = 1.0
    n_documents = len(corpus.store)
    # tokens of all sources, from which documents are held out before any share is drawn: a pass may train a small part of them.
    n_tokens = len(corpus.store.tokens)
    is_free = not {"val_path", "val_fraction"} & set(given)
    if is_free and n_documents == 1 and encoder.can_be_cut and HELD_OUT_PART * n_tokens >= FEWEST_HELD_OUT_TOKENS:
        # One long text: its last part.
        val_fraction = float(f"{min(HELD_OUT_PART, HELD_OUT_TOKENS / n_tokens):.1g}")
        trained_part = 1 - val_fraction
    elif is_free and n_documents >= FEWEST_DOCUMENTS:
        fraction = max(min(HELD_OUT_PART, HELD_OUT_TOKENS / n_tokens), FEWEST_HELD_OUT / n_documents)
        # One digit is enough, and reads well in a command.
        val_fraction = float(f"{fraction:.1g}")
        # Copies of a text are held out together, so of few different texts it may be none or all.
        _, held_out = split_by_hash(corpus.store, val_fraction)
        if not 0 < len(held_out) < n_documents:
            val_fraction = 0.0
        trained_part = 1 - val_fraction
    tokens_of_pass = trained_part * plan.n_pairs
    validation = corpus.validation()
    batches = math.ceil(val_fraction * n_tokens / (EVAL_ROWS * plan.T)) if validation is None else len(validation)
    return Data(
        vocab_size=encoder.vocab_size,
        tokens_of_pass=tokens_of_pass,
        T=plan.T,
        fill=plan.fill,
        length=mean_context(plan),
        bytes_per_token=bytes_per_token,
        evaluated=batches * EVAL_ROWS * plan.T,
        val_fraction=val_fraction,
        text_scale=laws.text_scale(corpus.store, tokenizer, bytes_per_token),
        parts=tuple(part._replace(unique=trained_part * part.unique) for part in laws.parts_of(corpus)),
        # One pass is the longest run there is, see dataset/mixture.py.
        most=tokens_of_pass if corpus.is_one_plan else None,
    )
