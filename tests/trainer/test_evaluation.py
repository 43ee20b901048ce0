"""The validation loss, and texts that a model in training writes. References: forward() on each document, runs without them."""

import contextlib
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.errors import UserError
from dataset.corpus import EVAL_ROWS, Corpus
from dataset.tokenizing.encoder import DocumentEncoder
from model.decoding import decode
from tests.helpers import assert_same_weights, records, tiny_model, train, write_corpus
from tests.trainer.test_engine import make_engine
from trainer import evaluation
from trainer.evaluation import Sampler, evaluate, read_prompts
from trainer.machine.command_line import StopSignals


def corpus_of(data, tokenizer):
    """A corpus that is evaluated on what it trains, in rows of 12 positions."""
    encoder = DocumentEncoder(tokenizer)
    return Corpus([str(data)], encoder, max_seq_len=12, seed=0, val_path=str(data), allow_val_overlap=True)


@pytest.mark.parametrize("fields", [{}, {"use_moe": True}])
def test_evaluation_equals_brute_force(tokenizer, tmp_path, fields):
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
    n_bytes = sum(len(record["text"].encode()) for record in records(data, None))
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


@pytest.mark.parametrize(("device", "batch_seconds"), [("cpu", 0.2 * EVAL_ROWS / 2), ("cuda", 0.2)])
def test_an_evaluation_is_timed_by_some_of_its_rows(tokenizer, tmp_path, monkeypatch, device, batch_seconds):
    """On a GPU a few rows take as long as a batch. The first pass is slow, and another one has a pause."""
    passes = iter([9.0, 0.2, 5.0, 0.2, 0.2, 0.2])
    batches = corpus_of(write_corpus(tmp_path / "data.jsonl", 20), tokenizer).validation()
    engine = make_engine(tiny_model(vocab_size=len(tokenizer)))
    monkeypatch.setattr(evaluation, "to_device", lambda batch, device: batch)
    monkeypatch.setattr(evaluation, "evaluation_mode", contextlib.nullcontext)
    monkeypatch.setattr(evaluation, "seconds", lambda work, device: next(passes))
    engine.device = torch.device(device)
    assert evaluation.evaluation_seconds(engine, batches) == pytest.approx(batch_seconds * len(batches))


def test_training_is_the_same_with_and_without_evaluations_and_samples(tmp_path, capsys):
    """Reference: the run without; dropout would show a random state that was used up."""
    data, valid = write_corpus(tmp_path / "data.jsonl"), write_corpus(tmp_path / "valid.jsonl", 5, seed=1)
    plain = train(data_path=data, dropout=0.1, out_dir=tmp_path / "plain")
    looks = {"val_path": valid, "eval_interval": 4, "sample_prompts": "The cat"}
    watched = train(data_path=data, dropout=0.1, out_dir=tmp_path / "watched", **looks)
    assert len(records(watched, "val_loss")) > 2
    assert capsys.readouterr().out.count("--- sample from 'The cat'") == len(records(watched, "val_loss"))
    assert_same_weights(plain, watched)


def test_samples_have_no_dropout(tokenizer):
    """Reference: a model of the same weights that is trained without it. That training goes on as without samples: above."""
    models = [tiny_model(vocab_size=len(tokenizer), dropout=dropout) for dropout in (0.0, 0.5)]
    sampler = Sampler(tokenizer, DocumentEncoder(tokenizer), [], 7)
    texts = [sampler.sample(make_engine(model), "The cat") for model in models]
    assert texts[0] == texts[1] and texts[0].startswith("The cat") and models[1].training


def test_a_prompt_begins_as_a_document_does(tokenizer):
    """One BOS, whether or not the prompt spells it; other special tokens in it are text."""
    model, seen = tiny_model(vocab_size=len(tokenizer)), []
    sampler = Sampler(tokenizer, DocumentEncoder(tokenizer), [], 7)
    with mock.patch.object(evaluation, "decode", lambda model, prompts, *rest: seen.extend(prompts) or prompts):
        for prompt in ("The", "<|im_start|>The", "The<|im_end|>The", ""):
            sampler.sample(make_engine(model), prompt)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert seen[0] == seen[1] and [ids.count(bos) for ids in seen] == [1] * 4 and all(eos not in ids for ids in seen)


@pytest.mark.parametrize(("positions", "words"), [(2, 0), (3, 1), (16, 300), (120, 1), (200, 300)])
def test_a_sample_fits_the_positions_of_the_model(tokenizer, positions, words):
    """Reference: what the model computes: no more positions than it has, of a long prompt the end, and new tokens."""
    model, seen = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=positions), []
    encoder = DocumentEncoder(tokenizer)

    def whole(model, prompts, sampling, end_ids):
        # An end of the text that is drawn early would hide what does not fit.
        seen.append((prompts[0], prompts[0] + decode(model, prompts, sampling)[0]))
        return [[]]

    prompt = "the cat " * words
    with mock.patch.object(evaluation, "decode", whole):
        Sampler(tokenizer, encoder, [], 7).sample(make_engine(model), prompt)
    ((given, made),) = seen
    asked = encoder.prompt_ids(prompt)
    assert given == asked[-len(given) :] and given and len(given) < len(made) <= positions
    assert len(made) - len(given) == min(120, positions // 2)


def test_a_stop_while_sampling_gives_all_samples_up(tokenizer):
    """They come again with the evaluation, after the resume."""
    signals = StopSignals()
    engine = make_engine(tiny_model(vocab_size=len(tokenizer)))

    def stopped(*args, **options):
        signals.signum = 15 if args[2] == "b" else 0
        return "text"

    encoder = DocumentEncoder(tokenizer)
    with mock.patch.object(Sampler, "sample", stopped):
        assert Sampler(tokenizer, encoder, ["a", "b", "c"], 7)(engine, signals) == ([], 15)
        signals.signum = 0
        found, _ = Sampler(tokenizer, encoder, ["a", "c"], 7)(engine, signals)
        assert found == [("a", "text"), ("c", "text")]


def test_prompts_are_strings_or_the_lines_of_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeffThe cat\r\n\n猫\u2028\n", encoding="utf-8", newline="")
    assert read_prompts([str(file)]) == ["The cat", "猫\u2028"]
    assert read_prompts(["The cat", str(file)]) == ["The cat", str(file)]
    assert read_prompts(["x" * 5000]) == ["x" * 5000]
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for prompt, named in (("caf\udce9", "caf"), (tmp_path / "latin", "caf"), (tmp_path / "no.txt", "no.txt: No such")):
        with pytest.raises(UserError, match=named):
            read_prompts([str(prompt)])
