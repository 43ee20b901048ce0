"""What the tests of several scripts begin with."""

import pytest

from tests.helpers import write_weights


@pytest.fixture(scope="module")
def weight(tmp_path_factory):
    """A .pth of first weights, with its .json beside it."""
    return write_weights(tmp_path_factory.mktemp("out") / "pretrain_32", vocab_size=6400)
