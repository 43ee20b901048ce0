"""Induction heads. Reference: what two heads with the textbook's patterns do to a text that is said twice."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from model.config import ModelConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.pretrain.initial_model import init_model
from trainer.pretrain.settings import PretrainSettings


@pytest.mark.parametrize("shape", [(64, 2, 1, 1), (96, 2, 1, 1), (128, 4, 2, 1), (256, 3, 4, 2)])
def test_a_text_said_twice_is_expected_the_second_time(shape):
    """And only by these initial weights: other ones know nothing of it."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = ModelConfig(**dict(zip(names, shape, strict=True)))
    once = torch.randint(3, config.vocab_size, (2, 100), generator=torch.Generator().manual_seed(1))
    twice = torch.cat([once, once], dim=1)
    gained = {}
    for scheme in ("zero_out", "induction"):
        torch.manual_seed(1)
        model = init_model(MiniMindForCausalLM, config, "none", "out", scheme).eval()
        with torch.no_grad():
            # as large as embeddings are after a few updates
            model.lm_head.weight[:, :-1] *= 5
            losses = cross_entropy(model(twice).logits[:, :-1].mT, twice[:, 1:], reduction="none")
        gained[scheme] = losses[:, :99].mean() - losses[:, 100:].mean()
    assert gained["induction"] > 1 and abs(gained["zero_out"]) < 0.3


@pytest.mark.parametrize("words", [["--num_hidden_layers", "1"], ["--generation", "minimind3"]])
def test_models_that_cannot_are_refused_in_one_line(words, capsys):
    with pytest.raises(SystemExit):
        PretrainSettings.parse(["--init_scheme", "induction", *words])
    assert "induction is for" in capsys.readouterr().err
