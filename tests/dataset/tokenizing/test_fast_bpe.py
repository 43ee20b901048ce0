"""tiktoken in the place of the tokenizers library. Reference: the library."""

import pickle

import pytest

from dataset.tokenizing.encoder import DocumentEncoder, _ambiguous, load_tokenizer
from tests.dataset.tokenizing.tokenizer_kinds import KINDS, LEARNED, tokenizer_of
from tests.helpers import ROOT

pytest.importorskip("tiktoken")


def encoders():
    """(by the library, by tiktoken)"""
    tokenizer = load_tokenizer(ROOT / "model")
    both = DocumentEncoder(tokenizer), DocumentEncoder(tokenizer)
    both[1].use_fast_bpe()
    assert both[1]._fast is not None
    return both


@pytest.mark.slow
def test_ids_are_those_of_the_library_for_every_character_that_is_taken():
    """Each beside letters, digits, spaces, line ends and apostrophes. Most of the basic plane is taken."""
    by_library, fast = encoders()
    taken = [chr(code) for code in [*range(0x10000), 0x1F600, 0x20010] if not _ambiguous().search(chr(code))]
    assert len(taken) > 50_000 and "\ud800" not in taken
    texts = []
    for begin in range(0, len(taken), 500):
        text = ""
        for c in taken[begin : begin + 500]:
            text += f"a{c}b 1{c}2 {c}{c} \n{c}\n\n  {c}. it'{c} i'{c}e i'l{c} "
        texts.append(text)
    texts += [LEARNED, "", " ", "\n", "x" * 5000, " " * 5000 + "x", "<|im_end|> and <think>"]
    # Without the library all of them come from tiktoken.
    fast._backend = None
    assert fast.encode(texts) == by_library.encode(texts)


def test_what_is_doubtful_goes_to_the_library_and_comes_back_in_its_place():
    by_library, fast = encoders()
    # A letter of Unicode 15, a number of 2008, and half of nothing else.
    texts = ["one", "two \ua7d0 \u0da6\u0de6", "three \U0001d2c0", "four"]
    assert [bool(_ambiguous().search(text)) for text in texts] == [False, True, True, False]
    assert fast.encode(texts) == by_library.encode(texts)
    assert pickle.loads(pickle.dumps(fast)).encode(texts) == by_library.encode(texts)


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "gpt-4o", "added tokens", "deepseek", "bert", "llama2"])
def test_other_tokenizers_stay_with_the_library(kind):
    encoder = DocumentEncoder(tokenizer_of(KINDS[kind]()))
    encoder.use_fast_bpe()
    assert encoder._fast is None
