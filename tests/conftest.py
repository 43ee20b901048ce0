"""Fixtures of several test files, and their order."""

from collections import Counter

import pytest

from dataset.tokenizing.encoder import load_tokenizer
from tests.helpers import ROOT, write_corpus


def pytest_collection_modifyitems(items):
    """Files with many slow tests come first: a long one that begins last would leave the other processes of `make test-all` idle."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    # The tests of a file stay together, since files with as many keep their order.
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(ROOT / "model")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A small corpus, with its token store beside it once a run has used it."""
    return write_corpus(tmp_path_factory.mktemp("data") / "data.jsonl")
