"""--example_interval: what is shown of an example. Reference: a forward pass, token by token."""

import contextlib
from types import SimpleNamespace

import torch

from dataset.electra.electra_dataset import Batch
from dataset.tokenizing.wordpiece import load_wordpiece
from model.electra.masking import IGNORE
from tests.dataset.electra.test_electra_dataset import write_vocab
from tests.model.electra.test_model_electra import tiny
from trainer.electra.validation import SEED, look_at


def test_labels_and_predictions_are_those_of_the_networks(tmp_path):
    tokenizer = load_wordpiece(write_vocab(tmp_path / "vocab.txt"))
    ids = torch.tensor([[*tokenizer("the cat sat on a mat")["input_ids"], 0, 0]])
    length = ids.shape[1] - 2
    masked = ids.clone()
    masked[0, [2, 4]] = tokenizer.mask_token_id
    labels = torch.tensor([[ids[0, 2], ids[0, 4], IGNORE]])
    batch = Batch(ids, masked, torch.tensor([[2, 4, 0]]), labels, torch.zeros_like(ids), torch.tensor([length]))
    model = tiny(vocab_size=len(tokenizer)).train()
    engine = SimpleNamespace(device=torch.device("cpu"), model=model, autocast=contextlib.nullcontext)
    text, shown = look_at(engine, model, tokenizer, batch)
    assert model.training and text == tokenizer.decode(ids[0, :length])
    torch.manual_seed(SEED)
    found = model.eval()(*batch)
    written = tokenizer.convert_ids_to_tokens(found.corrupted[0, :length].tolist())
    original, corrupted, head, *rows, last = shown.splitlines()
    assert original == text and corrupted == tokenizer.decode(found.corrupted[0, :length])
    assert head.split() == ["position", "original", "generator", "label", "prediction", "probability"]
    by_place = {int(row.split()[0]): row.split()[1:] for row in rows}
    tokens = tokenizer.convert_ids_to_tokens(ids[0].tolist())
    right = 0
    for place, probability in enumerate(found.disc_logits[0, :length].sigmoid().tolist()):
        names = ["original", "replaced"]
        is_replaced, is_called = bool(found.replaced[0, place]), probability >= 0.5
        right += is_replaced == is_called
        wanted = [tokens[place], written[place]] if place in (2, 4) else [tokens[place]]
        wanted += [names[is_replaced], names[is_called], f"{probability:.2f}"]
        assert by_place.get(place) == (wanted if place in (2, 4) or is_called else None)
    assert (
        last
        == f"{int(found.replaced[0, :length].sum())} of {length} tokens are replaced; the discriminator is right on {right}"
    )
