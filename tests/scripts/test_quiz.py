"""scripts/quiz.py. Reference: a model that was trained until it knows the answers, and a fresh one, which knows none."""

import json
from types import SimpleNamespace

import pytest
import torch

from common.errors import DataError, UserError
from dataset.chat.encoder import ChatEncoder
from dataset.tokenizing.encoder import load_tokenizer
from model.config import MiniMindConfig
from scripts import generate, quiz
from scripts.arguments import quiz_parser
from tests.chats import ids_and_mask, train, turn
from tests.helpers import ROOT

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


def test_a_base_that_is_not_there_is_told_before_any_question(trained):
    """As the weight itself is."""
    weight, _, data = trained
    with pytest.raises(UserError, match="nowhere.pth: no such file; there (is|are) "):
        quiz.main(["--weight", str(weight), "--data_path", str(data), "--base", str(weight.with_name("nowhere.pth"))])


def test_questions_are_taken_evenly():
    assert quiz.evenly(range(100), 4) == [0, 25, 50, 75]
    assert quiz.evenly(range(3), 40) == [0, 1, 2]
    assert quiz_parser().parse_args([]).questions == 40


WEATHER = {"name": "weather", "parameters": {}}
LONG_CONVERSATION = {
    "tools": [WEATHER],
    "messages": [
        turn("system", "Be short."),
        turn("user", "Rain?"),
        turn("assistant", "", reasoning_content="I must look.", tool_calls=[{"name": "weather", "arguments": {}}]),
        turn("tool", "dry"),
        turn("assistant", "No.", reasoning_content="It is dry. So no."),
    ],
}


def asked(question, monkeypatch, answered, positions=1000):
    """(the ids that the model is asked with, the most tokens of its answer, the Reply) where it answers with these ids."""
    tokenizer = load_tokenizer(ROOT / "model")
    calls = []

    def generated(model, tokenizer, ids, sampling):
        calls.append((ids, sampling.max_new_tokens))
        return torch.tensor([[*ids, *answered]])

    monkeypatch.setattr(quiz, "generate", generated)
    model = SimpleNamespace(config=MiniMindConfig(max_position_embeddings=positions))
    reply = quiz.ask(model, tokenizer, ChatEncoder(tokenizer), question)
    return (*calls[0], reply) if calls else (None, None, reply)


def test_a_conversation_is_asked_whole_and_thoughts_are_no_answer(tmp_path, monkeypatch):
    """Tools, calls and thoughts stand in the question. Reference: a plain reading of the template, up to the last answer."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(LONG_CONVERSATION) + "\n", encoding="utf-8")
    ((question,), _) = quiz.read_questions([str(path)])
    ids, mask = ids_and_mask(load_tokenizer(ROOT / "model"), LONG_CONVERSATION)
    end = max(at for at, is_trained in enumerate(mask) if is_trained)
    begin = max(at for at in range(end) if not mask[at]) + 1
    found, most, reply = asked(question, monkeypatch, ids[begin : end + 1])
    assert found == ids[:begin]
    assert most > len(ids[begin : end + 1])
    assert reply.is_right and reply.text.strip() == "No."
    # Other thoughts with the same answer, and an answer that was only thought of
    other = load_tokenizer(ROOT / "model")("Wet. </think> \n\nNo.", add_special_tokens=False).input_ids
    assert asked(question, monkeypatch, other)[2].is_right
    thought = load_tokenizer(ROOT / "model")("No. It is dry.</think>Yes.", add_special_tokens=False).input_ids
    assert not asked(question, monkeypatch, thought)[2].is_right


def test_what_does_not_fit_the_model_is_not_asked(trained, tmp_path, monkeypatch, capsys):
    """It fits to the last position and not with one less; what was left out is said."""
    question = quiz.Question([turn("user", "What is up?")], [], turn("assistant", "The sky."))
    ids, most, _ = asked(question, monkeypatch, [])
    assert asked(question, monkeypatch, [], positions=len(ids) + most)[0] is not None
    assert asked(question, monkeypatch, [], positions=len(ids) + most - 1) == (None, None, None)
    monkeypatch.undo()
    weight, _, _ = trained
    data = write_pairs(tmp_path / "long.jsonl", [PAIRS[1], ("word " * 40_000, "Yes.")])
    with open(data, "a", encoding="utf-8") as file:
        call = turn("assistant", "", tool_calls=[{"name": "weather", "arguments": {}}])
        file.write(json.dumps({"messages": [turn("user", "Rain?"), call]}) + "\n")
    shown = run(weight, "--data_path", data, capsys=capsys)
    assert "note: 1 conversation without a question, or without a text as the last answer" in shown
    assert "1 of 1 question answered with the right first sentence; 1 more do not fit" in shown
    assert "not asked: it does not fit the model" in shown


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
