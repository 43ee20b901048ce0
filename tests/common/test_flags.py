"""Every flag of every trainer: what is no number, beyond sense, empty or without effect is met where flags are read."""

import argparse

import pytest

from common.settings import SettingsParser
from dataset import tokenize_arguments
from trainer import train_tokenizer
from trainer.electra import settings as electra_settings
from trainer.glue import settings as glue_settings
from trainer.pretrain import settings as pretrain_settings

COMMANDS = {
    "train_pretrain.py": (pretrain_settings.parser, []),
    "train_electra.py": (electra_settings.parser, []),
    "train_glue.py": (glue_settings.parser, ["--task", "cola", "--data_dir", "glue"]),
    "train_tokenizer.py": (train_tokenizer.build_parser, ["--data_path", "data.txt", "--out_dir", "out"]),
    "tokenize_corpus.py": (tokenize_arguments.parser, ["--data_path", "data.txt"]),
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
            read = parser.get_settings if isinstance(parser, SettingsParser) else parser.parse_args
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


def test_one_text_of_several_may_not_be_empty_either():
    assert "--data_path" in refusal("train_pretrain.py", "--data_path", "a.jsonl", "")


def test_a_name_that_no_file_can_have_ends_the_command_in_a_line():
    line = refusal("train_pretrain.py", "--from_weight", "9" * 300)
    assert line.startswith("error: File name too long: ") and len(line) < 400


def test_a_share_of_nothing_is_not_masked():
    assert "--mask_share" in refusal("train_electra.py", "--mask_share", "0")
    assert refusal("train_electra.py", "--mask_share", "0.3") == ""


def test_a_number_of_layers_that_would_be_built_for_hours_is_refused():
    for command in ("train_pretrain.py", "train_electra.py"):
        assert "--num_hidden_layers" in refusal(command, "--num_hidden_layers", "100000")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--compare", "model", "--vocab_size", "900"], "--vocab_size has no effect: --compare trains nothing"),
        (["--compare", "model", "--weights", "2"], "--weights has no effect: --compare trains nothing"),
        (["--out_dir", "there", "--lower_case", "0"], "--lower_case has no effect: --type is bpe"),
        (
            ["--out_dir", "there", "--type", "wordpiece", "--max_token_bytes", "9"],
            "--max_token_bytes has no effect: --type is wordpiece",
        ),
    ],
)
def test_a_flag_that_the_kind_of_tokenizer_does_not_read_is_refused(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data.txt"
    data.write_text("some words\n", encoding="utf-8")
    assert train_tokenizer.main(["--data_path", str(data), *flags]) == 2
    assert message in capsys.readouterr().err
