"""What a start says of leaks. References: the documents that were planted."""

from dataset.corpus import Corpus
from dataset.leaks_at_start import leak_notices
from tests.dataset.test_corpus_sources import write_texts


def the_line(corpus):
    (line,) = leak_notices(corpus)
    return line


def words(number, count=60):
    return " ".join(f"w{number}x{i}" for i in range(count))


def test_validation_documents_within_other_training_text_are_told(tmp_path, encoder, monkeypatch):
    """All 5 that were planted, and no other; copies to the letter have a line of their own."""
    validation = [words(i) for i in range(40)]
    training = [words(1000 + i) for i in range(100)]
    for i in (3, 9, 20, 30, 39):
        training[2 * i] = f"{words(2000 + i)} {validation[i]} {words(3000 + i)}"
    training.append(validation[7])
    paths = write_texts(tmp_path / "a.jsonl", training), write_texts(tmp_path / "b.jsonl", validation)
    corpus = Corpus([paths[0]], encoder, max_seq_len=16, seed=0, val_path=paths[1], progress=False)
    assert the_line(corpus).startswith(
        "note: 5 of 39 validation documents (12.8%) are in the training text nearly whole,"
    )
    monkeypatch.setattr("dataset.quality.leaks.CHUNK", 100)
    monkeypatch.setattr("dataset.leaks_at_start.LEAK_TOKENS", 100)
    assert all(" of it that was looked at" in line for line in leak_notices(corpus))


def test_what_is_held_out_is_looked_for_in_the_rest(tmp_path, encoder):
    """With several sources too. Reference: the texts that were planted in a training document."""
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
    assert the_line(corpus).startswith(f"note: 2 of {len(corpus.val_documents)} validation documents")


def test_without_validation_nothing_is_looked_for(tmp_path, encoder):
    path = write_texts(tmp_path / "a.jsonl", ["one text"])
    assert leak_notices(Corpus([path], encoder, max_seq_len=16, seed=0, progress=False)) == []
