"""Pieces of text with probabilities: against softmax of plain forwards, and against decoding all tokens at once."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dataset.tokenizing.encoder import load_tokenizer
from scripts.generate import Sampling, generate
from scripts.playground.pieces import ALTERNATIVES, PieceStream, Probabilities, bytes_of_entry
from tests.helpers import ROOT, tiny_model


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ROOT / "model")


def streamed(tokenizer, ids, scores=None, size=None):
    """The pieces of these tokens, one list for each token and one for the end. size: of the model's vocabulary."""
    probabilities = Probabilities()
    found = []
    stream = PieceStream(tokenizer, probabilities, found.append)
    stream.put(torch.tensor([[1, 2, 3]]))
    size = size or len(tokenizer)
    for number, token in enumerate(ids):
        row = torch.zeros(1, size) if scores is None else scores[number : number + 1]
        assert torch.equal(probabilities(torch.tensor([[1]]), row), row)
        stream.put(torch.tensor([token]))
    stream.end()
    return found


def test_the_probabilities_are_those_of_plain_forwards(tokenizer):
    """Reference: softmax of the logits of a forward over the whole text, without temperature and top_p."""
    model = tiny_model(vocab_size=6400).eval()
    prompt = [1, *tokenizer.encode("the cat", add_special_tokens=False)]
    probabilities, found = Probabilities(), []
    stream = PieceStream(tokenizer, probabilities, found.append)
    torch.manual_seed(3)
    text = generate(model, tokenizer, prompt, Sampling(20, 1.7, 0.6), stream, probabilities)
    tokens = [token for pieces in found for piece in pieces for token in piece.tokens]
    assert len(tokens) == text.shape[1] - len(prompt) == 20
    with torch.no_grad():
        wanted = model(text).logits[0].float().softmax(-1)
    for place, token in enumerate(tokens, len(prompt)):
        row = wanted[place - 1]
        assert token.probability == pytest.approx(float(row[text[0, place]]), rel=1e-3)
        assert [p for _, p in token.likeliest] == pytest.approx(row.topk(ALTERNATIVES).values.tolist(), rel=1e-3)
    assert not probabilities.of_coming


def test_a_piece_is_never_half_a_character(tokenizer):
    """Reference: the text itself. Bytes of these characters are spread over several tokens."""
    text = "a 🦜 and 龘, naïve\n中文 half"
    ids = [tokenizer.convert_tokens_to_ids(t) for t in tokenizer.tokenize(text)]
    pieces = [piece for pieces in streamed(tokenizer, ids) for piece in pieces]
    assert "".join(piece.text for piece in pieces) == text
    assert sum(len(piece.tokens) for piece in pieces) == len(ids) > len(pieces)
    labels = [label for piece in pieces for token in piece.tokens for label in (token.label, *dict(token.likeliest))]
    assert not any("\ufffd" in label for label in labels)


def test_an_alternative_is_told_as_the_text_that_it_would_give(tokenizer):
    """The last byte of a character shows the whole one; its first byte, which is no text yet, shows the byte."""
    bird = tokenizer.encode("🦜", add_special_tokens=False)
    assert len(bird) > 1
    scores = torch.full((len(bird), len(tokenizer)), -20.0)
    for number, token in enumerate(bird):
        scores[number, token] = 20.0
    (piece,) = [piece for pieces in streamed(tokenizer, bird, scores) for piece in pieces]
    assert piece.text == "🦜"
    first, last = piece.tokens[0], piece.tokens[-1]
    assert first.label.split()[0] == "F0" and last.label == "🦜"
    assert last.likeliest[0] == ("🦜", pytest.approx(1.0))


def test_random_tokens_are_the_text_that_they_decode_to(tokenizer):
    """Invalid sequences of bytes, special tokens in between."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        ids = torch.randint(0, 6400, (30,), generator=generator).tolist()
        ids[7] = ids[8] = 1
        pieces = [piece for pieces in streamed(tokenizer, ids) for piece in pieces]
        assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids, skip_special_tokens=True)
        assert sum(len(piece.tokens) for piece in pieces) == len(ids)


def test_a_special_token_comes_at_once_and_by_its_name(tokenizer):
    words = tokenizer.encode("one two", add_special_tokens=False)
    first, special, *_ = streamed(tokenizer, [words[0], tokenizer.eos_token_id, *words[1:]])
    assert [piece.text for piece in first] == ["one"]
    assert [(piece.text, piece.tokens[0].label) for piece in special] == [("", "<|im_end|>")]


def test_a_token_that_the_tokenizer_does_not_have_is_told_by_its_number(tokenizer):
    """Public models have more embeddings than their tokenizers have entries."""
    (word,) = tokenizer.encode("one", add_special_tokens=False)
    pieces = [piece for pieces in streamed(tokenizer, [word, 6405, word], size=6410) for piece in pieces]
    assert "".join(piece.text for piece in pieces) == "oneone"
    assert [token.label for piece in pieces for token in piece.tokens] == ["one", "[6405]", "one"]


def test_tokens_that_come_a_step_late_keep_their_probabilities(tokenizer):
    """As transformers hands them on with a Mac's GPU. Reference: the same without delay."""
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    scores = torch.randn(len(ids), len(tokenizer))
    at_once = [token for pieces in streamed(tokenizer, ids, scores) for piece in pieces for token in piece.tokens]
    probabilities, found = Probabilities(), []
    stream = PieceStream(tokenizer, probabilities, found.append)
    stream.put(torch.tensor([[1]]))
    for number in range(len(ids) + 1):
        probabilities(torch.tensor([[1]]), scores[min(number, len(ids) - 1)][None])
        if number:
            stream.put(torch.tensor([ids[number - 1]]))
    assert [token for pieces in found for piece in pieces for token in piece.tokens] == at_once


def test_entries_that_are_no_text_are_told_as_bytes():
    assert bytes_of_entry("ä½") == "E4 BD"
    assert bytes_of_entry("<0xE4>") == "E4"
    assert bytes_of_entry("▁the") == "▁the"


def test_a_tokenizer_with_single_bytes_as_names(tokenizer):
    """As SentencePiece has them. Reference: the text."""
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    other = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    ids = [2, 1, *(3 + byte for byte in "龘".encode()), 2]
    pieces = [piece for pieces in streamed(other, ids) for piece in pieces]
    assert [piece.text for piece in pieces] == ["a", " ", "龘", "a"]
    assert [token.label for token in pieces[2].tokens] == ["E9", "BE", "龘"]
