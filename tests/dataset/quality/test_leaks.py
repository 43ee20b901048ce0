"""Runs of tokens that two texts have in common. References: tuples of tokens in sets, and planted documents."""

from types import SimpleNamespace

import numpy as np
import pytest

from dataset.quality import leaks as module
from dataset.quality.leaks import LEAKED, RUN, Search, TrainingText, read_through, run_hashes, runs_of


def store(documents):
    tokens = [token for document in documents for token in document]
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    return SimpleNamespace(tokens=np.array(tokens, np.uint16), offsets=np.concatenate(([0], ends)).astype(np.int64))


def search_for(documents, **options):
    of = store(documents)
    return Search(runs_of(of.tokens, of.offsets[:-1], of.offsets[1:], **options))


def runs(tokens):
    return [tuple(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)]


def random_tokens(generator, longest=80):
    """Of so few kinds that runs come twice."""
    return generator.integers(0, 2, generator.integers(0, longest)).tolist()


def test_two_hashes_are_equal_where_the_runs_are():
    generator = np.random.default_rng(4)
    for _ in range(100):
        tokens = random_tokens(generator)
        # Half of them twice.
        tokens += tokens[: len(tokens) // 2]
        hashes = run_hashes(np.array(tokens, np.uint16))
        expected = runs(tokens)
        assert len(hashes) == len(expected)
        assert len(set(hashes.tolist())) == len(set(expected)) == len(set(zip(hashes.tolist(), expected, strict=True)))


def test_the_share_of_a_document_is_that_of_its_runs():
    """Reference: sets of tuples. All runs are taken, and the training text is looked at whole."""
    generator = np.random.default_rng(5)
    shares = set()
    for _ in range(100):
        training = random_tokens(generator, 200)
        documents = [random_tokens(generator), training[20:60], training[:10] + random_tokens(generator), []]
        search = search_for(documents, most=1000)
        assert read_through([search], [TrainingText(store([training]))]) == (1 if training else 0)
        there = set(runs(training))
        for share, document in zip(search.shares(), documents, strict=True):
            of_document = runs(document)
            if not of_document:
                assert np.isnan(share)
            else:
                assert share == pytest.approx(sum(run in there for run in of_document) / len(of_document))
                shares.add(share)
    assert {0, 1} < shares


def test_some_runs_stand_for_a_long_document():
    """They are evenly spread: of a document that is half there, half of them are found."""
    generator = np.random.default_rng(0)
    document = generator.integers(0, 1000, 5000)
    search = search_for([document])
    assert len(search.runs.hashes) == module.RUNS_OF_DOCUMENT
    read_through([search], [TrainingText(store([document[:2500]]))])
    assert search.shares() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("chunk", [1 << 16, 50])
def test_leaked_documents_are_found_wherever_they_stand(chunk, monkeypatch):
    """All 5 of 100, within other text; and no other one. Chunks are joined without a gap."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    generator = np.random.default_rng(1)
    documents = [generator.integers(0, 1000, 300) for _ in range(100)]
    training = [generator.integers(0, 1000, 1000) for _ in range(50)]
    leaked = [3, 20, 21, 64, 99]
    for place, number in enumerate(leaked):
        training[9 * place] = np.concatenate((training[9 * place][:77], documents[number], training[9 * place][77:]))
    search = search_for(documents)
    assert read_through([search], [TrainingText(store(training[:30])), TrainingText(store(training[30:]))]) == 1
    assert np.flatnonzero(search.shares() >= LEAKED).tolist() == leaked
    assert (np.delete(search.shares(), leaked) == 0).all()


@pytest.mark.parametrize("chunk", [1 << 16, 40])
def test_held_out_documents_are_no_training_text(chunk, monkeypatch):
    """They stand in the same store. Reference: the store without them."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    generator = np.random.default_rng(2)
    documents = [generator.integers(0, 2, int(n)) for n in generator.integers(1, 60, 60)]
    held_out = np.array([0, 4, 5, 17, 58, 59])
    whole = store(documents)
    text = TrainingText(whole, whole.offsets[held_out], whole.offsets[held_out + 1])
    search = search_for([documents[i] for i in held_out], most=1000)
    read_through([search], [text])
    there = set()
    piece = []
    # What stands between two of them is one text.
    for i, document in enumerate(documents):
        if i in held_out:
            there |= set(runs(piece))
            piece = []
        else:
            piece += document.tolist()
    for share, i in zip(search.shares(), held_out, strict=True):
        of_document = runs(documents[i].tolist())
        if of_document:
            assert share == pytest.approx(sum(run in there for run in of_document) / len(of_document))


def test_a_look_of_limited_length_is_spread_over_the_text(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 100)
    generator = np.random.default_rng(3)
    training = generator.integers(0, 1000, 100_000)
    search = search_for([training[i : i + 40] for i in range(0, 100_000, 40)])
    seen = read_through([search], [TrainingText(store([training]))], most=10_000)
    assert 0.09 < seen < 0.12
    found = np.flatnonzero(search.shares() > 0.9)
    assert 0.05 < len(found) / 2500 < seen
    assert found.min() < 100 and found.max() > 2300 and np.diff(found).max() < 60
