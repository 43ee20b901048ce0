"""from_pth: strict loading, config from the .json beside the file or from keys and shapes, and one-line errors."""

import json
import warnings

import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore:.*no .json beside it")  # what most tests here are about
SIZE = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2}  # 8 / 2 or 8 / 4 heads: each generation's own
KINDS = {
    "minimind2": {},
    "minimind2_moe": {"use_moe": True, "num_experts": 5, "n_shared_experts": 2, "moe_intermediate_size": 48},
    "minimind3": {"generation": "minimind3", "head_dim": 16, "intermediate_size": 80},
    "minimind3_moe": {"generation": "minimind3", "use_moe": True, "num_experts": 3},
}


def write(path, **fields):
    """A half-precision file as the trainer leaves it, without the config; the model has its values."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(**{**SIZE, **fields})).half().float().eval()
    torch.save({key: tensor.half() for key, tensor in model.state_dict().items()}, path)
    return model


def raises(match, path, **overrides):
    with pytest.raises(ValueError, match=match) as error:
        MiniMindForCausalLM.from_pth(path, **overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_config_is_inferred_from_keys_and_shapes(kind, tmp_path):
    path = tmp_path / "weights.pth"
    model = write(path, **KINDS[kind])
    loaded = MiniMindForCausalLM.from_pth(path)
    fields = (
        "generation",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "use_moe",
    )
    fields += ("num_experts", "n_shared_experts", "moe_intermediate_size") if "moe" in kind else ("intermediate_size",)
    assert {f: getattr(loaded.config, f) for f in fields} == {f: getattr(model.config, f) for f in fields}
    assert loaded.dtype == torch.float32 and not loaded.training
    ids = torch.randint(0, 61, (2, 9))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_json_beside_the_file_tells_what_keys_cannot(tmp_path):
    path = tmp_path / "weights.pth"
    model = write(path, num_attention_heads=16, num_key_value_heads=2, use_moe=True, num_experts_per_tok=3)
    raises("do not tell num_attention_heads; pass it", path)
    path.with_suffix(".json").write_text(json.dumps(model.config.to_dict()))
    loaded = MiniMindForCausalLM.from_pth(path)
    assert loaded.config.num_attention_heads == 16 and loaded.config.num_experts_per_tok == 3
    loaded = MiniMindForCausalLM.from_pth(str(path), num_experts_per_tok=1, aux_loss_alpha=0.5)  # overrides win
    assert loaded.config.num_experts_per_tok == 1 and loaded.config.router_aux_loss_coef == 0.5


def test_what_no_shape_tells_is_named(tmp_path):
    """A top-1 mixture and a top-2 one have the same keys and shapes: the default is taken, and said."""
    path = tmp_path / "weights.pth"
    write(path, use_moe=True, num_experts_per_tok=1)
    with pytest.warns(UserWarning, match="num_attention_heads=8, num_experts_per_tok=2 taken from minimind2"):
        MiniMindForCausalLM.from_pth(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MiniMindForCausalLM.from_pth(path, num_attention_heads=8, num_experts_per_tok=1)


def test_overrides_fill_what_the_keys_leave_open(tmp_path):
    path = tmp_path / "weights.pth"
    model = write(path, num_attention_heads=16, num_key_value_heads=2)
    for overrides in ({"num_attention_heads": 16}, {"head_dim": 4}):
        loaded = MiniMindForCausalLM.from_pth(path, **overrides)
        assert loaded.config.num_key_value_heads == 2 and loaded.config.num_attention_heads == 16
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    raises("do not fit q_proj with 64 rows", path, num_attention_heads=3)
    raises("do not fit q_proj with 64 rows", path, head_dim=48)
    raises("num_head is not a field", path, num_head=3)
    write(path, generation="minimind2", use_moe=True, num_experts=1, num_experts_per_tok=1)
    raises("do not tell num_experts_per_tok; pass it", path)


def test_only_known_position_tables_are_ignored(tmp_path):
    path = tmp_path / "weights.pth"
    model = write(path)
    state = {key: tensor.half() for key, tensor in model.state_dict().items()}
    tables = {"model.freqs_cos": torch.ones(4, 8), "model.freqs_sin": torch.ones(4, 8), "pos_cis": torch.ones(4)}
    torch.save(state | tables, path)
    MiniMindForCausalLM.from_pth(path)
    torch.save(state | {"model.surprise": torch.ones(1)}, path)
    raises(r"unexpected keys \(1\): model.surprise", path)


def test_errors_are_one_line(tmp_path):
    """Loading is strict and weights-only: a file of another kind or shape says what is wrong."""
    path = tmp_path / "weights.pth"
    raises("No such file", path)
    path.write_bytes(b"nothing of the kind")
    raises("not a readable weight file", path)
    torch.save([1, 2], path)
    raises("not a flat state dict", path)
    torch.save({"a": torch.ones(1)}, path)
    raises("model.embed_tokens.weight is missing", path)
    model = write(path)
    state = {key: tensor.half() for key, tensor in model.state_dict().items()}
    torch.save({key: tensor for key, tensor in state.items() if "layers.0.mlp.up_proj" not in key}, path)
    raises(r"missing keys \(1\): model.layers.0.mlp.up_proj.weight", path)
    torch.save(state | {"model.norm.weight": torch.ones(63)}, path)
    raises(r"model.norm.weight is \[63\] in the file, \[64\] in the model", path)
    torch.save(state | {"lm_head.weight": state["lm_head.weight"] + 1}, path)
    raises("tie_word_embeddings=False", path)
    loaded = MiniMindForCausalLM.from_pth(path, tie_word_embeddings=False)
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    torch.save(state, path)
    path.with_suffix(".json").write_text("{")
    raises("not JSON", path)
    path.with_suffix(".json").write_text(json.dumps({**model.config.to_dict(), "vocab_size": 60}))
    raises(r"is \[61, 64\] in the file, \[60, 64\] in the model", path)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_weights_of_wrapped_models_are_read(prefix, tmp_path):
    """As DistributedDataParallel and torch.compile name them, the whole model or each block compiled."""
    path = tmp_path / "weights.pth"
    model = write(path)
    state = {f"{prefix}{key}".replace("layers.0.", "layers.0._orig_mod."): t for key, t in model.state_dict().items()}
    torch.save(state, path)
    loaded = MiniMindForCausalLM.from_pth(path).state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items())


def test_weights_inside_a_checkpoint_are_named(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"model": write(path).state_dict(), "optimizer": {}, "epoch": 1}, path)
    raises("weights in its entry 'model'", path)
