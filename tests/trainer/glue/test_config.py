"""--dropout. Reference: the same network in eval mode, which drops nothing."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.trainer.glue.test_padding import FAMILIES
from trainer.glue.config import dropouts_of


def config_of(family):
    return AutoConfig.for_model(family, **FAMILIES[family])


# A family for each set of names that configs have for it
NAMES = {tuple(sorted(dropouts_of(config_of(family)))): family for family in FAMILIES}


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(NAMES.values()))
def test_all_dropout_of_a_network_is_what_is_asked_for(family):
    """With 0 nothing is dropped, with more something is."""
    found = {}
    for share in (0.0, 0.5):
        config = config_of(family)
        for name in dropouts_of(config):
            setattr(config, name, share)
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        ids = torch.arange(5, 29)[None]
        trained, evaluated = model.train()(ids).logits, model.eval()(ids).logits
        found[share] = float((trained - evaluated).abs().max())
    assert found[0.0] < 1e-5 and found[0.5] > 1e-4


def test_switches_and_fields_that_another_one_decides_are_left():
    assert dropouts_of(config_of("esm")) == ["hidden_dropout_prob", "attention_probs_dropout_prob"]
    assert "classifier_dropout" not in dropouts_of(config_of("bert"))
