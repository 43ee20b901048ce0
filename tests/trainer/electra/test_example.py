"""trainer/electra/example.py: what is shown of an example. Reference: a forward pass, token by token."""

import pytest
import torch

from dataset.electra.electra_dataset import Batch
from dataset.tokenizing.wordpiece import load_wordpiece
from model.electra.detection import usual_threshold
from model.electra.masking import IGNORE
from tests.dataset.electra.test_electra_dataset import write_vocab
from tests.model.electra.test_model_electra import tiny
from trainer.electra.example import example_lines


@pytest.mark.parametrize("threshold", [None, 0.0, 0.499, 0.9])
def test_labels_and_predictions_are_those_of_the_networks(tmp_path, threshold):
    tokenizer = load_wordpiece(write_vocab(tmp_path / "vocab.txt"))
    text = "the cat sat on a mat"
    ids = torch.tensor([[*tokenizer(text)["input_ids"], 0, 0]])
    length = ids.shape[1] - 2
    masked = ids.clone()
    masked[0, [2, 4]] = tokenizer.mask_token_id
    positions = torch.tensor([[2, 4, 0]])
    labels = torch.tensor([[ids[0, 2], ids[0, 4], IGNORE]])
    batch = Batch(ids, masked, positions, labels, torch.zeros_like(ids), torch.tensor([length]))
    model = tiny(vocab_size=len(tokenizer)).eval()
    dog = tokenizer.convert_tokens_to_ids("dogs")
    # The first masked token is replaced, the second one is drawn as it was.
    found = model(*batch, sampled=torch.tensor([[dog, int(ids[0, 4]), 7]]))
    _, *rows, last = example_lines(tokenizer, batch, found, threshold).splitlines()
    assert rows[0].split() == ["position", "original", "generator", "label", "prediction", "probability"]
    by_place = {int(row.split()[0]): row.split()[1:] for row in rows[1:]}
    probabilities = found.disc_logits[0].sigmoid().tolist()
    tokens = tokenizer.convert_ids_to_tokens(ids[0].tolist())
    if threshold is None:
        threshold = usual_threshold(probabilities[:length])
    right = 0
    for place in range(length):
        doubted = probabilities[place] >= threshold
        right += doubted == (place == 2)
        if place not in (2, 4) and not doubted:
            assert place not in by_place
            continue
        written = {2: ["dogs"], 4: [tokens[4]]}.get(place, [])
        label = "replaced" if place == 2 else "original"
        prediction = "replaced" if doubted else "original"
        assert by_place[place] == [tokens[place], *written, label, prediction, f"{probabilities[place]:.2f}"]
    assert (
        last
        == f"1 of {length} tokens are replaced; the discriminator is right on {right} (replaced: from {threshold:.2f} on)"
    )
    assert "dogs" in example_lines(tokenizer, batch, found, threshold).splitlines()[0]
