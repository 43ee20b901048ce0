"""A row of training as a person can read it: its documents, and which of their tokens are trained."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from common.wording import counted
from dataset.loader import gather
from scripts.data_figures import DataLook

# Tokens that a character may be spread over, at most.
TOKENS_OF_CHARACTER = 8


@dataclass
class Span:
    """Some tokens that make whole characters. is_trained: the model has to predict them."""

    text: str
    tokens: list[int]
    is_trained: bool


@dataclass
class Piece:
    """A document or a part of one, within a row."""

    title: str
    spans: list[Span]


@dataclass
class Row:
    title: str
    pieces: list[Piece]


def check_rows(look: DataLook, numbers: Sequence[int]) -> None:
    """Errors: UserError for a row that the first epoch does not have."""
    n_rows = look.corpus.plan(0).n_rows
    for number in numbers:
        if number >= n_rows:
            raise UserError(f"--row {number}: the first epoch has the rows 0 to {n_rows - 1:,}")


def row_of(look: DataLook, number: int) -> Row:
    """Row `number` of the first epoch, which has one, as the loader gives it to the model."""
    plan = look.corpus.plan(0)
    store = look.corpus.store
    batch = gather(store.tokens, plan.recipe(range(number, number + 1)))
    inputs = batch.input_ids[0].tolist()
    targets = batch.targets[0].tolist()
    documents = batch.document_ids[0].tolist()
    pieces = []
    for i, (document, start, pairs) in enumerate(plan.pieces_of_row(number)):
        places = [place for place in range(plan.T) if documents[place] == i and targets[place] >= 0]
        # The first token is only read. Each further one is the target of the place before it.
        tokens = [inputs[places[0]]] + [targets[place] for place in places]
        length = int(store.offsets[document + 1]) - int(store.offsets[document])
        part = "whole" if pairs + 1 == length else f"its tokens {start:,} to {start + pairs:,} of {length:,}"
        title = (
            f"{look.place_of_hash(store.doc_hash[document])}, {part}; positions {places[0]} to {places[-1]}, "
            f"{counted(len(places), 'token')} trained"
        )
        spans = spans_of(look.tokenizer, tokens, [False] + [True] * len(places))
        pieces.append(Piece(title, spans))
    trained = sum(target >= 0 for target in targets)
    padding = documents.count(-1)
    title = (
        f"Row {number:,} of {plan.n_rows:,}: {plan.T} positions, {counted(len(pieces), 'document')}, {trained} trained, "
        f"{padding} of padding"
    )
    return Row(title, pieces)


def spans_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int], is_trained: list[bool]) -> list[Span]:
    """The tokens in order, each with its text; those that share a character are one span."""
    spans: list[Span] = []
    # Some decoders look at the token before, to decide on a space: the last span is decoded once more with the new one.
    before: list[int] = []
    waiting: list[int] = []
    for token, trained in zip(tokens, is_trained, strict=True):
        waiting.append(token)
        text = _decoded(tokenizer, before + waiting)[len(_decoded(tokenizer, before)) :]
        # The replacement character is what the first bytes of a character decode to.
        is_whole = not text.endswith("\ufffd") or len(waiting) == TOKENS_OF_CHARACTER
        if is_whole or not trained:
            spans.append(Span(text, waiting, trained))
            before = waiting
            waiting = []
    if waiting:
        spans.append(Span(_decoded(tokenizer, waiting), waiting, True))
    return spans


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
