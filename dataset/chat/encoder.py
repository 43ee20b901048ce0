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
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dataset.chat.answers import Answers
from dataset.reading.conversations import is_trained
from dataset.tokenizing.byte_level_bpe import BOS, CHAT_TEMPLATE, EOS, OUR_TEMPLATES
from dataset.tokenizing.encoder import DocumentEncoder

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


class ChatEncoder(DocumentEncoder):
    """Encodes conversations as dataset/reading/conversations.py gives them: JSON with "messages" and perhaps "tools".

    answers: finds what the assistant wrote in the ids. Errors: ValueError for a tokenizer without our chat template.
    """

    can_be_cut = False

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        super().__init__(tokenizer)
        if tokenizer.chat_template not in OUR_TEMPLATES:
            raise ValueError(
                f"{tokenizer.name_or_path}: its chat template is not that of this repository, which tells what the assistant "
                "says: copy the chat_template of model/tokenizer_config.json into the tokenizer_config.json there"
            )
        # {special token: its id}
        self.special: dict[str, int] = {}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                self.special[str(token)] = token_id
        for wanted in (BOS, EOS):
            if wanted not in self.special:
                raise ValueError(f"{tokenizer.name_or_path}: no special token {wanted}, which the chat template writes")
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
        """The ids of one conversation. dataset/chat/answers.py tells how answers that are not to be trained begin."""
        yield self._ids_of(text)

    def prompt_ids(self, text: str) -> list[int]:
        """The ids of a user's message, up to where the assistant answers."""
        return self.turns_ids([{"role": "user", "content": text}])

    def turns_ids(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of the turns so far, up to where the assistant answers. tools: the functions that it may call."""
        text = json.dumps({"messages": list(messages), "tools": list(tools)}, ensure_ascii=False)
        return self._ids_of(text, is_asked=True)

    def _ids_of(self, text: str, is_asked: bool = False) -> list[int]:
        """The ids of a conversation. is_asked: an answer comes next."""
        ids: list[int] = []
        for piece in self._pieces(text, is_asked):
            if isinstance(piece, str):
                for of_part in self._body_in_parts(piece):
                    ids += of_part
            else:
                ids.append(piece)
        return ids

    def _pieces(self, text: str, is_asked: bool) -> Iterator[str | int]:
        """The texts of a conversation and the ids of the special tokens between them."""
        # In the JSON and not in its values: it escapes neither the mark nor a character of the spellings.
        marked = self._first_of.sub(rf"\1{INSIDE}", text.replace(MARK, ITSELF))
        conversation = json.loads(marked)
        # Each part but the last one ends where an answer begins.
        *before_answers, rest = BEFORE_ANSWER.split(rendered(conversation, is_asked))
        answers = [message for message in conversation["messages"] if message["role"] == "assistant"]
        # Where one is asked for, nothing is trained.
        only_read = [not is_asked and not is_trained(answer) for answer in answers]
        if is_asked:
            only_read.append(False)
        for part, is_only_read in zip(before_answers, only_read, strict=True):
            if is_only_read:
                part = part.removesuffix(ANSWER_BEGINS) + EOS + ANSWER_BEGINS.removeprefix(BOS)
            yield from self._pieces_of(part)
        yield from self._pieces_of(rest)

    def _pieces_of(self, part: str) -> Iterator[str | int]:
        """The same of a part of what the template writes."""
        for piece in self._cut_at.split(part):
            if piece in self.special:
                yield self.special[piece]
            elif piece:
                yield piece.replace(INSIDE, "").replace(ITSELF, MARK)


def rendered(conversation: dict[str, Any], is_asked: bool) -> str:
    """What the template writes."""
    # A slow import, which a process that reads no conversations does without.
    from transformers.utils.chat_template_utils import render_jinja_template

    # (texts, nothing that is asked for here)
    result: Any = render_jinja_template(
        [conversation["messages"]],
        tools=conversation.get("tools"),
        chat_template=CHAT_TEMPLATE,
        add_generation_prompt=is_asked,
    )
    return str(result[0][0])
