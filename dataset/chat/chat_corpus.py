"""Fine-tuning data: conversations, with a loss on the answers only."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from common.wording import counted
from dataset.arrays import Ints
from dataset.chat.answers import Answers
from dataset.chat.encoder import ChatEncoder
from dataset.corpus import Corpus
from dataset.packing import RowPlan
from dataset.reading.settings import TextSettings
from dataset.shares import Source
from dataset.store.token_store import Documents


class ChatCorpus(Corpus):
    """A Corpus of conversations. One is never split over rows: if it is longer than a row, it is truncated.

    Errors: as Corpus.
    """

    nothing_to_train = "no answer starts within --max_seq_len, which may be too small"
    nothing_to_evaluate = nothing_to_train

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
