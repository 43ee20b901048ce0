"""The embedded questions. Reference: the documentation of the functions in this process."""

import json
import textwrap

import pytest

from dataset.chat import embedded_questions
from dataset.chat.embedded_questions import answers, build_embedded_questions, first_sentence
from dataset.reading.conversations import text_of_conversation


@pytest.mark.slow
def test_answers_are_first_sentences_of_documentation():
    found = answers()
    assert 1000 < len(found) < 4000
    assert found["str.join"] == str.join.__doc__.split("\n\n")[0]
    assert found["len"] == "Return the number of items in a container."
    assert textwrap.fill.__doc__.startswith(found["textwrap.fill"])
    assert all(answer[0].isupper() and "\n" not in answer for answer in found.values())
    assert not any("._" in name for name in found)


def test_first_sentences():
    assert first_sentence("One. Two.") == "One."
    assert (
        first_sentence("\nSee e.g. the file\n   a.txt for it.  Then go on\n\nMore.")
        == "See e.g. the file a.txt for it."
    )
    assert first_sentence("No full stop\n\nMore.") == "No full stop"
    assert first_sentence("") == ""


@pytest.mark.slow
def test_the_file_has_each_answer_once_for_each_phrasing_and_is_the_same_again(tmp_path, monkeypatch):
    few = dict(list(answers().items())[:20])
    monkeypatch.setattr(embedded_questions, "answers", lambda: few)
    path = build_embedded_questions(tmp_path / "a" / "questions.jsonl")
    turns = []
    for line in path.read_text(encoding="utf-8").splitlines():
        assert text_of_conversation(json.loads(line))
        turns.append([message["content"] for message in json.loads(line)["conversations"]])
    assert turns == [
        [phrasing.format(name), text] for name, text in few.items() for phrasing in embedded_questions.PHRASINGS
    ]
    again = build_embedded_questions(tmp_path / "b" / "questions.jsonl")
    assert again.read_bytes() == path.read_bytes()
    written = path.stat()
    assert build_embedded_questions(path).stat() == written
