"""Fixtures of several files below."""

import pytest

from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.s3_server import running_s3_server


@pytest.fixture(scope="module")
def encoder():
    return DocumentEncoder(small_tokenizer())


@pytest.fixture(scope="module")
def s3():
    with running_s3_server() as server:
        yield server
