"""PretrainDataset. Reference: the public loader's arithmetic on one document, written out here by hand."""

import tracemalloc

import pytest
import torch
from torch.utils.data import DataLoader

from dataset.lm_dataset import PretrainDataset
from dataset.reading import faults
from dataset.reading.documents import DataError
from tests.dataset.reading.test_documents import FAULTS, HARMLESS
from tests.dataset.reading.test_documents import TEXTS as GOOD_TEXTS
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import write_texts


def test_items_are_inputs_targets_and_loss_mask(tmp_path):
    """A short, an exactly fitting, a long and an empty text: no EOS where the text is cut."""
    tokenizer = small_tokenizer(pad="<pad>")
    texts = ["the cat", "b" * 10, "c" * 11, "", "<s>the cat</s>"]
    dataset = PretrainDataset(write_texts(tmp_path / "a.jsonl", texts), tokenizer, max_length=12)
    assert len(dataset) == 5
    bos, eos, pad = 0, 1, 2
    for text, item in zip([*texts[:4], "the cat"], dataset, strict=True):
        ids = [bos, *tokenizer(text, add_special_tokens=False)["input_ids"], eos][:12]
        row = ids + [pad] * (12 - len(ids))
        expected = (row[:-1], row[1:], [1] * (len(ids) - 1) + [0] * (12 - len(ids)))
        assert [part.tolist() for part in item] == [list(part) for part in expected]
        assert all(part.dtype == torch.int64 and part.shape == (11,) for part in item)
    assert eos not in dataset[2][1].tolist() and dataset[1][1][-1] == eos
    assert dataset[-1][0].tolist() == dataset[4][0].tolist()
    with pytest.raises(IndexError):
        dataset[5]


@pytest.mark.parametrize("pad", [None, "</s>", "<s>"])
def test_mask_comes_from_the_length(tmp_path, pad):
    """Pad may be EOS, BOS or missing; every real token stays, EOS included."""
    tokenizer = small_tokenizer(pad=pad)
    dataset = PretrainDataset(write_texts(tmp_path / "a.jsonl", ["the cat"]), tokenizer, max_length=20)
    n = len(tokenizer("the cat", add_special_tokens=False)["input_ids"]) + 2
    x, y, mask = dataset[0]
    assert mask.tolist() == [1] * (n - 1) + [0] * (20 - n) and y[n - 2] == 1
    assert set(x[n:].tolist()) == {{None: 1, "</s>": 1, "<s>": 0}[pad]}


@pytest.mark.parametrize("kind", HARMLESS)
def test_harmless_kinds_load_identically(tmp_path, kind):
    """An empty text is an item of BOS and EOS here."""
    (tmp_path / "a.jsonl").write_bytes(HARMLESS[kind])
    clean = PretrainDataset(write_texts(tmp_path / "clean.jsonl", GOOD_TEXTS), small_tokenizer())
    dataset = PretrainDataset(tmp_path / "a.jsonl", small_tokenizer())
    assert len(dataset) == 3 + (kind == "empty text")
    for ours, expected in zip(list(dataset)[:3], clean, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_line_names_file_and_line(tmp_path, name):
    """With the number in the file, blank lines counted."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\r\n{"text": "good"}\n' + FAULTS[name][0])
    dataset = PretrainDataset(path, small_tokenizer())
    assert dataset[0][2].sum() > 0
    with pytest.raises(DataError, match="^" + str(path) + ":3: "):
        dataset[1]


def test_a_line_beyond_all_memory_is_not_held(tmp_path, monkeypatch):
    """It is a fault when it is asked for; the lines behind it keep their places."""
    monkeypatch.setattr(faults, "MAX_DOCUMENT_BYTES", 1000)
    path = write_texts(tmp_path / "a.jsonl", ["the cat", "x" * 30_000_000, "sat"])
    tracemalloc.start()
    dataset = PretrainDataset(path, small_tokenizer())
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    assert len(dataset) == 3 and dataset.text(2) == "sat"
    with pytest.raises(DataError, match=r"a\.jsonl:2: the line is longer than"):
        dataset[1]


@pytest.mark.parametrize(
    "name, data, reason",
    [("a.jsonl", b"\xef\xbb\xbf\r\n  \n", "no line"), ("a.txt", b"", "plain .jsonl"), ("a.jsonl", None, "no such")],
)
def test_a_file_that_is_none_is_one_line(tmp_path, name, data, reason):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=reason):
        PretrainDataset(tmp_path / name, small_tokenizer())


@pytest.mark.slow
def test_worker_processes_give_the_same_items(tmp_path):
    """Reference: the items of this process. It has used the tokenizer already, which is what makes forks delicate."""
    dataset = PretrainDataset(
        write_texts(tmp_path / "a.jsonl", [f"the cat {i}" for i in range(40)]), small_tokenizer(), 24
    )
    expected = [torch.stack(column) for column in zip(*dataset, strict=True)]
    loader = DataLoader(dataset, batch_size=7, num_workers=2)
    for ours, column in zip(zip(*loader, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(ours), column)
