"""Conversations to token ids, by the chat template of the tokenizer.

The template renders a conversation as one text, in which two things must be kept apart: the special tokens that the
template writes, and their spelling within a message, as in a question about "<|im_start|>assistant", which stays text.
So a mark is inserted into each such spelling before rendering, and removed after the text is cut at the remaining
special tokens:

    message     What is <|im_end|>?          marked      What is <*|im_end|>?
    template    <|im_start|>user\\nWhat is <*|im_end|>?<|im_end|>\\n
    pieces      1    user\\nWhat is <|im_end|>?    2    \\n

The text is also cut where an answer starts. Then the ids of the question and of "assistant\\n" do not depend on the
answer: a model is trained on the same ids that it is prompted with.

Only the assistant's messages have a loss. The template writes each turn as <|im_start|>, the role and a line break, the
text, <|im_end|>. Text of messages never becomes one of these two tokens, so they mark where a turn starts and ends, also
in a row that several conversations share.

Some answers are not trained: those of weight 0 and empty ones. In the store such a turn starts with <|im_end|> instead of
<|im_start|>, which is restored when a batch is made:

    trained         <|im_start|>assistant\\nYes<|im_end|>\\n
    only read       <|im_end|>assistant\\nYes<|im_end|>\\n

This is unambiguous, since a line break follows each <|im_end|> that ends a turn.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dataset.arrays import Bools, Ints
from dataset.loader import Batch
from dataset.reading.conversations import checked_message, is_trained
from dataset.store.token_store import Documents
from dataset.tokenizing.byte_level_bpe import BOS, CHAT_TEMPLATE, EOS, MARKED_TEMPLATE, OUR_TEMPLATES
from dataset.tokenizing.encoder import DocumentEncoder
from model.loss import IGNORE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A noncharacter of Unicode (https://www.unicode.org/faq/private_use.html#noncharacters), reserved for internal use.
# The digit after it says whether it is the character itself, so that texts that hold it survive, or our mark.
MARK = "\ufdd0"
ITSELF = MARK + "1"
INSIDE = MARK + "2"
# Header of an answer in the template's text, and the position after it
ANSWER_BEGINS = f"{BOS}assistant\n"
BEFORE_ANSWER = re.compile(f"(?<={re.escape(ANSWER_BEGINS)})")

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

    def only(self, batch: Batch) -> Batch:
        """The Batch with only the targets of answers."""
        # Row by row from left to right: the order of the pieces in a batch.
        has_pair = batch.document_ids >= 0
        stored = batch.input_ids[has_pair].numpy()
        trained = torch.from_numpy(self.trained(stored))
        input_ids = batch.input_ids.clone()
        input_ids[has_pair] = torch.from_numpy(self.restore_turn_starts(stored))
        targets = batch.targets.clone()
        targets[has_pair] = torch.where(trained, batch.targets[has_pair], IGNORE)
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


class ChatEncoder(DocumentEncoder):
    """Encodes conversations as dataset/reading/conversations.py gives them: JSON with "messages" and perhaps "tools".

    answers: finds the assistant's messages in the ids. Errors: ValueError for a tokenizer without our template or tokens.
    """

    can_hold_out_part = False

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        super().__init__(tokenizer)
        # {token: its id}: special tokens, and marks of the template that minimind3 and Qwen do not call special
        self.special: dict[str, int] = {}
        version = 2
        for token_id, token in tokenizer.added_tokens_decoder.items():
            is_mark = re.fullmatch(r"</?(think|tool_call|tool_response)>", str(token))
            if token.special or is_mark:
                self.special[str(token)] = token_id
            if is_mark and not token.special:
                version = 3
        # Generation ends at the tokenizer's EOS.
        if tokenizer.chat_template not in OUR_TEMPLATES or tokenizer.eos_token != EOS or BOS not in self.special:
            raise ValueError(
                f"{tokenizer.name_or_path}: conversations need a tokenizer with the special tokens {BOS} and {EOS}; if it has them, copy "
                "the chat_template and the eos_token of model/tokenizer_config.json into its own tokenizer_config.json, and delete "
                "its chat_template.jinja"
            )
        # Longest first: of two with the same start, the longer one is meant.
        spellings = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        self._cut_at = re.compile(f"({spellings})")
        # first character of each spelling, also where two overlap
        self._first_of = re.compile(f"(?={spellings})(.)", re.DOTALL)
        self.answers = Answers(
            start=self.special[BOS],
            end=self.special[EOS],
            header=tuple(self._encode_whole(ANSWER_BEGINS.removeprefix(BOS)).tolist()),
        )
        # version 2: answers that are not trained are marked; 3: marks that are not special count
        self.fingerprint = hashlib.sha256(f"chat {version} {MARKED_TEMPLATE} {self.fingerprint}".encode()).hexdigest()

    def encode_in_parts(self, text: str) -> Iterator[Ints]:
        """The ids of one conversation. Answers that are not trained are marked, see the top of this file."""
        yield np.array(self._ids_of(text))

    def prompt_ids(self, text: str) -> list[int]:
        """The ids of a user's message, up to the assistant's answer."""
        return self.chat_prompt_ids([{"role": "user", "content": text}])

    def chat_prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of the turns so far, up to the assistant's answer. tools: the functions that it may call."""
        # As for lines of data: <think> at the start of an answer is parsed.
        checked = [checked_message(dict(message), number) for number, message in enumerate(messages, 1)]
        text = json.dumps({"messages": checked, "tools": list(tools)}, ensure_ascii=False)
        return self._ids_of(text, add_generation_prompt=True)

    def _ids_of(self, text: str, add_generation_prompt: bool = False) -> list[int]:
        """The ids of a conversation. add_generation_prompt: an answer comes next."""
        # A slow import, which only conversations need.
        from transformers.utils.chat_template_utils import render_jinja_template

        # Marked in the JSON, not in its values: JSON escapes neither the mark nor a character of the spellings.
        conversation = json.loads(self._first_of.sub(rf"\1{INSIDE}", text.replace(MARK, ITSELF)))
        # ([text], masks, unused here)
        rendered: Any = render_jinja_template(
            [conversation["messages"]],
            tools=conversation.get("tools"),
            chat_template=CHAT_TEMPLATE,
            add_generation_prompt=add_generation_prompt,
        )
        # Each part but the last one ends where an answer starts.
        parts = BEFORE_ANSWER.split(rendered[0][0])
        answers = [message for message in conversation["messages"] if message["role"] == "assistant"]
        assert len(parts) == len(answers) + add_generation_prompt + 1
        if not add_generation_prompt:
            for i, answer in enumerate(answers):
                if not is_trained(answer):
                    parts[i] = parts[i].removesuffix(ANSWER_BEGINS) + EOS + ANSWER_BEGINS.removeprefix(BOS)
        ids: list[int] = []
        for part in parts:
            for piece in self._cut_at.split(part):
                if piece in self.special:
                    ids.append(self.special[piece])
                elif piece:
                    for part_ids in self._body_in_parts(piece.replace(INSIDE, "").replace(ITSELF, MARK)):
                        ids += part_ids.tolist()
        return ids
