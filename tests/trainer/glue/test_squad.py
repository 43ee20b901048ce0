"""Answers and their scores. References: cases by hand, the task's own script, and all pairs of positions."""

import json
from pathlib import Path

import numpy as np
import pytest

from dataset.glue.features import Features
from dataset.glue.glue_tasks import Windows
from dataset.glue.questions import Answer, Question, encode_questions
from tests.dataset.glue.test_glue_dataset import encoder
from trainer.glue.squad import (
    answer_scores,
    best_span,
    exact_match,
    found_answers,
    normalised,
    windows_with_most_context,
    word_f1,
)


def test_articles_punctuation_case_and_white_space_do_not_count():
    assert normalised(" The  Eiffel-Tower, an icon!") == ["eiffeltower", "icon"]
    assert normalised("a") == [] and normalised("Theatre of an era") == ["theatre", "of", "era"]
    # Punctuation goes first: "a." is an article then, and "U.S.A" is one word.
    assert normalised("a. U.S.A") == ["usa"]
    assert exact_match("The cat.", "cat") == 1 and exact_match("cats", "cat") == 0
    assert exact_match("the", "a") == 1


@pytest.mark.parametrize(
    ("found", "right", "f1"),
    [
        ("the black cat", "a cat", 2 / 3),
        ("cat cat dog", "cat dog dog", 2 / 3),
        ("cat", "dog", 0),
        ("the", "the", 0),
        ("in 1999", "1999", 2 / 3),
        ("Denver Broncos", "The Denver Broncos", 1),
    ],
)
def test_f1_by_hand(found, right, f1):
    assert word_f1(found, right) == pytest.approx(f1) == word_f1(right, found)


def test_scores_are_those_of_the_official_script():
    """The numbers in squad_scores.json are what SQuAD's evaluate-v1.1.py gave for these made-up answers: articles,
    punctuation, letters of other languages, numbers, several right answers, empty ones. It multiplies means by 100."""
    golden = json.loads(Path(__file__).with_name("squad_scores.json").read_text(encoding="utf-8"))
    questions = []
    found = {}
    for number, case in enumerate(golden["cases"]):
        key = str(number)
        questions.append(Question(key, "?", "", [Answer(text, 0) for text in case["right"]]))
        found[key] = case["found"]
        wanted = {name: case[name] for name in ("exact_match", "f1")}
        assert answer_scores(questions[-1:], found) == pytest.approx(wanted, rel=1e-14), case
    assert len(questions) == 50
    wanted = {name: golden[name] for name in ("exact_match", "f1")}
    assert answer_scores(questions, found) == pytest.approx(wanted, rel=1e-14)


def test_of_several_right_answers_the_best_one_counts():
    def question(key, *texts):
        return Question(key, "?", "", [Answer(text, 0) for text in texts])

    questions = [question("1", "cat", "black cat"), question("2", "dog"), question("3", "a b c", "c d")]
    scores = answer_scores(questions, {"1": "a black cat", "2": "cow", "3": "b c"})
    # "b c" and "a b c": without its article the same
    assert scores == pytest.approx({"exact_match": 2 / 3, "f1": 2 / 3})


def test_the_best_span_is_that_of_all_pairs():
    generator = np.random.default_rng(0)
    for n, longest in ((1, 3), (7, 1), (12, 4), (12, 30)):
        begins, ends = generator.normal(size=(2, n)).astype(np.float32)
        pairs = [(begins[i] + ends[j], i, j) for i in range(n) for j in range(i, min(n, i + longest))]
        found = best_span(begins, ends, longest)
        assert (found.first, found.last) == max(pairs)[1:] and found.score == pytest.approx(max(pairs)[0])


def test_a_token_belongs_to_the_window_with_most_context():
    """Reference: the rule for each token and window by itself."""
    begins, sizes = np.array([0, 4, 8]), np.array([8, 8, 5])
    wanted = []
    for token in range(13):
        context = []
        for begin, size in zip(begins, sizes, strict=True):
            left, right = token - begin, begin + size - 1 - token
            context.append(min(left, right) + 0.01 * size if min(left, right) >= 0 else -1)
        wanted.append(int(np.argmax(context)))
    assert windows_with_most_context(begins, sizes).tolist() == wanted


def test_answers_are_found_over_the_windows_of_a_text():
    """The logits of one beginning and end in the second window are raised; a higher one at a token that has more context in
    another window does not count, and nothing in the question does."""
    text = "a b c d e f g h i j a b c d"
    questions = [Question("x", "j i", text, []), Question("y", "j", "g h", []), Question("z", "j", "\u200b", [])]
    windows = Windows(stride=6, longest_answer=3)
    features = encode_questions(questions, windows, encoder(), 14)
    assert isinstance(features, Features) and features.part_of.tolist() == [0, 0, 1, 2]
    logits = np.zeros((features.lengths.sum(), 2), dtype=np.float32)
    second = features.lengths[0]
    # CLS j i SEP g h i j a b c d: "j a" of the second window.
    logits[second + 7, 0] = 5
    logits[second + 8, 1] = 5
    # "g" has most context in the first window, and the question none.
    logits[second + 4, 0] = 50
    logits[1:3] = 100
    third = features.lengths[:2].sum()
    logits[third + 4] = 1
    found = found_answers(questions, features, logits, windows, 14)
    assert found == {"x": "j a", "y": "h", "z": ""}
