"""Which tokens of conversations the assistant wrote: those are trained, all others are only read.

The chat template writes each turn as <|im_start|>, the role and a line break, the text, <|im_end|>. Text of messages never
becomes one of these two tokens (dataset/chat/encoder.py), so they tell where a turn begins and ends, in a row that
several conversations share too.

Some answers are not to be trained: those of weight 0 and those in which nothing is said. In the store such a turn begins with
<|im_end|> instead of <|im_start|>, which is put right when a batch is made:

    trained         <|im_start|>assistant\\nYes<|im_end|>\\n
    only read       <|im_end|>assistant\\nYes<|im_end|>\\n

Nothing else looks like it, since a line break follows each <|im_end|> that ends a turn.
"""

from dataclasses import dataclass

import numpy as np
import torch

from dataset.loader import IGNORE, Batch
from dataset.store.format import Documents, Ints

# Tokens that are looked at together, of whole documents.
TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Answers:
    """Finds what the assistant wrote.

    start, end: the ids of <|im_start|> and <|im_end|>. header: those of "assistant" and the line break, between the start of
    such a turn and its text.
    """

    start: int
    end: int
    header: tuple[int, ...]

    def trained(self, inputs: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether the target of each input is trained, bool [N]: a token of an answer, or the <|im_end|> that ends it.

        inputs: of whole pieces one after the other, each without its last token, which is a target alone.
        """
        # The last token of the header is the input of the answer's first token.
        firsts = self._before_header(inputs, self.start) + len(self.header)
        # An answer goes on up to <|im_end|>, which is no input of it any more. One that was cut off ends with its piece, and
        # the next piece begins with a turn.
        marks = np.flatnonzero((inputs == self.start) | (inputs == self.end))
        marks = np.append(marks, len(inputs))
        ends = marks[np.searchsorted(marks, firsts, side="right")]
        change = np.zeros(len(inputs) + 1, dtype=np.int8)
        change[firsts] += 1
        change[ends] -= 1
        return np.cumsum(change[:-1], dtype=np.int8) > 0

    def _before_header(self, ids: Ints, token: int) -> Ints:
        """Where `token` stands with the whole header behind it."""
        places = np.flatnonzero(ids == token)
        has_header = places + len(self.header) < len(ids)
        for number, of_header in enumerate(self.header, 1):
            at = np.minimum(places + number, len(ids) - 1)
            has_header &= ids[at] == of_header
        return places[has_header]

    def untrained(self, ids: Ints) -> Ints:
        """Where the turns of the answers begin that are only read."""
        return self._before_header(ids, self.end)

    def as_read(self, ids: Ints) -> Ints:
        """The ids as the model reads them: each turn begins with <|im_start|>."""
        ids = ids.copy()
        ids[self.untrained(ids)] = self.start
        return ids

    def only(self, batch: Batch) -> Batch:
        """The Batch with the targets of answers alone."""
        # Row by row from left to right: so the pieces lie in a batch.
        has_pair = batch.document_ids >= 0
        stored = batch.input_ids[has_pair].numpy()
        trained = torch.from_numpy(self.trained(stored))
        input_ids = batch.input_ids.clone()
        input_ids[has_pair] = torch.from_numpy(self.as_read(stored))
        targets = batch.targets.clone()
        targets[has_pair] = torch.where(trained, batch.targets[has_pair], IGNORE)
        return batch._replace(input_ids=input_ids, targets=targets, n_targets=int(trained.sum()))

    def count(self, store: Documents, documents: Ints, most_pairs: int) -> Ints:
        """uint32: how many targets of answers are among the first `most_pairs` pairs of each of the given documents."""
        counts = np.zeros(len(documents), dtype=np.uint32)
        at_once = max(1, TOKENS_AT_ONCE // most_pairs)
        for lo in range(0, len(documents), at_once):
            chosen = np.asarray(documents[lo : lo + at_once], dtype=np.int64)
            begins = np.asarray(store.offsets[chosen])
            pairs = np.clip(np.asarray(store.offsets[chosen + 1]) - begins - 1, 0, most_pairs)
            ends = np.cumsum(pairs)
            source = np.arange(pairs.sum()) + np.repeat(begins - (ends - pairs), pairs)
            trained_up_to = np.append(0, np.cumsum(self.trained(store.tokens[source])))
            counts[lo : lo + at_once] = trained_up_to[ends] - trained_up_to[ends - pairs]
        return counts
