"""Answers to questions on a text: which piece of it a model means, and how right that is.

Exact match and F1 are those of SQuAD 1.1, written from their definition (Rajpurkar et al. 2016, section 6.1): articles,
punctuation, case and white space do not count; of several right answers the one that fits best does; F1 is that of the words,
each counted as often as it occurs.

Which piece is meant: the one whose first token's and last token's logits have the highest sum, of all windows of the text.
A token in several windows may begin an answer in that one alone where it has most context (Devlin et al. 2018).
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dataset.glue.features import Features
from dataset.glue.glue_tasks import Windows
from dataset.glue.questions import Question
from dataset.store.interface import Ints

Logits = np.ndarray[Any, np.dtype[np.float32]]

ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(answer: str) -> list[str]:
    """The words of an answer that count."""
    text = answer.lower().translate(WITHOUT_PUNCTUATION)
    return ARTICLES.sub(" ", text).split()


def exact_match(found: str, right: str) -> float:
    return float(normalised(found) == normalised(right))


def word_f1(found: str, right: str) -> float:
    """F1 of the words that two answers share; 0 where one has none."""
    found_words = normalised(found)
    right_words = normalised(right)
    n_shared = (Counter(found_words) & Counter(right_words)).total()
    if not n_shared:
        return 0.0
    return 2 * n_shared / (len(found_words) + len(right_words))


def answer_scores(questions: Sequence[Question], found: Mapping[str, str]) -> dict[str, float]:
    """exact_match and f1, means over the questions. found: {id: answer}."""
    exact = 0.0
    f1 = 0.0
    for question in questions:
        answer = found[question.key]
        exact += max(exact_match(answer, right.text) for right in question.answers)
        f1 += max(word_f1(answer, right.text) for right in question.answers)
    return {"exact_match": exact / len(questions), "f1": f1 / len(questions)}


# ------------------------------------------------------------------------------------------- from the logits


class Span(NamedTuple):
    """The likeliest answer in a window: its first and its last token in there."""

    score: float
    first: int
    last: int


def best_span(begins: Logits, ends: Logits, longest: int) -> Span:
    """The pair first <= last < first + longest with the highest sum of logits; of several the shortest, then the first one.
    begins, ends: [tokens], at least one of them."""
    best = Span(-np.inf, 0, 0)
    for extra in range(min(longest, len(begins))):
        # An answer of extra + 1 tokens
        sums = begins[: len(begins) - extra] + ends[extra:]
        first = int(sums.argmax())
        if sums[first] > best.score:
            best = Span(float(sums[first]), first, first + extra)
    return best


def windows_with_most_context(begins: Ints, sizes: Ints) -> Ints:
    """For each token of a text, the number of the window in which it has most context: the smaller number of tokens at its
    left and right, and a hundredth of the window's size. begins, sizes: [windows]."""
    n_tokens = int((begins + sizes).max())
    best = np.full(n_tokens, -np.inf)
    window_of = np.zeros(n_tokens, dtype=np.int64)
    for window, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        place = np.arange(size)
        context = np.minimum(place, size - 1 - place) + 0.01 * size
        here = slice(begin, begin + size)
        is_better = context > best[here]
        best[here][is_better] = context[is_better]
        window_of[here][is_better] = window
    return window_of


def found_answers(
    questions: Sequence[Question], features: Features, logits: Logits, windows: Windows, max_seq_len: int
) -> dict[str, str]:
    """{id: the likeliest answer} of logits [positions of all windows, 2]."""
    rows = np.cumsum(features.lengths) - features.lengths
    found = {}
    # The windows of a question follow each other.
    bounds = np.searchsorted(features.part_of, np.arange(len(questions) + 1))
    for number, question in enumerate(questions):
        own = np.arange(bounds[number], bounds[number + 1])
        room = max_seq_len - 3 - int(features.first[own[0]])
        begins = np.arange(len(own)) * min(windows.stride, room)
        sizes = features.second[own]
        window_of = windows_with_most_context(begins, sizes)
        best = Span(-np.inf, 0, 0)
        answer = ""
        for window, i in enumerate(own):
            if not sizes[window]:
                # The tokenizer makes nothing of the text.
                continue
            # Its rows: CLS, the question, SEP, and the text from here on.
            lo = rows[i] + features.first[i] + 2
            begin_logits, end_logits = logits[lo : lo + sizes[window]].astype(np.float32).T
            is_own = window_of[begins[window] : begins[window] + sizes[window]] == window
            span = best_span(np.where(is_own, begin_logits, -np.inf), end_logits, windows.longest_answer)
            if span.score > best.score:
                best = span
                places = features.places[features.begin[i] + features.first[i] :]
                answer = question.context[places[span.first, 0] : places[span.last, 1]].strip()
        found[question.key] = answer
    return found
