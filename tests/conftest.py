"""Fixtures of several test files."""

import pytest

from tests.helpers import write_corpus


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A small corpus, with its token store beside it once a run has used it."""
    return write_corpus(tmp_path_factory.mktemp("data") / "data.jsonl")
