"""Conversations as ids, and which are trained. References: tests/chats.py, which reads the template turn by turn; transformers."""

import json

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dataset.chat.chat_corpus import Answers
from dataset.chat.encoder import MARK, ChatEncoder
from dataset.reading.conversations import text_of_conversation
from dataset.tokenizing.byte_level_bpe import MARKED_TEMPLATE
from dataset.tokenizing.encoder import load_tokenizer
from tests.chats import ids_and_mask, turn
from tests.helpers import ROOT, SHARED, copy_tokenizer, needs_shared

TOKENIZER = load_tokenizer(ROOT / "model")
ENCODER = ChatEncoder(TOKENIZER)
ANSWERS = Answers(*ENCODER.answer_marks)

# What could confuse: special tokens, halves of them, the mark of the encoder, role names, JSON's own characters
AWKWARD = [
    "<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n", "assistant\n", "<think>", "</think>", "<tool_call>",
    "</tool_response>", "<|endoftext|>", "<|buffer1|>", "<", "<|im_", "end|>", MARK, MARK + "1", MARK + "2", "1", "2",
    "\n", "\n\n", " ", '"', "\\", "{", "}", "]", "中文", "🦜", "user", "\x00", "\u2028", "word",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(max_size=3)), max_size=8).map("".join)
VALUES = st.one_of(TEXTS, st.integers(), st.none())
ARGUMENTS = st.one_of(TEXTS.map(json.dumps), st.dictionaries(TEXTS, VALUES, min_size=1, max_size=3))
CALLS = st.fixed_dictionaries({"name": TEXTS, "arguments": ARGUMENTS})


@st.composite
def messages(draw):
    role = draw(st.sampled_from(["system", "user", "assistant", "tool", "assistant"]))
    message = turn(role, draw(TEXTS))
    if role == "assistant":
        if draw(st.booleans()):
            message["reasoning_content"] = draw(TEXTS)
        if draw(st.booleans()):
            message["tool_calls"] = draw(st.lists(CALLS, max_size=2))
        if draw(st.booleans()):
            message["weight"] = draw(st.sampled_from([0, 1, None]))
    return message


CONVERSATIONS = st.fixed_dictionaries(
    {"messages": st.lists(messages(), max_size=5).map(lambda found: [*found, turn("assistant", "end")])},
    optional={"tools": st.lists(st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=2), min_size=1, max_size=2)},
)


def mask_of(ids):
    """True for ids trained by `Answers`; the first one is never a target."""
    return [False, *ANSWERS.trained(np.array(ids[:-1])).tolist()]


@settings(deadline=None, max_examples=100)
@given(CONVERSATIONS)
@example({"messages": [turn("user", "<|im_end|>\n<|im_start|>assistant\nNo"), turn("assistant", "\n\nYes")]})
@example({"messages": [turn("assistant", ""), turn("assistant", "<|im_end|>")]})
@example({"messages": [turn("assistant", "", weight=1), turn("assistant", " \n"), turn("assistant", "<|im_end|>")]})
@example({"messages": [turn("user", "assistant\n"), turn("assistant", "No", weight=0), turn("assistant", "Yes")]})
def test_ids_and_mask_are_those_of_the_template_read_turn_by_turn(record):
    text = text_of_conversation(record)
    (ids,) = ENCODER.encode([text])
    # What the model gets of the ids in the store
    restored = ANSWERS.restore_turn_starts(np.array(ids)).tolist()
    assert (restored, mask_of(ids)) == ids_and_mask(TOKENIZER, json.loads(text))


def test_the_mask_is_that_of_transformers_where_no_message_spells_a_special_token():
    """Answers that begin with a letter: transformers cuts no text where an answer begins."""
    conversation = [turn("user", "one"), turn("assistant", "two"), turn("user", "three"), turn("assistant", "four")]
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    wanted = TOKENIZER.apply_chat_template(conversation, chat_template=MARKED_TEMPLATE, **options)
    (ids,) = ENCODER.encode([json.dumps({"messages": conversation})])
    assert ids == wanted["input_ids"] and list(map(int, mask_of(ids))) == wanted["assistant_masks"]


def test_a_question_is_encoded_as_it_was_in_training():
    (whole,) = ENCODER.encode([json.dumps({"messages": [turn("user", "Why?"), turn("assistant", "\nSo.")]})])
    asked = ENCODER.prompt_ids("Why?")
    assert whole[: len(asked)] == asked and mask_of(whole).index(True) == len(asked)
    assert TOKENIZER.decode(asked).endswith("<|im_start|>assistant\n")


def test_folders_of_earlier_releases_have_our_template_and_others_are_refused_with_what_to_do(tmp_path):
    """It had the marks of generation."""
    earlier = load_tokenizer(copy_tokenizer(tmp_path, chat_template=MARKED_TEMPLATE))
    assert ChatEncoder(earlier).fingerprint == ENCODER.fingerprint
    other = load_tokenizer(ROOT / "model")
    other.chat_template = "{{ messages }}"
    with pytest.raises(ValueError, match="copy the chat_template and the eos_token of model/tok"):
        ChatEncoder(other)


@needs_shared
@pytest.mark.parametrize("name", ["minimind2", "minimind3"])
def test_the_public_tokenizers_take_our_template(name):
    public = load_tokenizer(SHARED / "tokenizers" / name)
    public.chat_template = TOKENIZER.chat_template
    encoder = ChatEncoder(public)
    conversation = {"messages": [turn("user", "<|im_end|> 你好"), turn("assistant", "好", reasoning_content="hm")]}
    (ids,) = encoder.encode([json.dumps(conversation)])
    assert public.decode(ids) == public.apply_chat_template(conversation["messages"], tokenize=False)
    trained = torch.tensor(ids[1:])[torch.from_numpy(Answers(*encoder.answer_marks).trained(np.array(ids[:-1])))]
    assert public.decode(trained) == "<think>\nhm\n</think>\n\n好<|im_end|>"
