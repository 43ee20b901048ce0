"""The difficulty of a text for a small model: the loss of a simpler model, which is counted in a second.

It mixes what small models learn first: which token follows another in the training text, and what followed the same tokens
earlier in the row, which induction heads find. docs/experiments.md, "Difficulty of a text", compares it with trained models.
"""

import math

import numpy as np
from numpy.typing import NDArray

from dataset.arrays import Ints
from dataset.batches import Assembler
from dataset.corpus import ValidationBatches
from dataset.packing import RowPlan
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import DEFAULT, PROBE
from trainer.budget.laws import POWER_OF_PACKING

Floats = NDArray[np.float64]

# sampled tokens of the training and of the validation documents
TRAINED_TOKENS = 1_000_000
EVALUATED_TOKENS = 100_000
ROWS_AT_ONCE = 256
# with fewer tokens the validation documents may be unlike others
MIN_EVALUATED_TOKENS = 2_000
# one of so many rows is evaluated if there is no validation
ROWS_PER_EVALUATED = 11
# Tokens of a row. Longer rows predict the losses of trained models less well: these use little of what is further away.
ROW = 256
# tokens of the longest context that is looked for earlier in the row
MAX_CONTEXT = 2
EM_STEPS = 30
# nats per token of the simpler model on text of difficulty 1, and the power of its loss that trained models' losses follow: fitted to
# 19 texts
LOSS_OF_WIKI = 5.05
POWER = 1.49
# power of TRAINED_TOKENS / tokens by which the loss is higher after fewer tokens
POWER_OF_TRAINED = 0.05
# Documents that share whole passages, as those of documentation do, are easier than pairs of tokens tell, since trained models know the
# passages by heart: so many tokens in a row count as one, and so much less is the loss where all are such. Runs on four texts of this
# kind, of 5e12 to 5e13 FLOP, agree within 5 %, and with a gain of 0.35 to 0.9.
PASSAGE = 12
GAIN_OF_PASSAGES = 0.55
# of a hash of tokens in a row (the multiplier of Knuth's MMIX generator)
HASH_FACTOR = np.uint64(6364136223846793005)


def difficulty_of(
    assembler: Assembler, plan: RowPlan, validation: ValidationBatches | None, encoder: DocumentEncoder
) -> float:
    """Difficulty of the encoder's tokens of the validation documents for a model of the plan's rows, relative to `laws.wiki_loss`.

    Without validation, or with less than MIN_EVALUATED_TOKENS, some of the plan's rows take its place.
    """
    if validation is None or validation.plan.n_pairs < MIN_EVALUATED_TOKENS:
        rows = sampled_rows(plan, TRAINED_TOKENS + EVALUATED_TOKENS)
        is_evaluated = np.arange(len(rows)) % ROWS_PER_EVALUATED == 0
        evaluated = tokens_of(assembler, plan, rows[is_evaluated])
        trained = tokens_of(assembler, plan, rows[~is_evaluated])
        # Rows of a mixture may hold the same documents again, whose passages say nothing.
        factor = 1.0
    else:
        trained = tokens_of(assembler, plan, sampled_rows(plan, TRAINED_TOKENS))
        evaluated = tokens_of(validation.assembler, validation.plan, sampled_rows(validation.plan, EVALUATED_TOKENS))
        factor = 1 - GAIN_OF_PASSAGES * share_of_passages(trained, evaluated)
    usual = DocumentEncoder(load_tokenizer(DEFAULT), encoder.parse_special_tokens)
    # Conversations keep their marks, and what a tokenizer cannot give back keeps its tokens.
    is_other = type(encoder) is DocumentEncoder and encoder.fingerprint != usual.fingerprint
    if not is_other or encoder.round_trip(PROBE) != PROBE:
        return factor * difficulty_of_tokens(trained, evaluated)
    # Counted pairs would know too little of many entries, and the law has seen no other tokenizer.
    usual_trained, usual_evaluated = (encoded_again(tokens, encoder, usual) for tokens in (trained, evaluated))
    packing = len(usual_evaluated) / max(len(evaluated), 1)
    return factor * difficulty_of_tokens(usual_trained, usual_evaluated) * packing**POWER_OF_PACKING


def encoded_again(tokens: Ints, encoder: DocumentEncoder, usual: DocumentEncoder) -> Ints:
    """The inputs of some documents, with BOS and without EOS, by another encoder."""
    documents = np.split(tokens, np.flatnonzero(tokens == encoder.bos_id))
    texts = [encoder.decode(document.tolist()) for document in documents if len(document)]
    return np.array([token_id for ids in usual.encode(texts) for token_id in ids[:-1]], np.int64)


def difficulty_of_tokens(trained: Ints, evaluated: Ints) -> float:
    """Difficulty of the tokens of some rows, after those of others."""
    row = min(ROW, len(evaluated))
    if row < 2 or len(trained) < 2:
        return 1.0
    evaluated = evaluated[: len(evaluated) // row * row]
    from_row, longest = row_predictions(evaluated.reshape(-1, row))
    from_text = bigram_predictions(trained, evaluated)
    loss = mixture_loss(np.concatenate([from_row, from_text[None]]), longest)
    loss_of_wiki = LOSS_OF_WIKI * (TRAINED_TOKENS / len(trained)) ** POWER_OF_TRAINED
    return (loss / loss_of_wiki) ** POWER


def share_of_passages(trained: Ints, evaluated: Ints) -> float:
    """Share of the PASSAGE tokens in a row of the one text that the other has too."""
    known, wanted = np.sort(hashes_of_passages(trained)), hashes_of_passages(evaluated)
    return float(values_at(known, np.ones(len(known)), wanted).mean()) if len(known) and len(wanted) else 0.0


def hashes_of_passages(tokens: Ints) -> NDArray[np.uint64]:
    """A hash of each PASSAGE tokens in a row."""
    hashes = np.zeros(max(len(tokens) - PASSAGE + 1, 0), np.uint64)
    for at in range(PASSAGE):
        hashes = hashes * HASH_FACTOR + tokens[at : at + len(hashes)].astype(np.uint64)
    return hashes


def sampled_rows(plan: RowPlan, tokens: int) -> Ints:
    """Numbers of rows with about so many tokens, spread over the plan: shares of a mixture may change over it."""
    n = min(math.ceil(tokens / (plan.T * plan.fill)), plan.n_rows)
    return np.linspace(0, plan.n_rows - 1, n).astype(np.int64)


def tokens_of(assembler: Assembler, plan: RowPlan, rows: Ints) -> Ints:
    """int64 [n]: the tokens of these rows, one after the other."""
    tokens = [np.empty(0, np.int64)]
    # With --pack 0 most of a row may be padding.
    for first in range(0, len(rows), ROWS_AT_ONCE):
        batch = assembler[plan.recipe(rows[first : first + ROWS_AT_ONCE])]
        tokens.append(batch.input_ids[batch.document_ids >= 0].numpy())
    return np.concatenate(tokens)


def bigram_predictions(trained: Ints, evaluated: Ints) -> Floats:
    """[len(evaluated)]: the probability of each token after the one before it.

    Interpolated Kneser-Ney with a discount for each order: Chen and Goodman 1999, "An empirical study of smoothing techniques for
    language modeling", section 2.7. Longer n-grams remember near copies word for word, which small models do not.
    """
    size = int(max(trained.max(), evaluated.max())) + 1
    pairs, counts = np.unique(trained[:-1] * size + trained[1:], return_counts=True)
    # of single tokens not occurrences, but different tokens before them
    tokens, n_before = np.unique(pairs % size, return_counts=True)
    of_token = interpolated(tokens, n_before, evaluated, np.full(len(evaluated), 1 / size), size)
    of_pair = interpolated(pairs, counts, evaluated[:-1] * size + evaluated[1:], of_token[1:], size)
    return np.concatenate([of_token[:1], of_pair])


def interpolated(grams: Ints, counts: Ints, wanted: Ints, lower: Floats, size: int) -> Floats:
    """The probability of the last token of each wanted n-gram. grams: the known ones, as numbers to the base `size`, and their counts.
    lower: predictions by a context that is one token shorter."""
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    # one more of each, so that a small text also leaves something for what it lacks
    discount = (once + 1) / (once + 2 * twice + 3)
    contexts, context_of_gram = np.unique(grams // size, return_inverse=True)
    totals = np.bincount(context_of_gram, weights=counts)
    followers = np.bincount(context_of_gram)
    count = values_at(grams, counts, wanted)
    total = values_at(contexts, totals, wanted // size)
    left = discount * values_at(contexts, followers, wanted // size)
    higher = (np.maximum(count - discount, 0) + left * lower) / np.maximum(total, 1)
    return np.where(total > 0, higher, lower)


def values_at(keys: Ints, values: Ints | Floats, wanted: Ints) -> Ints | Floats:
    """The values of the wanted keys, 0 where there is none. keys: sorted."""
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def row_predictions(rows: Ints) -> tuple[Floats, Ints]:
    """Predictions by what followed the same context earlier in a row. rows [R, T].

    Returns ([contexts, R * T], [R * T]): the probability of each token by the contexts of 0 to MAX_CONTEXT tokens before it, and
    how many of these occurred before.
    """
    n = 1 + MAX_CONTEXT
    seen = np.zeros((n, *rows.shape), np.int32)
    hits = np.zeros((n, *rows.shape), np.int32)
    for lag in range(1, rows.shape[1]):
        is_same = rows[:, lag:] == rows[:, :-lag]
        # whether the context of each position is the same `lag` tokens before
        agrees = np.ones_like(is_same)
        for length in range(n):
            seen[length, :, lag:] += agrees
            agrees &= is_same
            hits[length, :, lag:] += agrees
            # one token longer: the position before agrees with its context
            agrees = np.pad(agrees[:, :-1], ((0, 0), (1, 0)))
    probability = hits / np.maximum(seen, 1)
    return probability.reshape(n, -1), (seen > 0).sum(0).reshape(-1)


def mixture_loss(predictions: Floats, group: Ints) -> float:
    """Nats per token of a mixture of predictions [P, n], with the best weights for each group [n] of tokens, found by EM."""
    nats = 0.0
    for each in np.unique(group):
        probability = predictions[:, group == each]
        weights = np.full(len(predictions), 1 / len(predictions))
        for _ in range(EM_STEPS):
            parts = weights[:, None] * probability
            weights = (parts / parts.sum(0)).mean(1)
        nats -= float(np.log(weights @ probability).sum())
    return nats / predictions.shape[1]
