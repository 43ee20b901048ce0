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
from typing import TYPE_CHECKING, Any

import numpy as np

from dataset.arrays import Ints
from dataset.reading.conversations import checked_message, is_trained
from dataset.tokenizing.byte_level_bpe import BOS, CHAT_TEMPLATE, EOS, MARKED_TEMPLATE, OUR_TEMPLATES
from dataset.tokenizing.encoder import DocumentEncoder

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


class ChatEncoder(DocumentEncoder):
    """Encodes conversations as dataset/reading/conversations.py gives them: JSON with "messages" and perhaps "tools".

    answer_marks: ids by which Answers (dataset/chat/chat_corpus.py) finds the assistant's messages. Errors: ValueError for a tokenizer without our template or tokens.
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
        header = tuple(self._encode_whole(ANSWER_BEGINS.removeprefix(BOS)).tolist())
        self.answer_marks = (self.special[BOS], self.special[EOS], header)
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
