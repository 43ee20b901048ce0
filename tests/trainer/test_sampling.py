"""Texts that the model in training writes. References: torch's random state, runs in float32 and without ranks."""

from unittest import mock

import pytest

from common.errors import UserError
from dataset.tokenizing.encoder import DocumentEncoder
from model.decoding import decode
from tests.helpers import tiny_model
from tests.trainer.test_engine import make_engine
from trainer import evaluation
from trainer.evaluation import Sampler, read_prompts
from trainer.machine.command_line import StopSignals


def test_samples_have_no_dropout(tokenizer):
    """Reference: a model of the same weights that is trained without it. That training goes on as without samples: test_evaluation.py."""
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


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for prompt, named in (("caf\udce9", "caf"), (tmp_path / "latin", "caf"), (tmp_path / "no.txt", "no.txt: No such")):
        with pytest.raises(UserError, match=named):
            read_prompts([str(prompt)])
