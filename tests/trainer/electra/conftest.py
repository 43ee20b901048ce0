import pytest

from tests.dataset.electra.test_electra_dataset import write_lines, write_vocab


@pytest.fixture(scope="package")
def data(tmp_path_factory):
    """{data_path, vocab_path} of a small corpus."""
    folder = tmp_path_factory.mktemp("electra")
    return {"data_path": write_lines(folder / "data.jsonl")[0], "vocab_path": write_vocab(folder / "vocab.txt")}
