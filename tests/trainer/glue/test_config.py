"""What a config must fit, and --dropout. References: the limits in the config; the same network in eval mode, which drops
nothing."""

import json
import re
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from common.errors import UserError
from dataset.glue.glue_tasks import TASKS
from tests.dataset.glue.test_glue_dataset import WORDS
from tests.model.public import change_config
from tests.trainer.glue.glue_helpers import flags, make_place
from tests.trainer.glue.test_padding import FAMILIES
from trainer.glue.config import check_config, dropouts_of, read_config
from trainer.glue.model import init_model


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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("place"))


def test_a_config_with_too_few_positions_or_entries_is_refused(place):
    """One more than there are."""
    config = config_of("bert")
    most = flags(place, max_seq_len=config.max_position_embeddings)
    check_config(config, most, config.vocab_size)
    with pytest.raises(
        UserError, match=f"vocab_size is {config.vocab_size}, not {config.vocab_size + 1}: its tokenizer"
    ):
        check_config(config, most, config.vocab_size + 1)
    longer = flags(place, max_seq_len=most.max_seq_len + 1)
    with pytest.raises(UserError, match=r"max_position_embeddings is (\d+), not \d+: a lower --max_seq_len is wanted"):
        check_config(config, longer, config.vocab_size)
    # It counts from one token to another, and has no table.
    config.max_position_embeddings = -1
    check_config(config, longer, config.vocab_size)


def test_a_config_has_the_classes_of_its_task(place, tmp_path):
    """Those of a classifier that is evaluated as it is must be in the same order."""
    task = TASKS["rte"]
    config = read_config(flags(place), task, place / "tiny", len(WORDS))
    assert list(config.id2label.values()) == list(task.labels) and config.problem_type == "single_label_classification"
    config.id2label = dict(enumerate(reversed(task.labels)))
    config.save_pretrained(tmp_path)
    assert read_config(flags(place), task, tmp_path, len(WORDS)).id2label == dict(enumerate(task.labels))
    with pytest.raises(UserError, match="its classes are .*, in another order than"):
        read_config(flags(place, do_train=False), task, tmp_path, len(WORDS))


@pytest.mark.parametrize("divisor", [None, "x", 0, -5, True, float("nan"), float("inf"), 10**400, [5]])
def test_a_divisor_that_scores_cannot_have_is_refused(place, tmp_path, divisor):
    """A model that is evaluated as it is has its own; one that is trained gets that of the flag."""
    task = TASKS["stsb"]
    read_config(flags(place), task, place / "tiny", len(WORDS)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "score_divisor": divisor}))
    with pytest.raises(
        UserError, match=f"^--model_path {re.escape(str(place))}.*: score_divisor is .*, a number above 0"
    ):
        read_config(flags(place, do_train=False), task, tmp_path, len(WORDS))
    assert read_config(flags(place, score_divisor=5.0), task, tmp_path, len(WORDS)).score_divisor == 5
    path.write_text(json.dumps({**json.loads(path.read_text()), "score_divisor": 5}))
    assert read_config(flags(place, do_train=False), task, tmp_path, len(WORDS)).score_divisor == 5


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000, and at most 2,000 layers are built"),
        ({"intermediate_size": 10**9}, "asks for [0-9,]+ numbers or more"),
    ],
)
def test_an_encoder_that_its_weights_cannot_hold_is_not_built(place, tmp_path, changes, message):
    task = TASKS["rte"]
    shutil.copytree(place / "tiny", tmp_path / "tiny")
    change_config(tmp_path / "tiny", **changes)
    with pytest.raises(UserError, match=message):
        init_model(flags(place), task, tmp_path / "tiny", len(WORDS))
