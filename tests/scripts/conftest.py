"""What the tests of several scripts begin with."""

import pytest

from tests.helpers import tiny_model
from trainer.saving.weights import save_pth


@pytest.fixture(scope="module")
def weight(tmp_path_factory):
    """A .pth of first weights, with its .json beside it."""
    stem = tmp_path_factory.mktemp("out") / "pretrain_32"
    model = tiny_model(vocab_size=6400).eval()
    save_pth(model.state_dict(), model.config.to_dict(), stem)
    return f"{stem}.pth"
