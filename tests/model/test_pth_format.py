"""from_pth: strict loading, the config from the .json or from keys and shapes; files that nobody should trust end in one line."""

import copy
import json
import math
import os
import random
import warnings
import zipfile

import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.helpers import change_json
from trainer.saving.weights import save_pth

# What most tests here are about
pytestmark = pytest.mark.filterwarnings("ignore:.*no .json beside it", "ignore::UserWarning")
# 8 / 2 or 8 / 4 heads: each generation's own
SIZE = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2}
KINDS = {
    "minimind2": {},
    "minimind2_moe": {"use_moe": True, "num_experts": 5, "n_shared_experts": 2, "moe_intermediate_size": 48},
    "minimind3": {"generation": "minimind3", "head_dim": 16, "intermediate_size": 80},
    "minimind3_moe": {"generation": "minimind3", "use_moe": True, "num_experts": 3},
}
KEY = "model.layers.0.mlp.up_proj.weight"
NO_BLOCK = f"{KEY} is no plain block of floating-point numbers"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "w.pth"


def new_model(**fields):
    """One whose weights half precision holds."""
    torch.manual_seed(0)
    return MiniMindForCausalLM(MiniMindConfig(**{**SIZE, **fields})).half().float().eval()


def write(path, **fields):
    """A half-precision file without a config, as the public code leaves it; the model with its values."""
    model = new_model(**fields)
    torch.save({key: tensor.half() for key, tensor in model.state_dict().items()}, path)
    return model


def write_pair(path, **fields):
    """The same with the .json, as the trainer leaves it."""
    model = new_model(**fields)
    save_pth(model.state_dict(), model.config.to_dict(), path.with_suffix(""))
    return model


def refuse(path, match, **overrides):
    with pytest.raises((ValueError, OSError), match=match) as error:
        MiniMindForCausalLM.from_pth(path, **overrides)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def are_equal(loaded, model):
    state = loaded.state_dict()
    return all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_config_is_inferred_from_keys_and_shapes(kind, path):
    model = write(path, **KINDS[kind])
    loaded = MiniMindForCausalLM.from_pth(path)
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict() or "moe" in kind
    assert loaded.dtype == torch.float32 and not loaded.training
    ids = torch.randint(0, 61, (2, 9))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_json_beside_the_file_tells_what_keys_cannot(path):
    model = write(path, num_attention_heads=16, num_key_value_heads=2, use_moe=True, num_experts_per_tok=3)
    refuse(path, "num_attention_heads does not follow from the shapes; pass it")
    path.with_suffix(".json").write_text(json.dumps(model.config.to_dict()))
    loaded = MiniMindForCausalLM.from_pth(path)
    assert loaded.config.num_attention_heads == 16 and loaded.config.num_experts_per_tok == 3
    loaded = MiniMindForCausalLM.from_pth(str(path), num_experts_per_tok=1, aux_loss_alpha=0.5)
    assert loaded.config.num_experts_per_tok == 1 and loaded.config.router_aux_loss_coef == 0.5
    theirs = {**write(path, generation="minimind3").config.to_dict(), "generation": None}
    path.with_suffix(".json").write_text(json.dumps(theirs))
    assert MiniMindForCausalLM.from_pth(path).config.generation == "minimind3"


def test_what_no_shape_tells_is_named(path):
    """A top-1 mixture and a top-2 one have the same keys and shapes: the default is taken, and said."""
    write(path, use_moe=True, num_experts_per_tok=1)
    with pytest.warns(UserWarning, match="num_attention_heads=8, num_experts_per_tok=2 taken from minimind2"):
        MiniMindForCausalLM.from_pth(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MiniMindForCausalLM.from_pth(path, num_attention_heads=8, num_experts_per_tok=1)


def test_overrides_fill_what_the_keys_leave_open(path):
    model = write(path, num_attention_heads=16, num_key_value_heads=2)
    for overrides in ({"num_attention_heads": 16}, {"head_dim": 4}):
        loaded = MiniMindForCausalLM.from_pth(path, **overrides)
        assert loaded.config.num_key_value_heads == 2 and loaded.config.num_attention_heads == 16
        assert are_equal(loaded, model)
    refuse(path, "num_attention_heads=3 does not fit q_proj with 64 rows", num_attention_heads=3)
    refuse(path, "num_head is not a field", num_head=3)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_weights_of_wrapped_models_and_with_position_tables_are_read(prefix, path):
    """As DistributedDataParallel and torch.compile name them, the whole model or each block compiled."""
    model = write(path)
    state = {f"{prefix}{key}".replace("layers.0.", "layers.0._orig_mod."): t for key, t in model.state_dict().items()}
    state = {**state, "model.freqs_cos": torch.ones(4, 8), "pos_cis": torch.ones(4)}
    # In a checkpoint they have an entry of their own.
    nested = ({"model": {"state_dict": state}}, {"state_dict": {"model": state}, "model": None})
    for content in (state, {"model": state, "epoch": 3}, *nested):
        torch.save(content, path)
        assert are_equal(MiniMindForCausalLM.from_pth(path), model)
    endless = {}
    endless["model"] = endless
    torch.save(endless, path)
    refuse(path, "model is no plain block")


@pytest.mark.parametrize(
    "content, match",
    [
        (b"", "torch.save did not write it"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>404</html>", "a web page"),
        (b"PK\x03\x04" + b"\0" * 100, "the archive is damaged"),
        (b"\x80\x02]q\x00.", "not a "),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(path, content, match):
    refuse(path, "No such file")
    path.write_bytes(content)
    refuse(path, match)


@pytest.mark.parametrize(
    "change, match",
    [
        ({KEY: None}, f'Missing key.*"{KEY}"'),
        ({"model.surprise": lambda t: torch.ones(1)}, 'Unexpected key.*"model.surprise"'),
        ({"model.norm.weight": lambda t: torch.ones(63)}, r"model.norm.weight: .*\[63\].*\[64\]"),
        ({"lm_head.weight": lambda t: t + 1}, "must say .tie_word_embeddings.: false"),
        ({KEY: lambda t: t.float().to_sparse()}, NO_BLOCK),
        ({KEY: lambda t: t.to(torch.int32)}, NO_BLOCK),
        ({KEY: lambda t: t.to(torch.float8_e4m3fn)}, f"{NO_BLOCK} in 16 bits or more"),
        ({KEY: lambda t: torch.full_like(t, math.nan)}, f"{KEY} has NaN"),
        # 40 GB in a few bytes
        ({KEY: lambda t: torch.zeros(1).expand(100_000, 100_000)}, NO_BLOCK),
        ({"model.embed_tokens.weight": lambda t: torch.tensor(1.0)}, "embed_tokens.weight is missing, or of another"),
        ({7: lambda t: torch.ones(1)}, "not a flat state dict"),
    ],
)
def test_wrong_tensors_are_named(path, change, match):
    state = dict(write(path).half().state_dict())
    for key, make in change.items():
        tensor = state.pop(key, None)
        if make is not None:
            state[key] = make(tensor)
    torch.save(state, path)
    refuse(path, match)
    if "lm_head.weight" in change:
        loaded = MiniMindForCausalLM.from_pth(path, tie_word_embeddings=False)
        assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


def test_a_config_that_is_none_or_of_another_model(path):
    model = write(path)
    path.with_suffix(".json").write_text("{")
    refuse(path, "not JSON")
    path.with_suffix(".json").write_text(json.dumps({**model.config.to_dict(), "vocab_size": 60}))
    refuse(path, "they have vocab_size=61$")
    change_json(path.with_suffix(".json"), n_routed_experts=10_000)
    refuse(path, r"w\.json: .*are one field")
    path.with_suffix(".json").write_text(json.dumps(model.config.to_dict()))
    for changes, match in (
        ({"num_hidden_layers": 50_000_000}, "they have num_hidden_layers=2$"),
        ({"hidden_size": 128, "intermediate_size": 512}, "they have hidden_size=64, num_hidden_layers=2, .*size=192$"),
        ({"num_hidden_layers": "8"}, "num_hidden_layers='8' is not a whole number"),
        ({**SIZE, "vocab_size": -1}, "not the weights of this config: they have vocab_size=61"),
        ({"vocab_size": 61, "weights_sha256": 8}, "its SHA-256 is not the one"),
    ):
        change_json(path.with_suffix(".json"), **changes)
        refuse(path, match)
    with open(path.with_suffix(".json"), "r+b") as file:
        file.truncate(5_000_000_000)
    refuse(path, "larger than 1,048,576 bytes")


def test_a_compressed_archive_is_refused_before_it_is_unpacked(path, tmp_path):
    """100 MB of zeros in 100 kB, as no torch.save writes it."""
    write(path)
    bomb = tmp_path / "bomb.pth"
    with zipfile.ZipFile(path) as plain, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
        packed.writestr("archive/data/999", bytes(100 << 20))
    assert bomb.stat().st_size < 1 << 20
    refuse(bomb, "compressed archive")


def test_an_archive_whose_files_share_their_bytes_is_refused(path):
    """Each of a thousand names would give the same megabyte again."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data/0", bytes(1 << 20))
        for number in range(1, 1000):
            again = copy.copy(archive.filelist[0])
            again.filename = f"a/data/{number}"
            archive.filelist.append(again)
    refuse(path, "compressed archive")


def test_every_flipped_bit_is_noticed(path):
    write_pair(path)
    whole = path.read_bytes()
    generator = random.Random(0)
    for _ in range(20):
        flipped = bytearray(whole)
        bit = generator.randrange(8 * len(whole))
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        refuse(path, "its SHA-256 is not the one|not a readable")
    path.write_bytes(whole)
    MiniMindForCausalLM.from_pth(path)


def test_fields_that_are_none_of_ours_reach_nobody(path):
    """transformers would import or fetch what they name. Reference: the weights without them."""
    model = write_pair(path)
    change_json(path.with_suffix(".json"), attn_implementation="evil/repo", _attn_implementation="hub/evil")
    loaded = MiniMindForCausalLM.from_pth(path)
    assert are_equal(loaded, model) and not hasattr(loaded.config, "weights_sha256")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
@pytest.mark.parametrize("ending", [".pth", ".json"])
def test_a_pipe_in_the_place_of_a_file_is_told_and_not_waited_for(path, ending):
    write_pair(path)
    path.with_suffix(ending).unlink()
    os.mkfifo(path.with_suffix(ending))
    refuse(path, "not a regular file")


def test_a_crash_between_the_two_files_leaves_a_good_pair(path):
    """The .json is renamed first: with the .pth of before beside it, both must still load."""
    model = write_pair(path)
    before = path.read_bytes()
    halved = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    save_pth(halved, model.config.to_dict(), path.with_suffix(""))
    after = path.read_bytes()
    assert after != before
    for content in (before, after):
        path.write_bytes(content)
        MiniMindForCausalLM.from_pth(path)


def test_weights_beyond_float16_are_saved_in_float32_and_said(path, capsys):
    model = new_model()
    model.model.norm.weight.data[0] = 1e6
    save_pth(model.state_dict(), model.config.to_dict(), path.with_suffix(""))
    assert "model.norm.weight reaches 1e+06" in capsys.readouterr().out
    assert are_equal(MiniMindForCausalLM.from_pth(path), model)
