"""Stores without copies. Reference: the store of a file from which the copies were taken out by hand."""

import random
import sys

import numpy as np
import pytest

from common.errors import DataError
from dataset.store import deduplicate
from dataset.store.deduplicate import notice_of, open_sources, stored_texts
from dataset.store.token_store import StoreWriter, open_or_build
from tests.dataset.quality.planted import changed, chinese, english
from tests.helpers import write_texts

ARRAYS = ("tokens", "offsets", "text_bytes", "doc_hash")


def texts_with_copies():
    """(texts, without copies to the letter, without near ones either)"""
    generator = random.Random(0)
    unlike = [english(generator) for _ in range(30)] + [chinese(generator) for _ in range(30)]
    exact = generator.sample(unlike, 20)
    near = [changed(text, generator, 0.85, 0.95) for text in generator.sample(unlike, 10)]
    return [*unlike, *exact, *near], [*unlike, *near], unlike


def is_store_of(store, texts, tmp_path, encoder):
    reference = open_or_build(write_texts(tmp_path / "reference.jsonl", texts), encoder, num_procs=1, progress=False)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(store, name), getattr(reference, name), err_msg=name)
    return True


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_copies_are_left_out_and_counted(tmp_path, encoder, monkeypatch):
    # Several blocks.
    monkeypatch.setattr(deduplicate, "BLOCK_TOKENS", 1000)
    copied = []
    add = StoreWriter.add
    monkeypatch.setattr(StoreWriter, "add", lambda self, block: copied.append(block.lengths) or add(self, block))
    texts, no_exact, no_near = texts_with_copies()
    path = write_texts(tmp_path / "a.jsonl", texts)
    (exact,) = open_sources([[path]], encoder, "exact", num_procs=1, progress=False)
    (near,) = open_sources([[path]], encoder, "near", num_procs=1, progress=False)
    assert all(lengths.sum() <= 1000 or len(lengths) == 1 for lengths in copied[1:]), "the first block is tokenised"
    assert is_store_of(exact, no_exact, tmp_path, encoder)
    assert is_store_of(near, no_near, tmp_path, encoder)
    assert exact.meta["left_out"] == {"documents": 90, "exact": 20}
    assert near.meta["left_out"] == {"documents": 90, "exact": 20, "near": 10}
    assert notice_of(exact).startswith("a: 20 of 90 documents (22.2%) are copies of earlier ones (20 to the letter)")
    assert "(20 to the letter, 10 nearly)" in notice_of(near)


def test_a_later_source_loses_what_an_earlier_one_has(tmp_path, encoder):
    first = write_texts(tmp_path / "a.jsonl", ["one text", "shared text"])
    second = write_texts(tmp_path / "b.jsonl", ["shared text", "other text", "other text"])
    stores = open_sources([[first], [second]], encoder, "exact", num_procs=1, progress=False)
    assert [len(store) for store in stores] == [2, 1]
    # By itself it keeps the shared text, so it is another store.
    (alone,) = open_sources([[second]], encoder, "exact", num_procs=1, progress=False)
    assert len(alone) == 2 and alone.fingerprint != stores[1].fingerprint
    turned = open_sources([[second], [first]], encoder, "exact", num_procs=1, progress=False)
    assert [len(store) for store in turned] == [2, 1]


def test_a_source_of_copies_alone_is_refused(tmp_path, encoder):
    first = write_texts(tmp_path / "a.jsonl", ["one text", "two"])
    second = write_texts(tmp_path / "b.jsonl", ["two"])
    with pytest.raises(DataError, match=r"b.jsonl: all 1 document are copies .* sources before it"):
        open_sources([[first], [second]], encoder, "exact", num_procs=1, progress=False)


def test_a_damaged_one_is_made_anew(tmp_path, encoder, capsys):
    path = write_texts(tmp_path / "a.jsonl", ["one text", "one text", "another"])
    (store,) = open_sources([[path]], encoder, "exact", num_procs=1, progress=False)
    expected = bytes_of(store.folder)
    (store.folder / "tokens.bin").write_bytes(b"\1" * store.tokens.nbytes)
    (again,) = open_sources([[path]], encoder, "exact", num_procs=1, progress=False)
    assert bytes_of(again.folder) == expected
    assert "is damaged" in capsys.readouterr().out


def test_texts_come_back_in_the_order_of_the_store(tmp_path, encoder):
    """Bad lines, empty texts and blank lines have no document."""
    lines = ['{"text": "one"}', "", "no json", '{"text": ""}', '{"text": "two"}', '{"text": "one"}']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    store = open_or_build(str(path), encoder, skip_bad_lines=True, num_procs=1, progress=False)
    found = list(stored_texts(store, [path], encoder, "text"))
    assert found == [(0, 1, "one"), (0, 5, "two"), (0, 6, "one")]
    path.write_text("\n".join(lines[:-1]))
    with pytest.raises(DataError, match="has changed since"):
        list(stored_texts(store, [path], encoder, "text"))


def test_near_without_the_library_is_told_before_anything_is_looked_at(tmp_path, encoder, monkeypatch):
    path = write_texts(tmp_path / "a.jsonl", ["one text"])
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(DataError, match="pip install rensa"):
        open_sources([[path]], encoder, "near", num_procs=1, progress=False)
    assert not (tmp_path / ".token_store").exists()
    assert len(open_sources([[path]], encoder, "exact", num_procs=1, progress=False)[0]) == 1
