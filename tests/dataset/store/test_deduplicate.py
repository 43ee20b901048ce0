"""Documents that are copies. Reference: the texts from which the copies were taken out by hand."""

import sys

import pytest

from common.errors import DataError
from dataset.corpus import Corpus
from dataset.reading.settings import TextSettings
from dataset.store.build import open_or_build
from dataset.store.deduplicate import stored_texts
from tests.dataset.quality.planted import planted
from tests.helpers import write_texts


def corpus_of(paths, encoder, method, **options):
    return Corpus(paths, encoder, max_seq_len=32, seed=1, deduplicate=method, progress=False, **options)


def texts_of(corpus, encoder):
    return [encoder.decode(corpus.store.document(i).tolist()) for i in corpus.documents]


def test_copies_are_left_out_and_counted(tmp_path, encoder):
    unlike, copies, alike = planted(30, 20, 10, lowest=0.85)
    path = write_texts(tmp_path / "a.jsonl", [*unlike, *copies, *alike])
    exact = corpus_of([path], encoder, "exact")
    near = corpus_of([path], encoder, "near")
    for corpus, wanted in ((exact, [*unlike, *alike]), (near, unlike)):
        by_hand = corpus_of([write_texts(tmp_path / "b.jsonl", wanted)], encoder, "none")
        assert texts_of(corpus, encoder) == texts_of(by_hand, encoder)
    said = "a: 20 of 90 documents (22.2%) are copies of earlier ones (20 exact) and are left out"
    assert said in exact.notices and any("(20 exact, 10 near)" in line for line in near.notices)
    assert len({corpus.fingerprint for corpus in (exact, near, corpus_of([path], encoder, "none"))}) == 3


def test_a_later_source_loses_what_an_earlier_one_has(tmp_path, encoder):
    first = write_texts(tmp_path / "a.jsonl", ["one text", "shared text"])
    second = write_texts(tmp_path / "b.jsonl", ["shared text", "other text", "other text"])
    assert corpus_of([f"{first}:1", f"{second}:1"], encoder, "exact").documents.tolist() == [0, 1, 3]
    assert corpus_of([second], encoder, "exact").documents.tolist() == [0, 1]
    assert corpus_of([f"{second}:1", f"{first}:1"], encoder, "exact").documents.tolist() == [0, 1, 3]
    copies = write_texts(tmp_path / "c.jsonl", ["one text"])
    with pytest.raises(DataError, match=r"c.jsonl has a share but no document to draw: .* copies"):
        corpus_of([f"{first}:1", f"{copies}:1"], encoder, "exact")


def test_line_ends_and_outer_blanks_make_no_other_text(tmp_path, encoder):
    ends = [("\n", ""), ("\r\n", " "), ("\r", "\n\n"), ("\n", "\u3000")]
    texts = [[f"the cat {i}\nsat on\n\na mat".replace("\n", end) + blank for i in range(200)] for end, blank in ends]
    paths = [write_texts(tmp_path / f"{number}.jsonl", of_file) for number, of_file in enumerate(texts)]
    assert corpus_of(paths, encoder, "exact").documents.tolist() == list(range(200))
    held_out = corpus_of(paths, encoder, "none", val_fraction=0.1).val_documents.reshape(4, -1)
    assert held_out.shape[1] > 10 and (held_out % 200 == held_out[0]).all()
    with pytest.raises(DataError, match="all of it .200 documents. is in the training data too"):
        corpus_of(paths[:1], encoder, "none", val_path=paths[1])


def test_near_copies_are_remembered_and_damage_is_noticed(tmp_path, encoder, monkeypatch):
    path = write_texts(tmp_path / "a.jsonl", sum(planted(30, 20, 10, lowest=0.85), []))
    expected = corpus_of([path], encoder, "near").documents.tolist()
    (known,) = (tmp_path / ".token_store").glob("a-near-*.npz")
    content = known.read_bytes()
    for damaged in (content.replace(b"\1", b"\0"), content[:-100], b""):
        known.write_bytes(damaged)
        assert corpus_of([path], encoder, "near").documents.tolist() == expected and known.read_bytes() == content
    # Found in either folder, though neither can be written to by now.
    for name in ("near_copies", "first_writable"):
        monkeypatch.setattr(f"dataset.store.deduplicate.{name}", None)
    assert corpus_of([path], encoder, "near").documents.tolist() == expected
    other = tmp_path / "xdg" / "minimind" / "token_store"
    other.mkdir(parents=True)
    known.rename(other / known.name)
    assert corpus_of([path], encoder, "near").documents.tolist() == expected


def test_texts_come_back_in_the_order_of_the_store(tmp_path, encoder):
    """Bad lines, empty texts and blank lines have no document."""
    lines = ['{"text": "one"}', "", "no json", '{"text": ""}', '{"text": "two"}', '{"text": "one"}']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    store = open_or_build(str(path), encoder, TextSettings(skip_bad_lines=True), num_procs=1, progress=False)
    assert [*stored_texts(store, [path], encoder, "text")] == [(0, 1, "one"), (0, 5, "two"), (0, 6, "one")]
    path.write_text("\n".join(lines[:-1]))
    with pytest.raises(DataError, match="has changed since"):
        list(stored_texts(store, [path], encoder, "text"))


def test_near_without_the_library_is_told_before_anything_is_looked_at(tmp_path, encoder, monkeypatch):
    path = write_texts(tmp_path / "a.jsonl", ["one text"])
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(DataError, match="pip install rensa"):
        corpus_of([path], encoder, "near")
    assert not (tmp_path / ".token_store").exists()
    assert len(corpus_of([path], encoder, "exact").documents) == 1
