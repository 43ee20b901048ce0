"""Where the shape of a model comes from, of which --from_weight names the weights."""

import json

from trainer.pretrain.settings import PretrainSettings
from trainer.sft.settings import SftSettings

SHAPE = {"generation": "minimind3", "hidden_size": 96, "num_hidden_layers": 2, "use_moe": False}
SHAPE |= {"num_attention_heads": 3, "num_key_value_heads": 1}


def weight(folder):
    """A .pth whose content nobody looks at, and the .json beside it."""
    path = folder / "pretrain_96.pth"
    path.touch()
    path.with_suffix(".json").write_text(json.dumps(SHAPE))
    return path


def shape_of(settings):
    return {name: getattr(settings, name) for name in SHAPE}


def test_the_shape_is_that_of_the_json_beside_the_weight(tmp_path):
    path = weight(tmp_path)
    assert shape_of(PretrainSettings.parse(["--from_weight", str(path)])) == SHAPE
    # By a name in --out_dir, as MiniMind has it
    named = ["--from_weight", "pretrain", "--hidden_size", "96", "--out_dir", str(tmp_path)]
    assert shape_of(SftSettings.parse(named)) == SHAPE


def test_a_flag_wins_over_the_json(tmp_path):
    settings = PretrainSettings.parse(["--from_weight", str(weight(tmp_path)), "--num_hidden_layers", "5"])
    assert settings.num_hidden_layers == 5 and settings.hidden_size == 96
