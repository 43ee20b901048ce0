"""PretrainDataset. Reference: the public loader's arithmetic on one document, written out here by hand."""

import pytest
import torch

from dataset.lm_dataset import PretrainDataset
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import write_texts


@pytest.mark.parametrize("pad, pad_id", [("<pad>", 2), (None, 1), ("</s>", 1), ("<s>", 0)])
def test_items_are_inputs_targets_and_a_mask_by_the_length(tmp_path, pad, pad_id):
    """A short, a fitting and a long text: no EOS where it is cut. An empty one is no item. Pad may be EOS, BOS or missing."""
    tokenizer = small_tokenizer(pad=pad)
    texts = ["the cat", "b" * 10, "c" * 11, "", "<s>the cat</s>"]
    dataset = PretrainDataset(write_texts(tmp_path / "a.jsonl", texts), tokenizer, max_length=12)
    assert len(dataset) == 4
    bos, eos = 0, 1
    for text, item in zip([*texts[:3], "the cat"], dataset, strict=True):
        ids = [bos, *tokenizer(text, add_special_tokens=False)["input_ids"], eos][:12]
        row = ids + [pad_id] * (12 - len(ids))
        expected = (row[:-1], row[1:], [1] * (len(ids) - 1) + [0] * (12 - len(ids)))
        assert [part.tolist() for part in item] == [list(part) for part in expected]
        assert all(part.dtype == torch.int64 and part.shape == (11,) for part in item)
    spelt = write_texts(tmp_path / "spelt.jsonl", ["a</s>b"])
    _, targets, mask = PretrainDataset(spelt, tokenizer, 12, parse_special_tokens=True)[0]
    assert targets[mask == 1].tolist().count(eos) == 2
    assert eos not in dataset[2][1].tolist() and dataset[1][1][-1] == eos
    assert dataset[-1][0].tolist() == dataset[3][0].tolist()
    with pytest.raises(IndexError):
        dataset[4]
