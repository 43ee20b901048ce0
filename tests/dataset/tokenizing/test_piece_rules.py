"""The rules that cut pieces. References: the digests by which other programs know them, tiktoken's engine, cuts by hand."""

import hashlib

import pytest
import tiktoken
from tokenizers import Regex, pre_tokenizers

from dataset.tokenizing.byte_level_bpe import PIECE_RULES

# By which Ollama's converter knows a rule: SHA-256 of the expression's text.
DIGESTS = {
    "llama-bpe": "d98f9631be1e9607a9848c26c1f9eac1aa9fc21ac6ba82a2fc0741af9780a48f",
    "qwen2": "1ff7f41064896984db5d1bb6ff64fa4bc29007d08c1b439e505b7392777a319e",
}
TEXT = 'It\'s 2025年12345, "你好，世界。" x = [1.5]\n\n    return -1  \n\tÀÉ naïve ПриВет１２３'


def pieces(rule: str, text: str) -> list[str]:
    splitter = pre_tokenizers.Split(Regex(PIECE_RULES[rule]), "isolated")
    return [piece for piece, _ in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize("rule", DIGESTS)
def test_a_rule_is_known_to_other_programs(rule):
    assert hashlib.sha256(PIECE_RULES[rule].encode()).hexdigest() == DIGESTS[rule]


@pytest.mark.parametrize("rule", PIECE_RULES)
def test_two_engines_cut_alike(rule):
    """Reference: tiktoken, with every piece that the tokenizer's engine finds as a token of its own."""
    found = pieces(rule, TEXT)
    assert "".join(found) == TEXT
    ranks = {bytes([byte]): byte for byte in range(256)}
    for piece in found:
        ranks.setdefault(piece.encode(), len(ranks))
    encoding = tiktoken.Encoding("pieces", pat_str=PIECE_RULES[rule], mergeable_ranks=ranks, special_tokens={})
    ids = encoding.encode_ordinary(TEXT)
    assert [encoding.decode_single_token_bytes(i).decode() for i in ids] == found
