"""The embedded corpus. Reference: the docstrings of the modules that this process has imported."""

import json
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dataset import embedded_corpus
from dataset.embedded_corpus import build_embedded_corpus, documents
from dataset.reading.documents import read_documents


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return build_embedded_corpus(tmp_path_factory.mktemp("corpus") / "python_docs.jsonl")


def test_size_and_form(corpus):
    texts = [text for _, text in read_documents(corpus)]
    assert 2.5e6 < corpus.stat().st_size < 5e6
    assert len(texts) == len(set(texts)) > 1000
    assert all(text == text.strip() and "\n\n\n\n" not in text for text in texts)
    assert sum(map(str.isascii, texts)) > 0.8 * len(texts), "English"
    assert all(list(json.loads(line)) == ["text"] for line in corpus.read_text(encoding="utf-8").splitlines()[:20])


def test_holds_what_the_modules_document(corpus):
    everything = "\n".join(text for _, text in read_documents(corpus))
    assert "json.dumps(obj, *, skipkeys=False, ensure_ascii=True" in everything
    assert textwrap.indent(textwrap.dedent(textwrap.wrap.__doc__).strip(), "    ")[:60] in everything
    assert "numpy.ndarray.size\n" in everything and "numpy.linalg.matrix_power(a, n)\n" in everything
    assert np.linalg.matrix_power.__doc__.strip().splitlines()[0] in everything
    assert 'The "if" statement' in everything


@pytest.mark.slow
def test_the_same_again_and_not_built_twice(corpus):
    assert list(documents()) == [text for _, text in read_documents(corpus)]
    before = corpus.stat()
    assert build_embedded_corpus(corpus) == corpus and corpus.stat() == before
    left = {file.name for file in corpus.parent.iterdir()}
    assert left == {corpus.name, f".{corpus.name}.lock"}, "no temporary file is left"


def test_of_two_that_start_together_one_builds(tmp_path, monkeypatch):
    """As the ranks of a first torchrun do: a file that is replaced under a reader looks like an edit."""
    built = []
    monkeypatch.setattr(embedded_corpus, "documents", lambda: built.append(time.sleep(0.3)) or iter(["a text"]))
    with ThreadPoolExecutor(2) as pool:
        inodes = list(pool.map(lambda _: build_embedded_corpus(tmp_path / "docs.jsonl").stat().st_ino, range(2)))
    assert len(built) == 1 and inodes[0] == inodes[1]
