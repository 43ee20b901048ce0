"""Fixtures of several files below."""

import pytest

from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.tokenizing.test_encoder import small_tokenizer


@pytest.fixture(scope="module")
def encoder():
    return DocumentEncoder(small_tokenizer())


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
