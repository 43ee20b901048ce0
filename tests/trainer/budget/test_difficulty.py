"""How hard a text is. References: the definitions, token by token."""

from collections import Counter

import numpy as np
import pytest

from dataset.corpus import Corpus
from dataset.tokenizing.byte_level_bpe import save, train_bpe
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from tests.helpers import write_texts
from trainer.budget import laws
from trainer.budget.difficulty import (
    bigram_predictions,
    difficulty_of,
    mixture_loss,
    row_predictions,
    share_of_passages,
)


def kneser_ney(trained, context, token, is_longest=True):
    """P(token | context), with counts of occurrences for the longest context and of different tokens before it for others."""
    n = len(context) + 1
    grams = [tuple(trained[i : i + n]) for i in range(len(trained) - n + 1)]
    if not is_longest:
        grams = [gram[1:] for gram in {tuple(trained[i : i + n + 1]) for i in range(len(trained) - n)}]
    counts = Counter(grams)
    lower = kneser_ney(trained, context[1:], token, False) if context else 1 / (max(trained) + 1)
    after = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == context}
    if not after:
        return lower
    once, twice = (sum(count == number for count in counts.values()) for number in (1, 2))
    discount = (once + 1) / (once + 2 * twice + 3)
    return (max(after.get(token, 0) - discount, 0) + discount * len(after) * lower) / sum(after.values())


def test_pairs_predict_as_kneser_and_ney_say():
    rng = np.random.default_rng(0)
    trained, evaluated = rng.integers(0, 9, 120), rng.integers(0, 9, 60)
    trained[7] = 8
    contexts = [tuple(evaluated[max(i - 1, 0) : i].tolist()) for i in range(60)]
    wanted = [
        kneser_ney(trained.tolist(), context, token, len(context) == 1)
        for context, token in zip(contexts, evaluated.tolist(), strict=True)
    ]
    assert bigram_predictions(trained, evaluated) == pytest.approx(wanted)


def test_a_row_predicts_what_followed_the_same_tokens():
    rows = np.random.default_rng(0).integers(0, 4, (3, 20))
    predictions, longest = row_predictions(rows)
    for place, token in enumerate(rows.reshape(-1).tolist()):
        row, i = rows[place // 20].tolist(), place % 20
        lengths = 0
        for length in range(min(i, 2) + 1):
            after = [row[j] for j in range(length, i) if row[j - length : j] == row[i - length : i]]
            assert predictions[length, place] == (after.count(token) / len(after) if after else 0)
            lengths += bool(after)
        assert longest[place] == lengths


def test_passages_that_both_texts_have_are_counted():
    """Reference: their 12 tokens, one passage after the other."""
    trained, random = np.random.default_rng(0).integers(0, 3, (2, 400))
    evaluated = np.concatenate([trained[90:130], random, trained[:20]])
    known, wanted = ([text[i : i + 12].tolist() for i in range(len(text) - 11)] for text in (trained, evaluated))
    assert 0 < share_of_passages(trained, evaluated) == np.mean([passage in known for passage in wanted]) < 1
    assert share_of_passages(trained, evaluated[:11]) == share_of_passages(trained[:3], evaluated) == 0


def test_a_mixture_has_the_best_weights_of_each_group():
    """Reference: of two constant predictions the better one gets all the weight."""
    predictions = np.array([[0.5, 0.5, 0.1, 0.1], [0.25, 0.25, 0.2, 0.2]])
    expected = -np.log([0.5, 0.5, 0.2, 0.2]).mean()
    assert mixture_loss(predictions, np.array([0, 0, 1, 1])) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("held_out", [0.0, 0.2])
def test_a_text_in_order_is_easier(tmp_path, tokenizer, held_out):
    def of(texts):
        path = write_texts(tmp_path / f"{len(texts)}.txt.jsonl", map(" ".join, texts))
        encoder = DocumentEncoder(tokenizer)
        corpus = Corpus([path], encoder, max_seq_len=64, seed=0, val_fraction=held_out)
        return difficulty_of(corpus.assembler(), corpus.plan(0), corpus.validation(), encoder)

    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    rng = np.random.default_rng(0)
    assert of([np.roll(words, i) for i in range(301)]) < of([rng.permutation(words) for _ in range(302)]) < 1
    assert of([["some"], ["text"]]) > 0


def test_other_tokenizers_are_measured_by_this_repositorys(tmp_path, tokenizer):
    """Reference: its tokens of the same short documents."""
    rng = np.random.default_rng(0)
    letters = [*"etaoin shrdlu "]
    texts = ["".join(rng.choice(letters, rng.integers(20, 200))) for _ in range(2000)]
    path = write_texts(tmp_path / "texts.jsonl", texts)
    save(train_bpe(texts, 1500), tmp_path / "other")
    usual, other = DocumentEncoder(tokenizer), DocumentEncoder(load_tokenizer(tmp_path / "other"))
    difficulty, inputs = {}, {}
    for encoder in (usual, other):
        corpus = Corpus([path], encoder, max_seq_len=64, seed=0, val_fraction=0.2)
        validation = corpus.validation()
        difficulty[encoder] = difficulty_of(corpus.assembler(), corpus.plan(0), validation, encoder)
        inputs[encoder] = validation.plan.n_pairs
    ratio = (inputs[usual] / inputs[other]) ** laws.POWER_OF_PACKING
    assert abs(ratio - 1) > 0.1
    assert difficulty[other] == pytest.approx(ratio * difficulty[usual], rel=0.01)
