"""model/plain.py, the page to read, and the model on its plain path: the same bits."""

import dataclasses

import pytest
import torch

from model.loss import chunked_cross_entropy
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.plain import Config, MiniMind


@pytest.mark.parametrize("generation", ["minimind2", "minimind3"])
def test_plain_has_the_bits_of_the_model(generation):
    """Names, initial weights and random state; then the loss and every gradient, with several documents in a row and padding."""
    config = MiniMindConfig(generation=generation, vocab_size=97, hidden_size=64, num_hidden_layers=2)
    torch.manual_seed(0)
    model = MiniMindForCausalLM(config)
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    plain = MiniMind(Config(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert list(plain.state_dict()) == list(model.state_dict())

    input_ids, targets = torch.randint(0, 97, (2, 3, 20))
    document_ids = torch.arange(20).div(7, rounding_mode="floor").repeat(3, 1)
    position_ids = torch.arange(20).remainder(7).repeat(3, 1)
    document_ids[1, 14:] = -1
    targets[1, 14:] = -100
    loss, _ = model.training_losses(input_ids, targets, document_ids, position_ids)
    hidden = plain(input_ids, document_ids, position_ids).flatten(0, 1)
    plain_loss = chunked_cross_entropy(hidden, plain.lm_head.weight, targets.flatten())
    (loss / 7).backward()
    (plain_loss / 7).backward()
    ours, theirs = ({name: (p, p.grad) for name, p in net.named_parameters()} for net in (plain, model))
    # The same bits: a failure says how far apart they are.
    torch.testing.assert_close((plain_loss, ours), (loss, theirs), rtol=0, atol=0)
