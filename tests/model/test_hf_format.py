"""model/hf_format.py: folders of public models against transformers' own logits, and folders that nobody should trust."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.config import ModelConfig
from model.hf_format import load_folder, read_config
from model.model_minimind import MiniMindForCausalLM
from tests.model.public import KINDS, change_config, public_model, write_public
from trainer.pretrain.initial_model import init_model

EMBEDDINGS = "model.embed_tokens.weight"
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "beta_fast": 32, "beta_slow": 1}
YARN |= {"original_max_position_embeddings": 64}
BIASES = {"attention_bias": True, "mlp_bias": True}


def load(folder):
    return load_folder(MiniMindForCausalLM, folder, read_config(folder))


def logits(model):
    ids = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids).logits


def difference(first, second):
    """The largest difference of a logit, relative to the largest logit."""
    ours, theirs = logits(first), logits(second)
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("kind, shard", [*((kind, "10MB") for kind in KINDS), ("qwen3_moe", "20KB")])
def test_the_logits_are_those_of_transformers(tmp_path, kind, shard):
    theirs = write_public(tmp_path, kind, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    ours = load(tmp_path)
    assert not ours.training and {p.dtype for p in ours.parameters()} == {torch.float32}
    assert difference(ours, theirs) <= (1e-5 if "moe" in kind else 0)
    if shard == "20KB":
        shutil.copy(next(tmp_path.glob("model-00001-of-*")), tmp_path / "model-00001-of-00001.safetensors")
        with pytest.raises(ValueError, match="or there are those of several models"):
            load(tmp_path)


def test_a_folder_of_save_pretrained(tmp_path):
    """And a .pth of the same model, by a config with a field that no shape tells."""
    config = ModelConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, rope_theta=1e4)
    own = MiniMindForCausalLM(config).eval()
    own.save_pretrained(tmp_path)
    assert difference(load(tmp_path), own) == 0
    # As MiniMind's own conversion writes it; both formats are read without running code.
    (tmp_path / "model.safetensors").unlink()
    torch.save({name: tensor.half() for name, tensor in own.state_dict().items()}, tmp_path / "pytorch_model.bin")
    assert difference(load(tmp_path), own) < 1e-2
    torch.save({"model": own}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin: .*Python objects besides tensors"):
        load(tmp_path)
    torch.save(own.state_dict(), tmp_path / "pretrain_32.pth")
    assert difference(init_model(MiniMindForCausalLM, config, "pretrain", tmp_path, "default"), own) == 0


@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": None}])
def test_experts_whose_weights_are_not_normalised(tmp_path, changes):
    """Without the field their class does not normalise them either."""
    theirs = write_public(tmp_path, "qwen3_moe", norm_topk_prob=False)
    normalised = public_model("qwen3_moe", norm_topk_prob=True)
    change_config(tmp_path, **changes)
    ours = load(tmp_path)
    assert difference(ours, theirs) <= 1e-5 < difference(normalised, theirs)
    assert not ours.config.norm_topk_prob


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_config_of_transformers_4_is_read_too(tmp_path, kind):
    """It has rope_theta, rope_scaling and num_experts in place of rope_parameters and num_local_experts."""
    theirs = write_public(tmp_path, kind)
    experts = {"num_experts": 4, "num_local_experts": None} if "moe" in kind else {}
    change_config(tmp_path, rope_parameters=None, rope_theta=50_000, layer_types=None, **experts)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": None}))
    assert difference(load(tmp_path), theirs) <= 1e-5


def test_the_defaults_of_the_class_stand_in_for_fields_that_are_missing(tmp_path):
    """Reference: the same file by transformers' own class. The first Llamas say neither of these."""
    theirs = write_public(tmp_path, "llama", num_key_value_heads=4, head_dim=8, rms_norm_eps=1e-6, rope_parameters=None)
    names = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")
    change_config(tmp_path, **dict.fromkeys(names))
    assert difference(load(tmp_path), theirs) == 0
    assert read_config(tmp_path).rope_theta == 10_000 and not read_config(tmp_path).tie_word_embeddings


def test_a_tied_head_that_is_stored_all_the_same_must_be_equal(tmp_path):
    """Qwen3-0.6B is published like that."""
    theirs = write_public(tmp_path, "qwen3")
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "lm_head.weight": state[EMBEDDINGS].clone()}, tmp_path / "model.safetensors")
    assert difference(load(tmp_path), theirs) == 0
    save_file({**state, "lm_head.weight": state[EMBEDDINGS] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight is not model.embed_tokens.weight"):
        load(tmp_path)


def test_the_weights_do_not_hang_on_the_file(tmp_path):
    """A file in float32 is mapped into memory. Weights that were parts of it would change, or the process would die."""
    theirs = write_public(tmp_path, "llama")
    ours = load(tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(100)
    assert difference(ours, theirs) == 0


def test_other_forms_are_refused_in_one_line(tmp_path):
    for kind, changes in (
        ("llama", {"model_type": "mistral"}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"quantization_config": {"bits": 4}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e4, "factor": 8}}),
        # Where it is missing, their YaRN makes the logits larger by a factor that follows from the others.
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"bos_token_id": "one"}),
        ("qwen3", {"use_sliding_window": True}),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 50}),
        # Theirs normalises a single weight, minimind2 does not.
        ("qwen2_moe", {"num_experts_per_tok": 1}),
    ):
        write_public(tmp_path, kind)
        change_config(tmp_path, **changes)
        with pytest.raises(ValueError) as refused:
            read_config(tmp_path)
        line = str(refused.value)
        assert line.startswith(f"{tmp_path}/config.json: ") and "\n" not in line and len(line) < 500
        assert any(name in line for name in (*changes, "norm_topk_prob"))


@pytest.mark.parametrize(
    "kind, fields, name, change, message",
    [
        ("llama", BIASES, "up_proj.bias", lambda bias: bias + 0.5, "is not zero: MiniMind has no such part"),
        ("qwen2_moe", {}, "shared_expert_gate.weight", lambda weight: weight + 0.5, "is not zero"),
        # Quantised ones, of which 0 to 255 stand for something else
        ("llama", {}, "up_proj.weight", lambda weight: weight.to(torch.uint8), "is torch.uint8; float32, float16 and"),
    ],
)
def test_weights_that_minimind_has_not_are_refused(tmp_path, kind, fields, name, change, message):
    write_public(tmp_path, kind, **fields)
    load(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    tensor = f"model.layers.1.mlp.{name}"
    save_file({**state, tensor: change(state[tensor])}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} {message}"):
        load(tmp_path)


def test_a_config_that_its_files_do_not_bear_out_builds_nothing(tmp_path):
    for changes, message in (
        (
            {"num_hidden_layers": 1, "layer_types": None},
            "not the weights of this config: they have num_hidden_layers=2",
        ),
        ({"tie_word_embeddings": False}, "Missing key.*lm_head.weight"),
        # Their class would make a list of a text for each.
        ({"num_hidden_layers": 10**12, "layer_types": None}, "config.json: num_hidden_layers is more than 2,000"),
    ):
        write_public(tmp_path, "qwen3")
        change_config(tmp_path, **changes)
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0\0\0\x40\0\0\0\0{}", b"\x80\x04pickle", None])
def test_a_file_that_is_no_safetensors(tmp_path, content):
    """None: a download that is not complete."""
    write_public(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors: not a readable .safetensors") as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [None, "", "3", "[" * 100_000, "{}" + " " * (1 << 20)])
def test_a_config_that_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError) as refused:
        read_config(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path}/config.json: ") and "\n" not in str(refused.value)


def test_a_config_that_names_programs_runs_none(tmp_path):
    """auto_map and an attention of a hub are what transformers would fetch; nothing here reads them."""
    write_public(tmp_path, "llama")
    change_config(tmp_path, auto_map={"AutoModelForCausalLM": "evil--code.Model"}, attn_implementation="evil/attention")
    assert load(tmp_path).config._attn_implementation in ("sdpa", "eager", None)
