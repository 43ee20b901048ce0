"""The embedded corpus and questions. Reference: the docstrings of the modules that this process has imported."""

import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dataset import embedded_corpus
from dataset.embedded_corpus import answers, build_embedded_corpus, build_embedded_questions, documents
from dataset.reading.conversations import text_of_conversation
from dataset.reading.documents import read_documents
from tests.helpers import records

# To read all modules of Python takes longer than a quick test may.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return build_embedded_corpus(tmp_path_factory.mktemp("corpus") / "python_docs.jsonl")


def test_it_is_english_and_holds_what_the_modules_document(corpus):
    texts = [text for _, text in read_documents(corpus)]
    assert 2.5e6 < corpus.stat().st_size < 5e6
    assert len(texts) == len(set(texts)) > 1000
    assert all(text == text.strip() and "\n\n\n\n" not in text for text in texts)
    assert sum(map(str.isascii, texts)) > 0.8 * len(texts), "English"
    everything = "\n".join(texts)
    assert "json.dumps(obj, *, skipkeys=False, ensure_ascii=True" in everything
    assert textwrap.indent(textwrap.dedent(textwrap.wrap.__doc__).strip(), "    ")[:60] in everything
    assert "numpy.ndarray.size\n" in everything and "numpy.linalg.matrix_power(a, n)\n" in everything
    assert np.linalg.matrix_power.__doc__.strip().splitlines()[0] in everything
    assert 'The "if" statement' in everything


def test_the_same_again_and_not_built_twice(corpus):
    assert list(documents()) == [text for _, text in read_documents(corpus)]
    before = corpus.stat()
    assert build_embedded_corpus(corpus) == corpus and corpus.stat() == before
    assert {file.name for file in corpus.parent.iterdir()} == {corpus.name, f".{corpus.name}.lock"}, "a temporary file"


def test_of_two_that_start_together_one_builds(tmp_path, monkeypatch):
    """As the ranks of a first torchrun do: a file that is replaced under a reader looks like an edit."""
    built = []
    monkeypatch.setattr(embedded_corpus, "documents", lambda: built.append(time.sleep(0.3)) or iter(["a text"]))
    with ThreadPoolExecutor(2) as pool:
        inodes = list(pool.map(lambda _: build_embedded_corpus(tmp_path / "docs.jsonl").stat().st_ino, range(2)))
    assert len(built) == 1 and inodes[0] == inodes[1]


def test_answers_are_first_sentences_of_documentation_and_stand_there_once_for_each_phrasing(tmp_path, monkeypatch):
    found = answers()
    monkeypatch.setattr(embedded_corpus, "answers", lambda: found)
    assert 1000 < len(found) < 4000
    assert found["str.join"] == str.join.__doc__.split("\n\n")[0]
    assert found["len"] == "Return the number of items in a container."
    assert textwrap.fill.__doc__.startswith(found["textwrap.fill"])
    assert all(answer[0].isupper() and "\n" not in answer for answer in found.values())
    assert not any("._" in name for name in found)
    chats = records(build_embedded_questions(tmp_path / "a.jsonl"), None)
    assert all(map(text_of_conversation, chats))
    turns = [[message["content"] for message in chat["conversations"]] for chat in chats]
    phrasings = embedded_corpus.PHRASINGS
    assert turns == [[phrasing.format(name), text] for name, text in found.items() for phrasing in phrasings]
