"""Fine-tuning data: conversations, with a loss on the answers only. encoder.py says how these are marked in the ids."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from common.wording import counted
from dataset.arrays import Bools, Ints
from dataset.chat.encoder import ChatEncoder
from dataset.corpus import Corpus
from dataset.packing import RowPlan
from dataset.reading.settings import TextSettings
from dataset.shares import Source
from dataset.store.token_store import Documents
from model.config import IGNORE

# Maximum tokens that are searched at once
TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Answers:
    """Finds the assistant's messages.

    start, end: the ids of <|im_start|> and <|im_end|>. header: those of "assistant" and the line break, between the start
    of an answer's turn and its text.
    """

    start: int
    end: int
    header: tuple[int, ...]

    def trained(self, inputs: Ints) -> Bools:
        """bool [N]: True if the target of an input is trained: a token of an answer, or the <|im_end|> that ends it.

        inputs: whole pieces, concatenated, each without its last token, which is only a target.
        """
        # The last token of the header is the input of the answer's first token.
        firsts = self._before_header(inputs, self.start) + len(self.header)
        # <|im_end|> ends an answer and is no input of it. A truncated answer ends with its piece, and the next piece starts
        # with a turn.
        marks = np.flatnonzero((inputs == self.start) | (inputs == self.end))
        marks = np.append(marks, len(inputs))
        ends = marks[np.searchsorted(marks, firsts, side="right")]
        change = np.zeros(len(inputs) + 1, dtype=np.int8)
        change[firsts] += 1
        change[ends] -= 1
        return np.cumsum(change[:-1], dtype=np.int8) > 0

    def _before_header(self, ids: Ints, token: int) -> Ints:
        """Positions of `token` with the whole header after it."""
        positions = np.flatnonzero(ids == token)
        positions = positions[positions + len(self.header) < len(ids)]
        for number, header_id in enumerate(self.header, 1):
            positions = positions[ids[positions + number] == header_id]
        return positions

    def restore_turn_starts(self, ids: Ints) -> Ints:
        """The ids as the model reads them: each turn starts with <|im_start|>."""
        ids = ids.copy()
        # answers that are not trained
        ids[self._before_header(ids, self.end)] = self.start
        return ids

    # Any: the types of a Batch are those of tensors.
    def only(self, batch: Any) -> Any:
        """The Batch, of arrays, with only the targets of answers."""
        # Row by row from left to right: the order of the pieces in a batch.
        has_pair = batch.document_ids >= 0
        stored = batch.input_ids[has_pair]
        trained = self.trained(stored)
        input_ids = batch.input_ids.copy()
        input_ids[has_pair] = self.restore_turn_starts(stored)
        targets = batch.targets.copy()
        targets[has_pair] = np.where(trained, targets[has_pair], IGNORE)
        return batch._replace(input_ids=input_ids, targets=targets, n_targets=int(trained.sum()))

    def blocks(self, store: Documents) -> Iterator[tuple[Ints, Ints, Bools]]:
        """Yields some consecutive documents of a store at a time: (their offsets from 0, ids, `trained` of these)."""
        first = 0
        while first < len(store):
            # About TOKENS_AT_ONCE in whole documents, at least one
            end = np.searchsorted(store.offsets, store.offsets[first] + TOKENS_AT_ONCE, side="right") - 1
            end = max(first + 1, int(end))
            offsets = store.offsets[first : end + 1]
            ids = store.tokens[offsets[0] : offsets[-1]]
            yield offsets - offsets[0], ids, self.trained(ids)
            first = end

    def count(self, store: Documents, max_pairs: int) -> Ints:
        """uint32 [documents]: number of answer targets among the first `max_pairs` pairs of each."""
        counts = []
        for offsets, _, trained in self.blocks(store):
            trained_before = np.append(0, np.cumsum(trained))
            pairs = np.clip(np.diff(offsets) - 1, 0, max_pairs)
            counts.append(trained_before[offsets[:-1] + pairs] - trained_before[offsets[:-1]])
        return np.concatenate(counts).astype(np.uint32)


class ChatCorpus(Corpus):
    """A Corpus of conversations. One is never split over rows: if it is longer than a row, it is truncated.

    Errors: as Corpus.
    """

    nothing_to_train = "no answer starts within --max_seq_len, which may be too small"
    nothing_to_evaluate = nothing_to_train
    trains_answers = True
    data_flags = "--data_path, --skip_bad_lines, --deduplicate"

    def __init__(
        self, data_path: Sequence[str | Source], encoder: ChatEncoder, reading: TextSettings, **options: Any
    ) -> None:
        self.answers = Answers(*encoder.answer_marks)
        self.target_filter = self.answers.only
        self.thoughts_begin = encoder.special.get("<think>")
        super().__init__(data_path, encoder, reading, **{**options, "long_documents": "truncate"})

    @cached_property
    def trains_thoughts(self) -> bool:
        """True if some trained answer has thoughts."""
        for store in self.stores:
            for _, ids, trained in self.answers.blocks(store):
                if (trained[:-1] & (ids[1:] == self.thoughts_begin)).any():
                    return True
        return False

    def _targets_of(self, store: Documents) -> Ints:
        # A document truncated to max_seq_len tokens has one pair less, in rows of both layouts.
        return self.answers.count(store, self.max_seq_len - 1)

    def _epoch_plan(self, documents: Ints, epoch: int, trained_pairs: Ints | None = None) -> RowPlan:
        """As in the base class, without conversations that have no trained target."""
        return super()._epoch_plan(documents[self._targets[documents] > 0], epoch, self._targets)

    def truncation_report(self, plan: RowPlan) -> list[str]:
        """A line about training conversations that are longer than a row, if any."""
        lengths = np.diff(self.store.offsets)[self.documents]
        longer = self.documents[lengths > self.max_seq_len]
        if not len(longer):
            return []
        total = self.answers.count(self.store, int(lengths.max()))[longer]
        trained = self._targets[longer]
        lost = int(total.sum(dtype=np.int64)) - int(trained.sum(dtype=np.int64))
        return [
            f"note: {len(longer):,} of {counted(len(self.documents), 'conversation')} exceed --max_seq_len {self.max_seq_len} and "
            f"are cut: answers lose {counted(lost, 'token')}; skipped, since no answer is left: "
            f"{counted(int((trained == 0).sum()), 'conversation')}"
        ]
