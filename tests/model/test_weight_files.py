"""Weight files from anywhere: damaged, hostile or of another kind. Each ends in one line, with nothing run or half loaded."""

import copy
import json
import math
import os
import random
import sys
import zipfile
from collections import OrderedDict

import pytest
import torch

from model import weight_files
from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.saving.weights import save_weights

SIZE = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}


def new_model(**fields) -> MiniMindForCausalLM:
    torch.manual_seed(0)
    return MiniMindForCausalLM(MiniMindConfig(**{**SIZE, **fields})).eval()


def write(folder, **fields):
    """(path of a .pth with its .json, the model)."""
    model = new_model(**fields)
    save_weights(model.state_dict(), model.config.to_dict(), folder / "w")
    return folder / "w.pth", model


def refuse(path, match, **overrides):
    with pytest.raises(ValueError, match=match) as error:
        MiniMindForCausalLM.from_pth(path, **overrides)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html><html>404</html>", "it is a web page"),
        (b'{"a": 1}', "it is JSON"),
        (b'\x40\0\0\0\0\0\0\0{"a":1}', "safetensors"),
        (b"PK\x03\x04" + b"\0" * 100, "the archive is damaged"),
        (b"\x80\x02]q\x00.", "not a "),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(tmp_path, content, match):
    (tmp_path / "w.pth").write_bytes(content)
    refuse(tmp_path / "w.pth", match)


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path):
    """100 MB of zeros in 100 kB, as no torch.save writes it."""
    path, model = write(tmp_path)
    path.with_suffix(".json").unlink()
    bomb = tmp_path / "bomb.pth"
    with zipfile.ZipFile(path) as plain, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
        packed.writestr("archive/data/999", bytes(100 << 20))
    assert bomb.stat().st_size < 1 << 20
    refuse(bomb, "compressed archive")


def test_an_archive_whose_files_share_their_bytes_is_refused(tmp_path):
    """Each of a thousand names would give the same megabyte again."""
    bomb = tmp_path / "bomb.pth"
    with zipfile.ZipFile(bomb, "w") as archive:
        archive.writestr("a/data/0", bytes(1 << 20))
        for number in range(1, 1000):
            again = copy.copy(archive.filelist[0])
            again.filename = f"a/data/{number}"
            archive.filelist.append(again)
    with zipfile.ZipFile(bomb) as archive:
        assert sum(entry.file_size for entry in archive.infolist()) == 1000 << 20
    refuse(bomb, "compressed archive")


def changed(state, change):
    key = "model.layers.0.mlp.up_proj.weight"
    tensor = state[key]
    if change == "sparse":
        state[key] = tensor.float().to_sparse()
    elif change == "integers":
        state[key] = tensor.to(torch.int32)
    elif change == "nan":
        state[key] = torch.full_like(tensor, math.nan)
    elif change == "huge claim":
        state[key] = torch.zeros(1).expand(100_000, 100_000)
    elif change == "no dimensions":
        state["model.embed_tokens.weight"] = torch.tensor(1.0)
    elif change == "nested":
        state = {"model": state}
    elif change == "key is a number":
        state[7] = tensor
    elif change == "layer without end":
        state["model.layers.999999999999.mlp.up_proj.weight"] = tensor
    return state


CHANGES = {
    "sparse": "up_proj.weight is no plain block of floating-point numbers",
    "integers": "up_proj.weight is no plain block of floating-point numbers",
    "nan": "up_proj.weight has numbers that are NaN",
    "huge claim": "up_proj.weight is no plain block of floating-point numbers",
    "no dimensions": r"is \[\]|of another shape",
    "nested": "weights in its entry .model.",
    "key is a number": "'7' is no tensor",
    "layer without end": "unexpected keys|in the model",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.*no .json beside it", "ignore::UserWarning")
def test_wrong_tensors_are_named(tmp_path, change):
    path, model = write(tmp_path)
    path.with_suffix(".json").unlink()
    state = OrderedDict((key, tensor.clone()) for key, tensor in model.state_dict().items())
    torch.save(changed(state, change), path)
    refuse(path, CHANGES[change])


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"num_experts": 10**9, "use_moe": True},
    ],
)
def test_a_config_of_absurd_size_takes_no_memory(tmp_path, fields):
    """In a process whose memory is limited to a little more than torch itself takes."""
    path, model = write(tmp_path)
    config = json.loads(path.with_suffix(".json").read_text())
    config.pop("weights_sha256")
    config.pop("n_routed_experts")
    path.with_suffix(".json").write_text(json.dumps({**config, **fields}))
    refuse(path, "the config is that of a model with|is not")


def test_every_flipped_bit_is_noticed(tmp_path):
    path, _ = write(tmp_path)
    whole = path.read_bytes()
    generator = random.Random(0)
    for _ in range(60):
        flipped = bytearray(whole)
        bit = generator.randrange(8 * len(whole))
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        refuse(path, "its SHA-256 is not the one|not a readable")
    path.write_bytes(whole)
    MiniMindForCausalLM.from_pth(path)


def test_a_crash_between_the_two_files_leaves_a_good_pair(tmp_path, monkeypatch):
    """The .json is renamed first: with the .pth of before beside it, both must still load."""
    path, _ = write(tmp_path)
    before = path.read_bytes()
    other = new_model()
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    save_weights(other.state_dict(), other.config.to_dict(), tmp_path / "w")
    after = path.read_bytes()
    assert after != before
    for content in (before, after):
        path.write_bytes(content)
        MiniMindForCausalLM.from_pth(path)


def test_a_file_without_a_digest_loads_as_ever(tmp_path):
    """Those of others have none; the public code loads ours by torch.load alone."""
    path, model = write(tmp_path)
    config = json.loads(path.with_suffix(".json").read_text())
    assert not hasattr(MiniMindForCausalLM.from_pth(path).config, "weights_sha256")
    del config["weights_sha256"]
    path.with_suffix(".json").write_text(json.dumps(config))
    loaded = MiniMindForCausalLM.from_pth(path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.half().float())


def test_weights_beyond_float16_are_saved_in_float32_and_said(tmp_path, capsys):
    model = new_model()
    model.model.norm.weight.data[0] = 1e6
    save_weights(model.state_dict(), model.config.to_dict(), tmp_path / "w")
    assert "model.norm.weight reaches 1e+06" in capsys.readouterr().out
    loaded = MiniMindForCausalLM.from_pth(tmp_path / "w.pth")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_a_checkpoint_is_told_from_weights(tmp_path):
    torch.save({"format": 1, "model": {}, "engine": {}, "progress": {}}, tmp_path / "update_00000001.pt")
    with pytest.raises(ValueError, match="a checkpoint to resume from; the weights are the .pth beside its folder"):
        weight_files.read_state_dict(tmp_path / "update_00000001.pt")


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("rms_norm_eps", "x", "rms_norm_eps='x' is not a finite number from 0 on"),
        ("tie_word_embeddings", "no", "tie_word_embeddings='no' is not true or false"),
        ("n_routed_experts", 10_000_000, "are one field"),
    ],
)
def test_a_field_of_another_kind_names_the_file_and_itself(tmp_path, name, value, match):
    path, model = write(tmp_path)
    beside = path.with_suffix(".json")
    beside.write_text(json.dumps({**json.loads(beside.read_text()), name: value}))
    refuse(path, rf"w\.json: .*{match}")


@pytest.mark.parametrize(
    "foreign",
    [
        {"attn_implementation": "evil/repo"},
        {"_attn_implementation": "hub/evil"},
    ],
)
def test_fields_that_are_none_of_ours_reach_nobody(tmp_path, foreign):
    """transformers would import or fetch what they name. Reference: the weights without them."""
    path, model = write(tmp_path)
    beside = path.with_suffix(".json")
    beside.write_text(json.dumps({**json.loads(beside.read_text()), **foreign}))
    loaded = MiniMindForCausalLM.from_pth(path)
    assert all(torch.equal(p.half(), loaded.state_dict()[name].half()) for name, p in model.state_dict().items())


def test_a_config_beside_the_weight_of_any_size_or_kind_is_not_read_to_its_end(tmp_path):
    path, _ = write(tmp_path)
    beside = path.with_suffix(".json")
    with open(beside, "r+b") as file:
        file.truncate(5_000_000_000)
    refuse(path, "larger than 1,048,576 bytes")
    beside.unlink()
    beside.mkdir()
    refuse(path, "not a regular file")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders")
@pytest.mark.parametrize("ending", [".pth", ".json"])
def test_a_pipe_in_the_place_of_a_file_is_told_and_not_waited_for(tmp_path, ending):
    path, _ = write(tmp_path)
    path.with_suffix(ending).unlink()
    os.mkfifo(path.with_suffix(ending))
    refuse(path, "not a regular file")
