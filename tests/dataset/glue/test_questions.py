"""Questions on a text as features. References: hand-made files, and the windows of a loop over tokens."""

import json

import numpy as np
import pytest

from common.errors import DataError
from dataset.glue.feature_cache import cached_features, read_features
from dataset.glue.glue_dataset import GlueAssembler
from dataset.glue.glue_tasks import QUESTIONS, Task, Windows
from dataset.glue.questions import Answer, Question, encode_questions, read_questions, without_misplaced
from tests.dataset.glue.test_glue_dataset import WORDS, encoder

TEXT = "a b c d e f g h i j a b c d"


def squad(*entries, context=TEXT):
    return {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(entries)}]}]}


def entry(key="1", question="j i", text="c d", begin=4):
    return {"id": key, "question": question, "answers": [{"text": text, "answer_start": begin}]}


def written(tmp_path, content):
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_each_window_has_the_question_and_its_part_of_the_text_and_of_the_answer():
    """14 tokens, and room for nine beside a question of two: windows from token 0 and from 6."""
    right = Answer("i j", 16)
    features = encode_questions([Question("1", "j i", TEXT, [right])], Windows(stride=6), encoder(), 14)
    assert features.first.tolist() == [2, 2] and features.second.tolist() == [9, 8]
    assert features.part_of.tolist() == [0, 0]
    # Of "i j" the first window holds the i alone.
    assert features.labels.tolist() == [[0, 0], [6, 7]]
    batch = GlueAssembler(features, encoder(), 14)[np.array([0, 1])]
    words = [[WORDS[i] for i in row] for row in batch.ids.tolist()]
    assert words[1][:12] == ["[CLS]", "j", "i", "[SEP]", "g", "h", "i", "j", "a", "b", "c", "d"]
    assert words[1][6:8] == ["i", "j"] and batch.labels.tolist() == [[0, 0], [6, 7]]
    assert batch.types[1].tolist() == [0] * 4 + [1] * 9 + [0]
    begin = features.begin[1] + 2
    assert [TEXT[a:b] for a, b in features.places[begin : begin + 8]] == list("ghijabcd")


def test_an_answer_within_a_word_is_the_words_that_it_touches():
    """Reference: the tokens whose characters it shares."""
    questions = [Question("1", "a", "a[b c", [Answer("b c", 2)]), Question("2", "a", "a[b c", [])]
    features = encode_questions(questions, Windows(), encoder(), 16)
    assert features.labels.tolist() == [[5, 6], [0, 0]]


def test_a_text_of_no_token_is_an_empty_window_and_long_questions_are_cut():
    questions = [Question("1", "a b c", "\u200b", []), Question("2", "a b c", TEXT, [])]
    features = encode_questions(questions, Windows(longest_question=2), encoder(), 20)
    assert features.first.tolist() == [2, 2] and features.second.tolist() == [0, 14]
    with pytest.raises(ValueError, match="--max_seq_len 8 leaves no room for a text"):
        encode_questions(questions, Windows(), encoder(), 8)


def test_a_file_is_read_with_all_of_its_answers(tmp_path):
    first = entry()
    first["answers"].append({"text": "d", "answer_start": 6})
    (question, other) = read_questions(written(tmp_path, squad(first, entry("2"))))
    assert question == ("1", "j i", TEXT, [("c d", 4), ("d", 6)]) and other.key == "2"
    del first["answers"]
    assert read_questions(written(tmp_path, squad(first)), labelled=False)[0].answers == []


def test_questions_whose_answer_stands_elsewhere_are_left_out_of_the_training(tmp_path):
    """Reference: the features of a file without them. Of several answers one in its place is enough."""
    second = entry("d", text="e", begin=9)
    second["answers"].append({"text": "e f", "answer_start": 8})
    wrong = [entry("b", begin=3), entry("c", begin=-10), entry("e", begin=10**9)]
    path = written(tmp_path, squad(entry("a"), *wrong, second))
    questions = read_questions(path)
    assert [question.placed for question in questions] == [("c d", 4), None, None, None, ("e f", 8)]
    assert questions[1].answers == [("c d", None)]
    whole = encode_questions(questions, Windows(stride=6), encoder(), 14)
    assert len(whole.first) == 10 and not whole.labels[2:8].any()
    trained, line = without_misplaced(whole, questions, path)
    assert line == (
        f"{path}: left 3 questions out of the training, since their answer does not stand at its 'answer_start', first 'b'"
    )
    wanted = encode_questions([questions[0], questions[4]], Windows(stride=6), encoder(), 14)
    found, reference = (GlueAssembler(f, encoder(), 14)[np.arange(4)] for f in (trained, wanted))
    assert all(a.equal(b) for a, b in zip(found, reference, strict=True)) and found.labels.any()
    assert without_misplaced(wanted, [questions[0], questions[4]], path) == (wanted, None)
    with pytest.raises(DataError, match="no question can be trained, since their answer"):
        without_misplaced(whole, questions[1:4], path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (squad(entry(text="", begin=0)), "question '1': an answer has no text"),
        (squad(entry(begin="4")), "question '1': 'answer_start' is a string, not a whole number"),
        (squad(entry(begin=4.0)), "'answer_start' is a number, not a whole number"),
        (squad(entry(), entry()), "question '1' is in there twice"),
        (squad(entry() | {"answers": []}), "question '1' has no answer"),
        (squad(entry() | {"is_impossible": True}), "question '1' has no answer in its text, as in SQuAD 2.0"),
        (squad({"id": 3}), "data[0], paragraphs[0], qas[0]: 'id' is a number, not a string"),
        (squad({"id": "3"}), "question '3': no 'question' in the object"),
        (squad(), "no question in there"),
        (squad(context=3), "data[0], paragraphs[0]: 'context' is a number, not a string"),
        ({"data": [{"paragraphs": {}}]}, "data[0]: 'paragraphs' is a object, not a list"),
        ({"data": ["x"]}, "data[0]: a JSON string where an object with 'paragraphs' is wanted"),
        ([1], "a JSON list where an object with 'data' is wanted"),
    ],
)
def test_a_fault_is_named_with_its_place(tmp_path, content, reason):
    path = written(tmp_path, content)
    with pytest.raises(DataError) as error:
        read_questions(path)
    assert str(error.value).startswith(f"{path}: ") and reason in str(error.value)


def test_a_context_that_is_too_long_is_named(tmp_path, monkeypatch):
    path = written(tmp_path, squad(entry("q7")))
    monkeypatch.setattr("dataset.tokenizing.sentence_encoder.LONGEST_WHOLE", len(TEXT) - 1)
    task = Task("squad", ("question", "context"), "answers", (), ("f1",), kind=QUESTIONS)
    with pytest.raises(DataError) as error:
        cached_features(path, task, encoder(), 16)
    wanted = f"{path}: question 'q7': its context is a text of 27 characters; at most 26 can be encoded at once"
    assert str(error.value) == wanted


def test_what_is_no_json_is_named(tmp_path):
    path = tmp_path / "dev.json"
    path.write_text('{"data": [')
    with pytest.raises(DataError, match="dev.json: the line ends before its JSON object does; a file in the format"):
        read_questions(path)


def test_the_name_in_the_cache_changes_with_what_changes_features_alone(tmp_path):
    """Reference: the features themselves."""
    path = written(tmp_path, squad(entry()))
    task = Task("mine", ("question", "context"), "answers", (), ("exact_match",), kind=QUESTIONS)

    def features_of(**changes):
        file = cached_features(path, task._replace(**changes), encoder(), 14, say=lambda _: None)
        return file, read_features(file).tokens.tolist()

    usual = features_of()
    for changes in (
        {"metrics": ("f1",)},
        {"epochs": 9},
        {"windows": Windows(longest_answer=3)},
        {"dev": ()},
    ):
        assert features_of(**changes) == usual
    for changes in ({"windows": Windows(stride=2)}, {"windows": Windows(longest_question=1)}):
        other = features_of(**changes)
        assert other[0] != usual[0] and other[1] != usual[1], changes
