"""A row of training as a person can read it: its documents, and which of their tokens are trained."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from common.wording import counted, first_to_last
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
    """Errors: UserError for a row that is not there."""
    n_rows = look.corpus.plan(0).n_rows
    what = "the first epoch" if look.corpus.planned is None else "the run"
    for number in numbers:
        if number >= n_rows:
            raise UserError(f"--row {number}: {what} has {counted(n_rows, 'row')}, counted from 0")


def row_of(look: DataLook, number: int) -> Row:
    """Row `number` of the first epoch, which has one, as the model gets it."""
    plan = look.corpus.plan(0)
    store = look.corpus.store
    # What stands in the padding is not shown.
    batch = look.corpus.assembler(pad_id=0)[plan.recipe(range(number, number + 1))]
    targets = batch.targets[0].tolist()
    documents = batch.document_ids[0].tolist()
    pieces = []
    for i, (document, start, pairs) in enumerate(plan.pieces_of_row(number)):
        places = [place for place in range(plan.T) if documents[place] == i]
        begin, end = (int(offset) for offset in store.offsets[document : document + 2])
        tokens = look.as_read(store.tokens[begin + start : begin + start + pairs + 1]).tolist()
        # The first token is only read. Each further one is the target of the place before it.
        is_trained = [False] + [targets[place] >= 0 for place in places]
        part = "whole"
        if pairs + 1 < end - begin:
            part = f"its tokens {first_to_last(start, start + pairs)} of {end - begin:,}"
        positions = "position" if len(places) == 1 else "positions"
        title = (
            f"{look.place_in_corpus(document)}, {part}; {positions} {first_to_last(places[0], places[-1])}, "
            f"{counted(sum(is_trained), 'token')} trained"
        )
        pieces.append(Piece(title, spans_of(look.tokenizer, tokens, is_trained)))
    trained = sum(target >= 0 for target in targets)
    padding = documents.count(-1)
    kind = "conversation" if look.is_chat else "document"
    title = (
        f"Row {number:,} of {plan.n_rows:,}: {plan.T} positions, {counted(len(pieces), kind)}, {trained} trained, "
        f"{padding} of padding"
    )
    return Row(title, pieces)


def spans_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int], is_trained: list[bool]) -> list[Span]:
    """The tokens in order, each with its text; those that share a character are one span."""
    spans: list[Span] = []
    # Some decoders look at the token before, to decide on a space: the last span is decoded once more with the new one.
    before: list[int] = []
    waiting: list[int] = []
    for i, token in enumerate(tokens):
        waiting.append(token)
        text = _decoded(tokenizer, before + waiting)[len(_decoded(tokenizer, before)) :]
        # The replacement character is what the first bytes of a character decode to.
        is_whole = not text.endswith("\ufffd") or len(waiting) == TOKENS_OF_CHARACTER
        # What is trained may end within a character, as a piece may.
        is_last = i + 1 == len(tokens) or is_trained[i + 1] != is_trained[i]
        if is_whole or is_last:
            spans.append(Span(text, waiting, is_trained[i]))
            before = waiting
            waiting = []
    return spans


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
