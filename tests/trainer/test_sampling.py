"""Texts that the model in training writes. References: torch's random state, runs in float32 and without ranks."""

import contextlib
import random
from unittest import mock

import numpy as np
import pytest
import torch

from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from tests.helpers import ROOT, tiny_model
from tests.trainer.test_evaluation import make_engine
from trainer.engine import Engine
from trainer.machine.collectives import on_main
from trainer.machine.ranks import Ranks
from trainer.machine.signals import StopSignals
from trainer.sampling import sample, samples


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ROOT / "model")


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

    refused = mock.patch("trainer.sampling.model_as_saved", side_effect=AssertionError)
    waits = mock.patch("trainer.sampling.until_all_are_ready", lambda ranks: contextlib.nullcontext())
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
        mock.patch("trainer.sampling.until_all_are_ready", until_all_are_ready),
        mock.patch("trainer.sampling.sample", sample),
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
    with mock.patch("trainer.sampling.on_main", wraps=on_main) as announced:
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

    with mock.patch("trainer.sampling.sample", stopped):
        engine = sharded_engine(tokenizer)
        found = samples(engine, tokenizer, DocumentEncoder(tokenizer), ["a", "b"], signals, 7, is_last=True)
    assert found == ([], 15) and made[-1] == at


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


@pytest.mark.parametrize("positions", [2, 16, 64, 200, 500])
def test_ranks_that_compute_together_draw_as_many_tokens(tokenizer, positions):
    """One that has ended goes on with the others, beyond its own positions if it had drawn fewer. Reference: those of the model."""
    engine = sharded_engine(tokenizer)
    engine.model.config.max_position_embeddings = positions
    asked = []

    def draw(ids, max_new_tokens, **_):
        asked.append((ids.shape[1], max_new_tokens))
        return ids

    with mock.patch.object(engine.model, "generate", draw):
        samples(
            engine,
            tokenizer,
            DocumentEncoder(tokenizer),
            ["", "a", "the cat " * 20, "the cat " * 99],
            StopSignals(),
            7,
            False,
        )
    drawn = {tokens for _, tokens in asked}
    assert len(asked) == 4 and len(drawn) == 1 and min(drawn) > 0
    assert all(given + tokens <= positions for given, tokens in asked)


@pytest.mark.parametrize("positions", [2, 3, 16, 120, 121, 200])
@pytest.mark.parametrize("words", [0, 1, 300])
def test_a_sample_fits_the_positions_of_the_model(tokenizer, positions, words):
    """Reference: what the model computes: no more positions than it has, of a long prompt the end, and new tokens."""
    model, seen = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=positions), []
    encoder = DocumentEncoder(tokenizer)
    generate = model.generate

    def whole(ids, **options):
        # An end of the text that is drawn early would hide what does not fit.
        seen.append((ids[0].tolist(), generate(ids, **{**options, "eos_token_id": None})[0].tolist()))
        return torch.tensor([seen[-1][1]])

    prompt = "the cat " * words
    with mock.patch.object(model, "generate", whole):
        sample(make_engine(model), tokenizer, encoder, prompt, 7)
    ((given, made),) = seen
    asked = encoder.prompt_ids(prompt)
    assert given == asked[-len(given) :] and given and len(given) < len(made) <= positions
    assert len(made) - len(given) == min(120, max(positions // 2, positions - len(asked)))


def test_a_stop_while_sampling_gives_all_samples_up(tokenizer):
    """They come again with the evaluation, after the resume."""
    signals, prompts = StopSignals(), ["a", "b", "c"]
    engine = make_engine(tiny_model(vocab_size=len(tokenizer)))

    def stopped(*args, **options):
        signals.signum = 15 if args[3] == "b" else 0
        return "text"

    with mock.patch("trainer.sampling.sample", stopped):
        assert samples(engine, tokenizer, DocumentEncoder(tokenizer), prompts, signals, 7, is_last=False) == ([], 15)
        signals.signum = 0
        assert samples(engine, tokenizer, DocumentEncoder(tokenizer), prompts[::2], signals, 7, is_last=False)[0] == [
            ("a", "text"),
            ("c", "text"),
        ]
