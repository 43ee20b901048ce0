"""Validation and samples. References: forward() on each document alone, torch's random state."""

import contextlib
import json
import math
import random
import signal
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dataset.corpus import EVAL_ROWS, Corpus
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from tests.helpers import ROOT, records, tiny_model, train, write_corpus
from trainer import evaluation
from trainer.engine import Engine
from trainer.evaluation import evaluate, read_prompts, sample, samples, sums_over_batches
from trainer.machine.ranks import Ranks, on_main
from trainer.machine.signals import StopSignals
from trainer.optim.build import build_optimizer
from trainer.pretrain import job


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ROOT / "model")


def make_engine(model, dtype=torch.float32):
    return Engine(model, build_optimizer(model, 1e-3), None, device=torch.device("cpu"), dtype=dtype, ranks=Ranks())


@pytest.mark.parametrize("fields", [{}, {"use_moe": True}])
def test_evaluation_equals_brute_force(tokenizer, tmp_path, fields):
    """Reference: forward() on each document alone, cut into pieces of max_seq_len targets, summed here."""
    data = write_corpus(tmp_path / "data.jsonl", 20)
    encoder = DocumentEncoder(tokenizer)
    corpus = Corpus([str(data)], encoder, max_seq_len=12, seed=0, val_path=str(data), allow_val_overlap=True)
    model = tiny_model(vocab_size=encoder.vocab_size, **fields)
    values, stop_signal = evaluate(make_engine(model), corpus.validation(), StopSignals())
    assert stop_signal == 0 and model.training

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


@pytest.mark.parametrize(("positions", "most_rows"), [(12 * 16, 16), (12 * 5, 5), (1, 1)])
@pytest.mark.parametrize("fields", [{}, {"use_moe": True}])
def test_long_rows_are_evaluated_a_few_at_a_time(tokenizer, tmp_path, monkeypatch, positions, most_rows, fields):
    """Reference: all rows of a batch at once. A mask has the square of a row's positions."""
    data = write_corpus(tmp_path / "data.jsonl", 60)
    encoder = DocumentEncoder(tokenizer)
    corpus = Corpus([str(data)], encoder, max_seq_len=12, seed=0, val_path=str(data), allow_val_overlap=True)
    model = tiny_model(vocab_size=encoder.vocab_size, **fields)
    at_once, _ = evaluate(make_engine(model), corpus.validation(), StopSignals())
    rows = []
    training_losses = model.training_losses

    def recorded(input_ids, *others):
        rows.append(len(input_ids))
        return training_losses(input_ids, *others)

    monkeypatch.setattr(model, "training_losses", recorded)
    monkeypatch.setattr(evaluation, "MOST_POSITIONS", positions)
    values, _ = evaluate(make_engine(model), corpus.validation(), StopSignals())
    assert max(rows) == most_rows and sum(rows) == EVAL_ROWS * len(corpus.validation())
    assert values == pytest.approx(at_once, rel=1e-6)


def test_a_stop_signal_ends_an_evaluation(tokenizer, tmp_path):
    data = write_corpus(tmp_path / "data.jsonl", 20)
    encoder = DocumentEncoder(tokenizer)
    corpus = Corpus([str(data)], encoder, max_seq_len=12, seed=0, val_path=str(data), allow_val_overlap=True)
    signals = StopSignals()
    signals.signum = 15
    model = tiny_model(vocab_size=encoder.vocab_size)
    assert evaluate(make_engine(model), corpus.validation(), signals)[1] == 15
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_leave_the_random_state_of_training_alone(tokenizer, dtype):
    model = tiny_model(vocab_size=len(tokenizer))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    encoder = DocumentEncoder(tokenizer)
    texts = [sample(make_engine(model, dtype), tokenizer, encoder, "The cat", 7, max_new_tokens=5) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert texts[0] == texts[1] and texts[0].startswith("The cat") and model.training


def test_the_last_samples_do_not_depend_on_the_precision_of_the_training(tokenizer):
    """Reference: those of a run in float32. Nor do they touch its random state."""
    encoder = DocumentEncoder(tokenizer)
    before = torch.get_rng_state()
    texts = []
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_engine(tiny_model(vocab_size=len(tokenizer)), dtype)
        drawn_before = torch.get_rng_state()
        texts.append(samples(engine, tokenizer, encoder, ["The cat", "猫"], StopSignals(), 7, is_last=True))
        assert torch.equal(torch.get_rng_state(), drawn_before) and engine.model.training
    torch.set_rng_state(before)
    assert texts[0] == texts[1] and len(texts[0][0]) == 2


def test_a_rank_without_a_prompt_makes_no_second_model(tokenizer):
    engine = make_engine(tiny_model(vocab_size=len(tokenizer)))
    engine.ranks = Ranks(rank=1, world_size=2)
    others = [([("The cat", "text")], 0), ([], 0)]

    def gather(answers, own):
        answers[:] = others

    refused = mock.patch("trainer.evaluation.model_as_saved", side_effect=AssertionError)
    waits = mock.patch("trainer.evaluation.until_all_are_ready", lambda ranks: contextlib.nullcontext())
    with refused, waits, mock.patch("torch.distributed.all_gather_object", gather):
        found = samples(engine, tokenizer, DocumentEncoder(tokenizer), ["The cat"], StopSignals(), 7, is_last=True)
    assert found == ([("The cat", "text")], 0)


@pytest.mark.parametrize("is_last", [False, True])
def test_ranks_hear_of_each_other_while_a_text_is_made(tokenizer, is_last):
    """Each rank makes its own, and one without a prompt has none to make: all are in the block in which they meet."""
    engine = make_engine(tiny_model(vocab_size=len(tokenizer)))
    meeting, made = [], []

    @contextlib.contextmanager
    def until_all_are_ready(ranks):
        meeting.append("begins")
        yield
        meeting.append("ends")

    def sample(*args, **options):
        assert meeting[-1] == "begins"
        made.append(args[3])
        return "text"

    with (
        mock.patch("trainer.evaluation.until_all_are_ready", until_all_are_ready),
        mock.patch("trainer.evaluation.sample", sample),
    ):
        samples(engine, tokenizer, DocumentEncoder(tokenizer), ["a", "b"], StopSignals(), 7, is_last)
    assert made == ["a", "b"]
    # One block for each round, and one for the model of the last samples.
    assert meeting == ["begins", "ends"] * (2 + is_last)


class ShardedEngine(Engine):
    """Says that the model is sharded, though this process has the whole."""

    def largest(self, number):
        return number


def sharded_engine(tokenizer):
    engine = make_engine(tiny_model(vocab_size=len(tokenizer)))
    engine.__class__ = ShardedEngine
    engine.shards = object()
    engine.weights = engine.model.state_dict
    return engine


def test_rank_0_says_that_it_works_while_it_makes_the_last_samples(tokenizer):
    """Of a sharded model it makes all of them. Reference: those of a model that is not sharded."""
    encoder, prompts = DocumentEncoder(tokenizer), ["The cat", "猫"]
    whole = make_engine(tiny_model(vocab_size=len(tokenizer)))
    expected = samples(whole, tokenizer, encoder, prompts, StopSignals(), 7, is_last=True)
    with mock.patch("trainer.evaluation.on_main", wraps=on_main) as announced:
        found = samples(sharded_engine(tokenizer), tokenizer, encoder, prompts, StopSignals(), 7, is_last=True)
    assert found == expected and len(found[0]) == 2
    # The model, and each of the texts
    assert announced.call_count == 3


@pytest.mark.parametrize("at", ["a", "b"])
def test_a_stop_while_the_last_samples_are_made_gives_all_up(tokenizer, at):
    signals, made = StopSignals(), []

    def stopped(*args, **options):
        made.append(args[3])
        signals.signum = 15 if args[3] == at else 0
        return "text"

    with mock.patch("trainer.evaluation.sample", stopped):
        engine = sharded_engine(tokenizer)
        found = samples(engine, tokenizer, DocumentEncoder(tokenizer), ["a", "b"], signals, 7, is_last=True)
    assert found == ([], 15) and made[-1] == at


def test_of_two_signals_during_an_evaluation_the_larger_number_counts(monkeypatch):
    """Here SIGTERM, on the other rank SIGHUP. A mean would be the number of another signal."""
    engine = make_engine(tiny_model())
    engine.ranks = Ranks(world_size=2)

    def all_reduce(slots):
        slots[-1] += signal.SIGHUP

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    signals = StopSignals()
    signals.signum = int(signal.SIGTERM)
    assert sums_over_batches(engine, 3, lambda number: [1.0], 1, signals)[1] == signal.SIGTERM


def test_training_is_the_same_with_and_without_evaluations_and_samples(tmp_path, capsys):
    """Reference: the run without; dropout would show a random state that was used up."""
    data, valid = write_corpus(tmp_path / "data.jsonl"), write_corpus(tmp_path / "valid.jsonl", 5, seed=1)
    config_from_flags = job.config_from_flags

    def with_dropout(*args):
        config = config_from_flags(*args)
        config.dropout = 0.1
        return config

    with mock.patch.object(job, "config_from_flags", with_dropout):
        plain = train(data_path=data, out_dir=tmp_path / "plain")
        watched = train(
            data_path=data, out_dir=tmp_path / "watched", val_path=valid, eval_interval=4, sample_prompts="The cat"
        )
    assert len(records(watched, "val_loss")) > 2
    assert capsys.readouterr().out.count("--- sample from 'The cat'") == len(records(watched, "val_loss"))
    for p, q in zip(plain.engine.parameters, watched.engine.parameters, strict=True):
        assert torch.equal(p, q)


def test_a_prompt_begins_as_a_document_does(tokenizer):
    """One BOS, whether or not the prompt spells it; other special tokens in it are text."""
    model, encoder, seen = tiny_model(vocab_size=len(tokenizer)), DocumentEncoder(tokenizer), []
    generate = model.generate
    with mock.patch.object(
        model, "generate", lambda ids, **options: seen.append(ids[0].tolist()) or generate(ids, **options)
    ):
        for prompt in ("The", "<|im_start|>The", "The<|im_end|>The", ""):
            sample(make_engine(model), tokenizer, encoder, prompt, 7, max_new_tokens=2)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert seen[0] == seen[1] and [ids.count(bos) for ids in seen] == [1] * 4 and all(eos not in ids for ids in seen)


def test_a_stop_while_sampling_gives_all_samples_up(tokenizer):
    """They come again with the evaluation, after the resume."""
    signals, prompts = StopSignals(), ["a", "b", "c"]
    engine = make_engine(tiny_model(vocab_size=len(tokenizer)))

    def stopped(*args, **options):
        signals.signum = 15 if args[3] == "b" else 0
        return "text"

    with mock.patch("trainer.evaluation.sample", stopped):
        assert samples(engine, tokenizer, DocumentEncoder(tokenizer), prompts, signals, 7, is_last=False) == ([], 15)
        signals.signum = 0
        assert samples(engine, tokenizer, DocumentEncoder(tokenizer), prompts[::2], signals, 7, is_last=False)[0] == [
            ("a", "text"),
            ("c", "text"),
        ]


def test_prompts_are_strings_or_the_lines_of_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("The cat\n\n猫\n", encoding="utf-8")
    assert read_prompts([str(file)]) == ["The cat", "猫"]
    assert read_prompts(["The cat", str(file)]) == ["The cat", str(file)]
    assert read_prompts(["x" * 5000]) == ["x" * 5000]
