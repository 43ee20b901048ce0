"""Every flag of every trainer: what is no number, beyond sense, empty or without effect is met where flags are read."""

import argparse

import pytest

from tests.test_commands import PARSERS

# {script: the flags that it wants}
COMMANDS = {
    "trainer/train_pretrain.py": [],
    "trainer/train_electra.py": [],
    "trainer/train_glue.py": ["--task", "cola", "--data_dir", "glue"],
    "trainer/train_tokenizer.py": ["--data_path", "data.txt", "--out_dir", "out"],
    "scripts/inspect_data.py": ["--data_path", "data.txt"],
}
NOT_A_NUMBER = ("nan", "inf", "-inf", "-2", "1e300", "1" + "0" * 30, "٣x", "9" * 5000)
# The model begins by itself; run.py's, which are ignored.
EMPTY_MEANS_SOMETHING = ("--sample_prompts", "--server_ip", "--server_port")


def refusal(command: str, *flags: str) -> str:
    """The line with which the parser ends; "" where it takes the flags."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda text, **_: lines.append(text))
        try:
            PARSERS[command]().read([*COMMANDS[command], *flags])
        except SystemExit as stop:
            assert stop.code == 2
            (line,) = lines
            return line
    return ""


def options(command: str) -> list[argparse.Action]:
    """The flags that take a value and leave it to the user which."""
    actions = PARSERS[command]()._actions
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
        ("trainer/train_pretrain.py", "--batch-size", "--batch_size"),
        ("trainer/train_pretrain.py", "--lr", "--learning_rate"),
        ("trainer/train_electra.py", "--max_iters", "--max_steps"),
        ("trainer/train_pretrain.py", "--budgt", "--budget"),
    ],
)
def test_a_flag_of_other_habits_or_with_a_slip_names_the_one_that_is_meant(command, typed, meant):
    assert f"unrecognized arguments: {typed} 8; did you mean {meant}? (" in refusal(command, typed, "8")
