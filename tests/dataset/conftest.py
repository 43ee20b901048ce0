"""Fixtures of several files below."""

import pytest

from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.tokenizing.test_encoder import small_tokenizer


@pytest.fixture(scope="module")
def encoder():
    return DocumentEncoder(small_tokenizer())
