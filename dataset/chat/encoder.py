"""Conversations to token ids, by the chat template of the tokenizer.

The template makes one text of a conversation. In this text two things must be kept apart: the special tokens that the
template writes, and their spelling within a message, as in a question about "<|im_start|>assistant", which stays text.
So a mark is put into each such spelling before the template sees the message, and taken out again once the text is cut
at the special tokens that are left:

    message     What is <|im_end|>?          marked      What is <*|im_end|>?
    template    <|im_start|>user\\nWhat is <*|im_end|>?<|im_end|>\\n
    pieces      1    user\\nWhat is <|im_end|>?    2    \\n

The text is cut where an answer begins, too. The ids of the question and of "assistant\\n" are then the same
whatever is answered: a model is trained on them as it is asked.

What the assistant wrote is trained, all else is only read. The template writes each turn as <|im_start|>, the role and a line
break, the text, <|im_end|>. Text of messages never becomes one of these two tokens, so they tell where a turn begins and
ends, in a row that several conversations share too.

Some answers are not to be trained: those of weight 0 and those in which nothing is said. In the store such a turn begins with
<|im_end|> instead of <|im_start|>, which is put right when a batch is made:

    trained         <|im_start|>assistant\\nYes<|im_end|>\\n
    only read       <|im_end|>assistant\\nYes<|im_end|>\\n

Nothing else looks like it, since a line break follows each <|im_end|> that ends a turn.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dataset.loader import Batch
from dataset.reading.conversations import checked_message, is_trained
from dataset.store.format import Documents, Ints
from dataset.tokenizing.byte_level_bpe import BOS, CHAT_TEMPLATE, EOS, OUR_TEMPLATES
from dataset.tokenizing.encoder import DocumentEncoder
from model.loss import IGNORE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A noncharacter of Unicode (https://www.unicode.org/faq/private_use.html#noncharacters): programs may use it for themselves.
# What follows it says what is meant, so that texts that hold it come out as they were: it stands for itself, or it is a mark.
MARK = "\ufdd0"
ITSELF = MARK + "1"
INSIDE = MARK + "2"
# What the template writes before an answer, and the place behind that
ANSWER_BEGINS = f"{BOS}assistant\n"
BEFORE_ANSWER = re.compile(f"(?<={re.escape(ANSWER_BEGINS)})")

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

    def as_read(self, ids: Ints) -> Ints:
        """The ids as the model reads them: each turn begins with <|im_start|>."""
        ids = ids.copy()
        # Answers that are not to be trained
        ids[self._before_header(ids, self.end)] = self.start
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
            begins = store.offsets[chosen]
            pairs = np.clip(store.offsets[chosen + 1] - begins - 1, 0, most_pairs)
            ends = np.cumsum(pairs)
            source = np.arange(pairs.sum()) + np.repeat(begins - (ends - pairs), pairs)
            trained_up_to = np.append(0, np.cumsum(self.trained(store.tokens[source])))
            counts[lo : lo + at_once] = trained_up_to[ends] - trained_up_to[ends - pairs]
        return counts


class ChatEncoder(DocumentEncoder):
    """Encodes conversations as dataset/reading/conversations.py gives them: JSON with "messages" and perhaps "tools".

    answers: finds what the assistant wrote in the ids. Errors: ValueError for a tokenizer without our chat template or tokens.
    """

    can_hold_out_part = False

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        super().__init__(tokenizer)
        # {special token: its id}
        self.special: dict[str, int] = {}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                self.special[str(token)] = token_id
        if tokenizer.chat_template not in OUR_TEMPLATES or not {BOS, EOS} <= self.special.keys():
            raise ValueError(
                f"{tokenizer.name_or_path}: conversations take the special tokens {BOS} and {EOS}, and a template that tells what the "
                "assistant says: copy the chat_template of model/tokenizer_config.json into the tokenizer_config.json there"
            )
        # The longest first: of two that begin alike, the longer one is meant.
        spellings = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        self._cut_at = re.compile(f"({spellings})")
        # The first character of each, also where two overlap.
        self._first_of = re.compile(f"(?={spellings})(.)", re.DOTALL)
        self.answers = Answers(
            start=self.special[BOS],
            end=self.special[EOS],
            header=tuple(self._encode_whole(ANSWER_BEGINS.removeprefix(BOS))),
        )
        # 2: answers that are not to be trained are marked.
        self.fingerprint = hashlib.sha256(f"chat 2 {CHAT_TEMPLATE} {self.fingerprint}".encode()).hexdigest()

    @property
    def added_tokens(self) -> int:
        """None: the template writes all."""
        return 0

    def encode_in_parts(self, text: str) -> Iterator[list[int]]:
        """The ids of one conversation. The top of this file tells how answers that are not to be trained begin."""
        yield self._ids_of(text)

    def prompt_ids(self, text: str) -> list[int]:
        """The ids of a user's message, up to where the assistant answers."""
        return self.turns_ids([{"role": "user", "content": text}])

    def turns_ids(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of the turns so far, up to where the assistant answers. tools: the functions that it may call."""
        # As the lines of data: thoughts at the beginning of an answer are thoughts.
        checked = [checked_message(message, number) for number, message in enumerate(messages, 1)]
        text = json.dumps({"messages": checked, "tools": list(tools)}, ensure_ascii=False)
        return self._ids_of(text, is_asked=True)

    def _ids_of(self, text: str, is_asked: bool = False) -> list[int]:
        """The ids of a conversation. is_asked: an answer comes next."""
        # A slow import, which a process that reads no conversations does without.
        from transformers.utils.chat_template_utils import render_jinja_template

        # In the JSON and not in its values: it escapes neither the mark nor a character of the spellings.
        conversation = json.loads(self._first_of.sub(rf"\1{INSIDE}", text.replace(MARK, ITSELF)))
        # ([text], nothing that is asked for here)
        rendered: Any = render_jinja_template(
            [conversation["messages"]],
            tools=conversation.get("tools"),
            chat_template=CHAT_TEMPLATE,
            add_generation_prompt=is_asked,
        )
        # Each part but the last one ends where an answer begins.
        parts = BEFORE_ANSWER.split(rendered[0][0])
        answers = [message for message in conversation["messages"] if message["role"] == "assistant"]
        assert len(parts) == len(answers) + is_asked + 1
        if not is_asked:
            for i, answer in enumerate(answers):
                if not is_trained(answer):
                    parts[i] = parts[i].removesuffix(ANSWER_BEGINS) + EOS + ANSWER_BEGINS.removeprefix(BOS)
        ids: list[int] = []
        for part in parts:
            for piece in self._cut_at.split(part):
                if piece in self.special:
                    ids.append(self.special[piece])
                elif piece:
                    for of_piece in self._body_in_parts(piece.replace(INSIDE, "").replace(ITSELF, MARK)):
                        ids += of_piece
        return ids
