"""The decoding loop against transformers: its greedy search on the same model, and its samplers."""

from functools import partial

import pytest
import torch
from transformers.generation import logits_process

from model.decoding import Sampling, decode, draw, fuse, penalised
from tests.helpers import tiny_model

greedy = partial(Sampling, temperature=0.0, top_p=1.0)
KINDS = {
    "minimind2": {},
    "minimind3": {"generation": "minimind3", "num_key_value_heads": 2},
    "minimind2 with experts": {"use_moe": True},
    "minimind3 with experts, YaRN": {"generation": "minimind3", "use_moe": True, "inference_rope_scaling": True},
}


def lively(**fields):
    """A model whose greedy text does not repeat itself: larger weights than a fresh model's."""
    model = tiny_model(**fields).eval()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter *= 3
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_transformers(kind):
    """500 tokens by the model's own forward pass and by fused layers, alone and in a batch of different lengths."""
    model = lively(**KINDS[kind])
    prompts = [[1, 5, 9, 40], [1, 7], [1, 90, 3, 8, 8, 60, 17]]
    options = {"max_new_tokens": 500, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]
    assert all(len(set(row)) > 20 for row in wanted)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert decode(model, prompts, greedy(500)) == wanted
    fuse(model)
    assert model.fused_layers and [decode(model, [ids], greedy(500))[0] for ids in prompts] == wanted
    assert decode(model, prompts, greedy(500)) == wanted
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_row_ends_in_an_end_and_the_others_go_on():
    model = lively()
    prompts = [[1, 5], [1, 6]]
    (first, second), seen = decode(model, prompts, greedy(40)), []
    end = first[3]
    rows = decode(model, prompts, greedy(40), [end], lambda tokens, logits: seen.append((tokens, logits)))
    assert rows[0] == first[: first.index(end) + 1]
    assert rows[1] == (second[: second.index(end) + 1] if end in second else second)
    assert len(seen) == max(map(len, rows)) and all(torch.equal(logits.argmax(1), tokens) for tokens, logits in seen)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj", "lm_head"])
@pytest.mark.parametrize("kind", ["hook", "adapter"])
def test_what_stands_in_for_a_product_is_called(name, kind):
    """The text changes, with `fuse` as without."""
    model = lively()
    plain = decode(model, [[1, 5]], greedy(20))
    linear = model.get_submodule(name)
    if kind == "hook":
        linear.register_forward_hook(lambda module, args, output: -2 * output)
    else:
        norm = torch.nn.LayerNorm(linear.out_features)
        adapter = torch.nn.Sequential(linear, norm)
        adapter.weight = linear.weight
        norm.weight.data.neg_()
        model.set_submodule(name, adapter)
    fuse(model)
    assert model.fused_layers is None and decode(model, [[1, 5]], greedy(20)) != plain


def test_logits_that_are_no_numbers_are_one_line():
    model = lively()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits are NaN"):
        decode(model, [[1, 5]], Sampling(4, 0.8, 0.9))


def test_half_precision_is_that_of_the_weights():
    """Reference: fp32. The residual stream stays in it, so the logits differ by the rounding of the products alone."""
    model, seen = lively(), []
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        fuse(model)
        decode(model, [[1, 5, 9]], greedy(2), on_tokens=lambda tokens, logits: seen.append(logits))
    single, half = seen[1], seen[3]
    assert half.dtype == torch.bfloat16 and (half.float() - single).abs().max() < 0.03 * single.abs().max()


@pytest.mark.parametrize("top_k, top_p, spread", [(0, 1.0, 1), (7, 1.0, 1), (0, 0.9, 3), (0, 0.98, 0.1), (20, 0.6, 1)])
def test_tokens_are_drawn_from_the_distribution_of_transformers(top_k, top_p, spread):
    """Never a token that its samplers leave out, and the others in their shares."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 400, generator=generator) * spread
    wanted = logits_process.TemperatureLogitsWarper(0.8)(None, logits)
    if top_k:
        wanted = logits_process.TopKLogitsWarper(top_k)(None, wanted)
    wanted = logits_process.TopPLogitsWarper(top_p)(None, wanted).softmax(1)[0]
    torch.manual_seed(0)
    n = 40_000
    drawn = draw(logits.expand(n, -1), Sampling(1, 0.8, top_p, top_k)).bincount(minlength=400)
    assert not drawn[wanted == 0].any()
    deviation = (drawn / n - wanted).abs() / (wanted * (1 - wanted) / n).sqrt().clamp(min=1 / n)
    assert deviation.max() < 5


def test_the_repetition_penalty_is_that_of_transformers():
    logits, ids = torch.randn(2, 50), torch.randint(0, 50, (2, 9))
    seen = torch.zeros(2, 50, dtype=torch.bool).scatter_(1, ids, True)
    wanted = logits_process.RepetitionPenaltyLogitsProcessor(1.3)(ids, logits)
    assert torch.equal(penalised(logits, seen, 1.3), wanted)
