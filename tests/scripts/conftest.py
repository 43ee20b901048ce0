"""What the tests of several scripts begin with."""

import pytest

from tests.helpers import write_weights
from tests.scripts.playground.pages import played_model, serving
from tests.trainer.reporting.test_html_report import metrics_file


@pytest.fixture(scope="module")
def weight(tmp_path_factory):
    """A .pth of first weights, with its .json beside it."""
    return write_weights(tmp_path_factory.mktemp("out") / "pretrain_32", vocab_size=6400)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """play.py's, with a tiny model and a run."""
    folder = tmp_path_factory.mktemp("out")
    metrics_file(folder / "run.metrics.jsonl", n=5)
    with serving(played_model(), folder) as server:
        yield server
