"""generate, caches and save/load of the installed transformers, against the same model without a cache or padding."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from model.model_minimind import MiniMindForCausalLM, MiniMindLM
from tests.helpers import tiny_model
from tests.model.test_training_losses import KINDS, every_kind
from tests.model.test_training_losses import tiny as tiny_to_train

OPTIONS = {"minimind2": {"num_beams": 2}, "minimind3": {"cache_implementation": "static"}}
OPTIONS |= {"minimind2_moe": {"use_cache": False}, "minimind3_moe": {}}


def tiny(kind="minimind2"):
    model = tiny_to_train(kind).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(0, 0.3)  # far from the uniform distribution, so that wrong attention shows
    return model


def prompt(rows=2, length=7):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(1))


@every_kind
def test_greedy_with_cache_equals_greedy_without(kind):
    model, ids = tiny(kind), prompt()
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    cached = model.generate(ids, use_cache=True, **options)
    assert cached.shape == (2, 17)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))
    assert torch.equal(cached, model.generate(ids, cache_implementation="static", disable_compile=True, **options))
    by_hand = ids
    for _ in range(10):
        by_hand = torch.cat((by_hand, model(by_hand).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(cached, by_hand)


@pytest.mark.parametrize("kind, options", OPTIONS.items())
def test_left_padded_batch_equals_single_prompts(kind, options):
    model = tiny(kind)
    prompts = [prompt(1, length)[0] for length in (9, 4, 6)]
    width = max(map(len, prompts))
    ids = torch.stack([torch.cat((torch.zeros(width - len(p), dtype=torch.long), p)) for p in prompts])
    mask = torch.stack([torch.cat((torch.zeros(width - len(p)), torch.ones(len(p)))) for p in prompts]).long()
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, disable_compile=True, **options)
    batch = model.generate(ids, attention_mask=mask, **options)
    for row, single in zip(batch, prompts, strict=True):
        alone = model.generate(single.unsqueeze(0), attention_mask=torch.ones(1, len(single)).long(), **options)
        assert row[width:].tolist() == alone[0, len(single) :].tolist()


@every_kind
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@torch.no_grad()
def test_cache_continued_by_several_tokens(kind, cache_class):
    """Chunks of 4, 1, 5 tokens through a cache give the logits of one pass; with left padding too."""
    model, ids = tiny(kind), prompt(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for padding in (None, mask):
        position_ids = None if padding is None else (mask.cumsum(1) - 1).clamp(min=0)
        full = model(ids, attention_mask=padding, position_ids=position_ids).logits
        cache = DynamicCache() if cache_class is DynamicCache else StaticCache(config=model.config, max_cache_len=12)
        parts, at = [], 0
        for size in (4, 1, 5):
            span = slice(at, at + size)
            at += size
            options = {} if padding is None else {"attention_mask": mask[:, :at], "position_ids": position_ids[:, span]}
            part = model(ids[:, span], past_key_values=cache, use_cache=True, **options)
            assert part.past_key_values is cache
            parts.append(part.logits)
        kept = mask.bool() if padding is not None else torch.ones_like(mask).bool()
        torch.testing.assert_close(torch.cat(parts, dim=1)[kept], full[kept], atol=1e-5, rtol=1e-5)
        assert torch.cat(parts, dim=1).isfinite().all()


@torch.no_grad()
def test_logits_to_keep_and_inputs_embeds():
    model, ids = tiny(), prompt()
    out = model.base_model(input_ids=ids, tokenizer=None)
    assert out.last_hidden_state.shape == (2, 7, 32) and out.past_key_values is None
    assert model(ids, None, None, True).past_key_values.get_seq_length() == 7
    assert model(ids, past_key_values=DynamicCache()).past_key_values.get_seq_length() == 7
    states = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(states[0], model.get_input_embeddings()(ids)) and torch.equal(states[-1], out.last_hidden_state)
    assert len(states) == model.config.num_hidden_layers + 1
    packed = model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2]])).logits
    torch.testing.assert_close(packed, torch.cat([model(part).logits for part in ids.split(4, dim=1)], dim=1))
    for keep, kept in ((1, slice(-1, None)), (3, slice(-3, None)), (torch.tensor([0, 4]), [0, 4])):
        torch.testing.assert_close(model(ids, logits_to_keep=keep).logits, out.logits[:, kept], atol=1e-6, rtol=1e-6)
    embeds = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, out.logits)
    assert isinstance(model(ids, return_dict=False), tuple)
    with pytest.raises(AssertionError, match="exactly one"):
        model()
    with pytest.raises(AssertionError, match="labels need the logits of all positions"):
        model(ids, labels=ids, logits_to_keep=torch.arange(6, -1, -1))


@every_kind
def test_the_class_without_this_interface_starts_with_the_same_bits(kind):
    model = tiny_model(seed=3, **KINDS[kind])
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    plain = MiniMindLM(model.config).state_dict()
    assert torch.equal(torch.get_rng_state(), drawn) and list(plain) == list(model.state_dict())
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())


@every_kind
def test_save_and_load_round_trip_is_exact(kind, tmp_path):
    model, ids = tiny(kind), prompt()
    model.save_pretrained(tmp_path)
    for loader in (MiniMindForCausalLM, AutoModelForCausalLM):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is MiniMindForCausalLM and loaded.config.to_diff_dict() == model.config.to_diff_dict()
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert set(loaded.state_dict()) == set(model.state_dict())
        assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in loaded.state_dict().items())
        with torch.no_grad():
            assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
    half = MiniMindForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert half.dtype == torch.bfloat16
    with torch.no_grad():
        assert half(ids).logits.isfinite().all()


def test_resized_embeddings_stay_tied():
    model = tiny()
    model.resize_token_embeddings(70)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model(prompt()).logits.shape[-1] == 70
