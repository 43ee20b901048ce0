"""scripts/quiz.py. Reference: a model that was trained until it knows the answers, and a fresh one, which knows none."""

import json

import pytest

from common.errors import DataError, UserError
from scripts import generate, quiz
from scripts.arguments import quiz_parser
from tests.chats import train, turn

PAIRS = [
    ("What is up?", "The sky. It is blue."),
    ("What is down?", "The ground."),
    ("What is left?", "The one side."),
    ("What is right?", "The other side."),
]


def write_pairs(path, pairs):
    with open(path, "w", encoding="utf-8") as file:
        for asked, said in pairs:
            file.write(json.dumps({"messages": [turn("user", asked), turn("assistant", said)]}) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(weight that knows the answers, one that does not, the questions)"""
    folder = tmp_path_factory.mktemp("quiz")
    data = write_pairs(folder / "chats.jsonl", PAIRS)
    options = {"data_path": data, "out_dir": folder, "hidden_size": 32, "batch_size": 4, "accumulation_steps": 1}
    train(**options, learning_rate=1e-2, epochs=80, log_interval=100)
    train(**options, save_weight="fresh", epochs=1)
    return folder / "full_sft_32.pth", folder / "fresh_32.pth", data


def run(weight, *arguments, capsys):
    assert quiz.main(["--weight", str(weight), "--device", "cpu", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_what_a_model_knows_is_counted_beside_its_base(trained, capsys):
    weight, fresh, data = trained
    shown = run(weight, "--data_path", data, "--base", fresh, "--show", "4", capsys=capsys)
    assert f"{weight}: 4 of 4 questions answered with the right first sentence" in shown
    assert f"{fresh}: 0 of 4 questions" in shown
    assert "? What is down?\n= The ground.\n" in shown


def test_the_first_sentence_decides(trained, tmp_path, capsys):
    """Another second sentence is as good; a wrong answer is shown with the right one."""
    weight, _, _ = trained
    other = [("What is up?", "The sky. It has clouds."), ("What is down?", "The floor.")]
    shown = run(weight, "--data_path", write_pairs(tmp_path / "other.jsonl", other), capsys=capsys)
    assert f"{weight}: 1 of 2 questions" in shown
    assert "? What is down?\n! The ground.\n  right: The floor.\n" in shown


def test_a_model_answers_in_chat_too(trained, capsys):
    weight, _, _ = trained
    arguments = ["--weight", str(weight), "--device", "cpu", "--chat", "--temperature", "0", "What is down?"]
    assert generate.main(arguments) == 0
    assert capsys.readouterr().out == "The ground.\n"


def test_questions_are_taken_evenly():
    assert quiz.evenly(range(100), 4) == [0, 25, 50, 75]
    assert quiz.evenly(range(3), 40) == [0, 1, 2]
    assert quiz_parser().parse_args([]).questions == 40


def test_data_without_a_question_is_refused(tmp_path):
    alone = tmp_path / "a.jsonl"
    alone.write_text(json.dumps({"messages": [turn("assistant", "Hi")]}) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="no question with an answer"):
        quiz.read_questions([str(alone)])
    alone.write_text("{}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a.jsonl:1: no 'conversations'"):
        quiz.read_questions([str(alone)])
    with pytest.raises(DataError, match="conversations are read from"):
        (tmp_path / "a.txt").write_text("words", encoding="utf-8")
        quiz.read_questions([str(tmp_path / "a.txt")])
