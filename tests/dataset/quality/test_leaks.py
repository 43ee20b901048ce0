"""What a start says of validation text that is in the training text. References: tuples of tokens in sets, and the documents
that were planted."""

import pytest

from dataset.corpus import Corpus
from dataset.quality import leaks
from dataset.quality.leaks import leak_notices
from tests.helpers import write_texts


def words(number, count=60):
    return " ".join(f"w{number}x{i}" for i in range(count))


@pytest.mark.parametrize("chunk", [1 << 16, 50])
def test_validation_documents_within_other_training_text_are_told(tmp_path, encoder, monkeypatch, chunk):
    """All 5 that were planted, and no other; copies to the letter have a line of their own. Chunks are joined without a gap."""
    monkeypatch.setattr(leaks, "CHUNK", chunk)
    validation = [words(i) for i in range(40)]
    training = [words(1000 + i) for i in range(100)]
    for i in (3, 9, 20, 30, 39):
        training[2 * i] = f"{words(2000 + i)} {validation[i]} {words(3000 + i)}"
    training += [validation[7], *(text[: len(text) // 2] for text in validation[10:15])]
    paths = write_texts(tmp_path / "a.jsonl", training), write_texts(tmp_path / "b.jsonl", validation)
    corpus = Corpus([paths[0]], encoder, max_seq_len=16, seed=0, val_path=paths[1], progress=False)
    (line,) = leak_notices(corpus)
    assert line.startswith("note: 5 of 39 validation documents (12.8%) are in the training text nearly whole,")
    # A look of limited length is spread over the text, so it finds about its part of them.
    monkeypatch.setattr(leaks, "LEAK_TOKENS", len(corpus.store.tokens) // 2)
    if chunk == 50:
        assert all(" of it that was looked at" in line for line in leak_notices(corpus))


@pytest.mark.parametrize("chunk", [1 << 16, 50])
def test_what_is_held_out_is_looked_for_in_the_rest(tmp_path, encoder, monkeypatch, chunk):
    """With several sources too. Reference: the texts that were planted in a training document."""
    monkeypatch.setattr(leaks, "CHUNK", chunk)
    texts = [words(i) for i in range(200)]
    first = write_texts(tmp_path / "a.jsonl", texts[:100])
    second = write_texts(tmp_path / "b.jsonl", texts[100:])
    options = {"max_seq_len": 16, "seed": 0, "val_fraction": 0.1, "progress": False}
    for paths in ([first, second], [f"{first}:0.5", f"{second}:0.5"]):
        corpus = Corpus(paths, encoder, **options)
        assert leak_notices(corpus) == []
    held_out = [texts[i] for i in corpus.val_documents[[0, -1]]]
    third = write_texts(tmp_path / "c.jsonl", [f"before {text} behind" for text in held_out])
    corpus = Corpus([*paths, f"{third}:0.1"], encoder, **options)
    (line,) = leak_notices(corpus)
    assert line.startswith(f"note: 2 of {len(corpus.val_documents)} validation documents")
    assert leak_notices(Corpus([first], encoder, max_seq_len=16, seed=0, progress=False)) == []
