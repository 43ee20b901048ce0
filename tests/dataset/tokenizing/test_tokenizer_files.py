"""What a tokenizer's files say, here and in exports. References: the names of transformers 4, the data path, recorded digests."""

import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dataset.tokenizing import byte_level_bpe
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from scripts import export_hf
from tests.helpers import ROOT
from tests.scripts.test_export import KINDS, write

MODEL = ROOT / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)


# ---------------------------------------------------------------------------------------------- BOS


@pytest.mark.parametrize("text", ["hi", "", " 你好\n", "a<|im_end|>b"])
def test_a_plain_call_gives_what_a_document_begins_with(tokenizer, text):
    """Reference: the encoder of the trainers, without the EOS that the model is to say."""
    assert tokenizer(text, split_special_tokens=True).input_ids == DocumentEncoder(tokenizer).prompt_ids(text)
    assert tokenizer(text).input_ids == [1, *tokenizer(text, add_special_tokens=False).input_ids]
    assert tokenizer.encode(text) == tokenizer(text).input_ids


# ------------------------------------------------------------------------------- what transformers 4 reads


def check_config_of_tokenizer(path, template=byte_level_bpe.CHAT_TEMPLATE):
    """Reference: the names that transformers 4.48 to 4.57 know."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    assert fields["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert fields["additional_special_tokens"] == byte_level_bpe.CHAT_TOKENS + byte_level_bpe.SPARE_TOKENS
    assert "extra_special_tokens" not in fields
    assert fields["model_input_names"] == ["input_ids", "attention_mask"]
    assert fields["add_bos_token"] is True and fields["add_eos_token"] is False
    assert fields["chat_template"] == template
    assert not {"backend", "is_local", "local_files_only", "name_or_path"} & set(fields)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_the_names_of_transformers_4(kind, tmp_path):
    """Left out, transformers 4 takes its own default in silence: theta 10000, 128 experts."""
    weight = write(tmp_path, **KINDS[kind], rope_theta=50_000.0)
    export_hf.export(weight, tmp_path / "hf")
    check_config_of_tokenizer(tmp_path / "hf" / "tokenizer_config.json", byte_level_bpe.WITHOUT_THOUGHTS)
    assert not (tmp_path / "hf" / "chat_template.jinja").exists()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50_000.0
    assert config["torch_dtype"] == config["dtype"]
    if "moe" in kind:
        assert config["num_experts"] == 4
    assert config.get("num_local_experts", 4) == 4
    if "yarn" in kind:
        assert {**config["rope_scaling"], "rope_theta": 50_000.0} == config["rope_parameters"]
    else:
        assert config.get("rope_scaling") is None
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)


def test_an_export_adds_the_bos_that_training_put_where_the_tokenizer_adds_none(tmp_path):
    """A tokenizer of MiniMind's, which has no post-processor; the export's is the same one to the trainers."""
    fields = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    own = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps({**fields, "post_processor": None})),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    assert own("hi").input_ids[0] != 1
    own.save_pretrained(tmp_path / "own")
    export_hf.export(write(tmp_path), tmp_path / "hf", tokenizer_path=tmp_path / "own")
    exported = load_tokenizer(tmp_path / "hf")
    assert exported("hi").input_ids == [1, *own("hi").input_ids]
    assert DocumentEncoder(exported).fingerprint == DocumentEncoder(load_tokenizer(tmp_path / "own")).fingerprint


# ------------------------------------------------------------------------------------------- the model card


def test_nothing_in_an_export_tells_of_places_or_people(tmp_path, monkeypatch):
    """Neither the folders of the run and of the export nor the name of the user; the data's names stay."""
    home = tmp_path / "home" / "alice"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    settings = {
        "data_path": [str(home / "texts" / "wiki.jsonl") + ":0.7", "C:\\Users\\alice\\code.jsonl", "~/more.jsonl", str(home), "/mnt/Alice:0.1"],
        "val_path": str(home / "valid.jsonl"),
        "out_dir": str(home / "out"),
        "cache_dir": str(home / "cache"),
        "tokenizer_path": str(ROOT / "model"),
        "from_weight": str(home / "earlier.pth"),
        "wandb_project": "alice-secret",
        "a_flag_to_come": str(home / "x" / "thing"),
        "learning_rate": 0.0005,
    }  # fmt: skip
    command = f"python {home}/trainer/train_pretrain.py"
    start = {"started": "2026-01-01 00:00:00", "model": {}, "data": {}, "machine": {}, "versions": {}}
    lines = [
        {"update": 1, "tokens": 9, "settings": settings, "command": command, **start},
        {"update": 1, "tokens": 9, "loss": 3.0},
    ]
    weight = write(home)
    weight.with_name("pretrain_32.metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own_tokenizer = home / "tokenizer"
    load_tokenizer(MODEL).save_pretrained(own_tokenizer)
    export_hf.export(weight, home / "hf", tokenizer_path=own_tokenizer)
    for file in (home / "hf").iterdir():
        content = file.read_bytes()
        for private in ("alice", "Alice", str(tmp_path), str(ROOT), "Users", "/home", "is_local"):
            assert private.encode() not in content, (file.name, private)
    monkeypatch.setenv("HOME", "/")
    assert export_hf.shown(str(home / "a.jsonl")) == "`a.jsonl`"
    card = (home / "hf" / "README.md").read_text()
    assert "wiki.jsonl:0.7" in card and "code.jsonl" in card and "more.jsonl" in card and "valid.jsonl" in card
    assert "| `--learning_rate` | `0.0005` |" in card
