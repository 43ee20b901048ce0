"""The flags of a budget. Reference: what they mean in words."""

import argparse
from dataclasses import replace

import pytest

from trainer.pretrain.settings import PretrainSettings, seconds_of


def test_times():
    for text, seconds in (("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5m", 90)):
        assert seconds_of(text) == seconds
    for text in ("", "10", "-5m", "5s", "1m1h", "nan", "9999999h"):
        with pytest.raises(argparse.ArgumentTypeError):
            seconds_of(text)


def test_what_the_user_has_said(tmp_path):
    """By flags, in both spellings of a value, by an alias, and by --config; defaults are not among it."""
    config = tmp_path / "a.yaml"
    config.write_text("hidden_size: 64\ndevice:\n")
    argv = ["--batch_size", "4", "--epochs=2", "--save_dir", "x", "--use_moe", "--config", str(config)]
    settings = replace(PretrainSettings.parse(argv), hidden_size=32, seed=1)
    assert settings.user_set == {"batch_size", "epochs", "out_dir", "use_moe", "hidden_size"}
    assert PretrainSettings.parse([]).user_set == frozenset()
