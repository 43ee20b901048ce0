"""The validation loss. References: forward() on each document alone, the run without evaluations."""

import json
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dataset.corpus import EVAL_ROWS, Corpus
from dataset.tokenizing.encoder import DocumentEncoder
from tests.helpers import assert_same_weights, records, tiny_model, train, write_corpus
from tests.trainer.test_engine import make_engine
from trainer import evaluation
from trainer.evaluation import evaluate
from trainer.machine.command_line import StopSignals


def corpus_of(data, tokenizer):
    """A corpus that is evaluated on what it trains, in rows of 12 positions."""
    encoder = DocumentEncoder(tokenizer)
    return Corpus([str(data)], encoder, max_seq_len=12, seed=0, val_path=str(data), allow_val_overlap=True)


@pytest.mark.parametrize("fields", [{}, {"use_moe": True}])
def test_evaluation_equals_brute_force(tokenizer, tmp_path, fields):
    """Reference: forward() on each document alone, cut into pieces of max_seq_len targets, summed here."""
    data = write_corpus(tmp_path / "data.jsonl", 20)
    corpus = corpus_of(data, tokenizer)
    model = tiny_model(vocab_size=len(tokenizer), **fields)
    values, stop_request = evaluate(make_engine(model), corpus.validation(), StopSignals())
    assert stop_request == 0 and model.training

    model.eval()
    total, targets, longest = 0.0, 0, 0
    for i in range(len(corpus.store)):
        begin, end = corpus.store.offsets[i : i + 2]
        ids = torch.from_numpy(corpus.store.tokens[begin:end].astype(np.int64))
        longest = max(longest, len(ids))
        for start in range(0, len(ids) - 1, 12):
            piece = ids[start : start + 13]
            with torch.no_grad():
                logits = model(piece[None, :-1]).logits[0]
            total += float(F.cross_entropy(logits, piece[1:], reduction="sum"))
            targets += len(piece) - 1
    n_bytes = sum(len(json.loads(line)["text"].encode()) for line in data.read_text(encoding="utf-8").splitlines())
    assert longest > 13  # some document was cut
    assert values["val_loss"] == pytest.approx(total / targets, rel=1e-6)
    assert values["perplexity"] == pytest.approx(math.exp(total / targets), rel=1e-5)
    assert values["bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("positions", "most_rows", "fields"), [(12 * 5, 5, {}), (1, 1, {"use_moe": True})])
def test_long_rows_are_evaluated_a_few_at_a_time(tokenizer, tmp_path, monkeypatch, positions, most_rows, fields):
    """Reference: all rows of a batch at once. A mask has the square of a row's positions."""
    corpus = corpus_of(write_corpus(tmp_path / "data.jsonl", 60), tokenizer)
    model = tiny_model(vocab_size=len(tokenizer), **fields)
    at_once, _ = evaluate(make_engine(model), corpus.validation(), StopSignals())
    losses_of = mock.Mock(wraps=model.training_losses)
    monkeypatch.setattr(model, "training_losses", losses_of)
    monkeypatch.setattr(evaluation, "MAX_POSITIONS_AT_ONCE", positions)
    values, _ = evaluate(make_engine(model), corpus.validation(), StopSignals())
    rows = [len(call.args[0]) for call in losses_of.call_args_list]
    assert max(rows) == most_rows and sum(rows) == EVAL_ROWS * len(corpus.validation())
    assert values == pytest.approx(at_once, rel=1e-6)


def test_training_is_the_same_with_and_without_evaluations_and_samples(tmp_path, capsys):
    """Reference: the run without; dropout would show a random state that was used up."""
    data, valid = write_corpus(tmp_path / "data.jsonl"), write_corpus(tmp_path / "valid.jsonl", 5, seed=1)
    plain = train(data_path=data, dropout=0.1, out_dir=tmp_path / "plain")
    looks = {"val_path": valid, "eval_interval": 4, "sample_prompts": "The cat"}
    watched = train(data_path=data, dropout=0.1, out_dir=tmp_path / "watched", **looks)
    assert len(records(watched, "val_loss")) > 2
    assert capsys.readouterr().out.count("--- sample from 'The cat'") == len(records(watched, "val_loss"))
    assert_same_weights(plain, watched)
