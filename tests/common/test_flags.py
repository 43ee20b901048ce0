"""Every flag of every trainer: what is no number, beyond sense, empty or without effect is met where flags are read."""

import argparse
from functools import partial

import pytest

from common.settings import SettingsParser
from dataset import tokenize_corpus
from trainer import train_tokenizer
from trainer.electra.settings import ElectraSettings
from trainer.glue.settings import GlueSettings
from trainer.pretrain.settings import PretrainSettings

COMMANDS = {
    "train_pretrain.py": (partial(SettingsParser, PretrainSettings), []),
    "train_electra.py": (partial(SettingsParser, ElectraSettings), []),
    "train_glue.py": (partial(SettingsParser, GlueSettings), ["--task", "cola", "--data_dir", "glue"]),
    "train_tokenizer.py": (
        partial(SettingsParser, train_tokenizer.TokenizerSettings),
        ["--data_path", "data.txt", "--out_dir", "out"],
    ),
    "tokenize_corpus.py": (partial(SettingsParser, tokenize_corpus.TokenizeSettings), ["--data_path", "data.txt"]),
}
NOT_A_NUMBER = ("nan", "inf", "-inf", "-2", "1e300", "1" + "0" * 30, "٣x", "9" * 5000)
# The model begins by itself; run.py's, which are passed over.
EMPTY_MEANS_SOMETHING = ("--sample_prompts", "--server_ip", "--server_port")


def refusal(command: str, *flags: str) -> str:
    """The line with which the parser ends; "" where it takes the flags."""
    build, required = COMMANDS[command]
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda text, **_: lines.append(text))
        try:
            parser = build()
            read = parser.read if isinstance(parser, SettingsParser) else parser.parse_args
            read([*required, *flags])
        except SystemExit as stop:
            assert stop.code == 2
            (line,) = lines
            return line
    return ""


def options(command: str) -> list[argparse.Action]:
    """The flags that take a value and leave it to the user which."""
    actions = COMMANDS[command][0]()._actions
    return [action for action in actions if action.option_strings and not action.choices and action.nargs != 0]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_numeric_flag_takes_nan_infinity_a_negative_or_an_absurd_number(command):
    tried = 0
    for action in options(command):
        takes_text = action.type in (None, str) or action.dest in (
            "text_suffixes",
            "local_rank",
            "shard",
            "save_weight",
        )
        if takes_text or action.nargs == "?":
            continue
        for value in NOT_A_NUMBER:
            line = refusal(command, f"{action.option_strings[0]}={value}")
            assert action.option_strings[0] in line, (action.option_strings[0], value)
            assert len(line) < 400
            tried += 1
    assert tried


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_text_is_what_an_unset_variable_leaves_and_is_refused(command):
    for action in options(command):
        flag = action.option_strings[0]
        if flag in EMPTY_MEANS_SOMETHING:
            assert refusal(command, flag, "") == ""
        else:
            assert flag in refusal(command, flag, ""), flag


@pytest.mark.parametrize(
    "command, typed, meant",
    [
        ("train_pretrain.py", "--batch-size", "--batch_size"),
        ("train_pretrain.py", "--lr", "--learning_rate"),
        ("train_electra.py", "--max_iters", "--max_steps"),
        ("train_pretrain.py", "--budgt", "--budget"),
    ],
)
def test_a_flag_of_other_habits_or_with_a_slip_names_the_one_that_is_meant(command, typed, meant):
    assert f"unrecognized arguments: {typed} 8; did you mean {meant}? (" in refusal(command, typed, "8")
