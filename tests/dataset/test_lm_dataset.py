"""PretrainDataset. Reference: the public loader's arithmetic on one document, written out here by hand."""

import pytest
import torch

from dataset.lm_dataset import PretrainDataset
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import write_texts


def test_items_are_inputs_targets_and_loss_mask(tmp_path):
    """A short, an exactly fitting and a long text: no EOS where the text is cut. An empty one is no item."""
    tokenizer = small_tokenizer(pad="<pad>")
    texts = ["the cat", "b" * 10, "c" * 11, "", "<s>the cat</s>"]
    dataset = PretrainDataset(write_texts(tmp_path / "a.jsonl", texts), tokenizer, max_length=12)
    assert len(dataset) == 4
    bos, eos, pad = 0, 1, 2
    for text, item in zip([*texts[:3], "the cat"], dataset, strict=True):
        ids = [bos, *tokenizer(text, add_special_tokens=False)["input_ids"], eos][:12]
        row = ids + [pad] * (12 - len(ids))
        expected = (row[:-1], row[1:], [1] * (len(ids) - 1) + [0] * (12 - len(ids)))
        assert [part.tolist() for part in item] == [list(part) for part in expected]
        assert all(part.dtype == torch.int64 and part.shape == (11,) for part in item)
    spelt = write_texts(tmp_path / "spelt.jsonl", ["a</s>b"])
    assert PretrainDataset(spelt, tokenizer, 12, parse_special_tokens=True)[0][1].tolist().count(eos) == 2
    assert eos not in dataset[2][1].tolist() and dataset[1][1][-1] == eos
    assert dataset[-1][0].tolist() == dataset[3][0].tolist()
    with pytest.raises(IndexError):
        dataset[4]


@pytest.mark.parametrize("pad", [None, "</s>", "<s>"])
def test_mask_comes_from_the_length(tmp_path, pad):
    """Pad may be EOS, BOS or missing; every real token stays, EOS included."""
    tokenizer = small_tokenizer(pad=pad)
    dataset = PretrainDataset(write_texts(tmp_path / "a.jsonl", ["the cat"]), tokenizer, max_length=20)
    n = len(tokenizer("the cat", add_special_tokens=False)["input_ids"]) + 2
    x, y, mask = dataset[0]
    assert mask.tolist() == [1] * (n - 1) + [0] * (20 - n) and y[n - 2] == 1
    assert set(x[n:].tolist()) == {{None: 1, "</s>": 1, "<s>": 0}[pad]}
