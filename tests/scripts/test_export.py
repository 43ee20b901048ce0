"""scripts/export_hf.py: exports against the source's logits and published key names, and the way back bit for bit."""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from common.errors import UserError
from dataset.tokenizing import byte_level_bpe
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import load_by_transformers, vocabulary_digest
from model.model_minimind import MiniMindConfig
from model.weight_record import SPECIAL_TOKENS_FIELD, VOCABULARY_FIELD, read_record
from scripts import arguments, export_hf
from scripts.common import load_model
from tests.chats import turn
from tests.helpers import ROOT, change_json, tiny_model, write_records, write_weights
from trainer.saving.weights import save_pth

SIZE = {"vocab_size": 6400, "num_key_value_heads": 2, "hidden_size": 32}
EXPERTS = {"generation": "minimind3", "use_moe": True, "num_experts_per_tok": 2}
KINDS = {
    "llama": {},
    "untied": {"tie_word_embeddings": False},
    "qwen3": {"generation": "minimind3", "head_dim": 12},
    "qwen3_yarn": {"generation": "minimind3", "inference_rope_scaling": True},
    "qwen2_moe": {"use_moe": True},
    "qwen3_moe": EXPERTS,
    "qwen3_moe_unnormalised": {**EXPERTS, "norm_topk_prob": False},
    "qwen2_moe_top1": {"use_moe": True, "num_experts_per_tok": 1, "n_shared_experts": 2, "moe_intermediate_size": 40},
    "qwen2_moe_unshared": {"use_moe": True, "n_shared_experts": 0, "norm_topk_prob": False},
}
CLASSES = {"llama": "LlamaForCausalLM", "untied": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
CLASSES |= {"qwen3_yarn": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
CLASSES |= {"qwen3_moe_unnormalised": "Qwen3MoeForCausalLM"}


def write(folder, name="pretrain_32", **fields):
    """A half-precision .pth and .json as the trainer leaves them; norms and weights away from their initial values."""
    model = tiny_model(**{**SIZE, **fields})
    for key, parameter in model.named_parameters():
        parameter.data = torch.rand_like(parameter) + 0.5 if "norm" in key else torch.randn_like(parameter) * 0.2
    save_pth(model.state_dict(), model.config.to_dict(), Path(folder) / name)
    return Path(folder) / f"{name}.pth"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_goes_out_and_comes_back_unchanged(kind, tmp_path, capsys):
    """Reference: the source's logits by AutoModelForCausalLM, and the source's .pth bit for bit."""
    weight, folder = write(tmp_path, **KINDS[kind], rope_theta=500_000.0), tmp_path / "hf"
    assert export_hf.main(["--weight", str(weight), "--out_dir", str(folder)]) == 0
    check_names_of_transformers_4(kind, folder)
    difference = export_hf.convert_to_pth(folder, tmp_path / "back.pth")
    shown = capsys.readouterr().out
    name = CLASSES.get(kind, "Qwen2MoeForCausalLM")
    assert f"{name} in float16" in shown and "no weight was rounded" in shown
    ours, theirs = load_model(weight), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(theirs).__name__ == name and theirs.dtype == torch.float32
    exported, of_trainer = AutoTokenizer.from_pretrained(folder), DocumentEncoder(load_tokenizer(ROOT / "model"))
    for text in (*export_hf.TEXTS, "<think> x20 \n\n"):
        assert exported(text, split_special_tokens=True).input_ids == of_trainer.prompt_ids(text)
    ids = torch.randint(3, 6400, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        apart = (ours(ids).logits - theirs(ids).logits).abs().max() / ours(ids).logits.abs().max()
    if "moe" in kind:
        assert apart < 1e-5 and difference < 1e-5
    else:
        assert apart == 0 and difference == 0 and "bitwise the same" in shown
    first, back = (torch.load(path, weights_only=True) for path in (weight, tmp_path / "back.pth"))
    if kind == "qwen2_moe_unshared":  # comes back with a shared expert of zeros
        back = {key: tensor for key, tensor in back.items() if "shared" not in key or tensor.any()}
    assert first.keys() == back.keys() and all(torch.equal(first[key], back[key]) for key in first)
    again = load_model(tmp_path / "back.pth").config
    lost = {"n_shared_experts"} if "unshared" in kind else set()
    for field in set(MiniMindConfig.__annotations__) - {"dropout", "seq_aux", *lost}:
        if field.startswith(("yarn", "_")) or (not ours.config.use_moe and ("expert" in field or "moe_int" in field)):
            continue
        assert getattr(again, field) == getattr(ours.config, field) or "aux" in field, field


@pytest.mark.parametrize("model", [models.WordLevel, partial(models.BPE, merges=[])])
def test_a_tokenizer_that_knows_no_text_of_the_check(tmp_path, capsys, model):
    """A protein's: letters, no BOS, nothing for what it does not know. Reference: the source's .pth, bit for bit."""
    letters = {letter: i for i, letter in enumerate("αβγδεζηθ")}
    backend = Tokenizer(model(vocab=letters))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "letters")
    weight, folder = write(tmp_path, vocab_size=8), tmp_path / "hf"
    words = ["--tokenizer_path", str(tmp_path / "letters")]
    assert export_hf.main(["--weight", str(weight), "--out_dir", str(folder), *words]) == 0
    assert export_hf.main(["--weight", str(folder), "--to_pth", str(tmp_path / "back.pth")]) == 0
    assert capsys.readouterr().out.count("bitwise the same at 2048 positions of drawn ids") == 2
    first, back = (torch.load(path, weights_only=True) for path in (weight, tmp_path / "back.pth"))
    assert all(torch.equal(first[key], back[key]) for key in first)


def check_names_of_transformers_4(kind, folder):
    """Names that 4.48 to 4.57 know, and mlx-lm. Left out, they take their own default in silence: theta 10000, 128 experts."""
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["additional_special_tokens"] == byte_level_bpe.CHAT_TOKENS + byte_level_bpe.SPARE_TOKENS
    assert "extra_special_tokens" not in tokenizer
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]
    assert tokenizer["add_bos_token"] is True and tokenizer["add_eos_token"] is False
    assert tokenizer["chat_template"] == byte_level_bpe.WITHOUT_THOUGHTS
    assert not {"backend", "is_local", "local_files_only", "name_or_path"} & set(tokenizer)
    assert not (folder / "chat_template.jinja").exists()
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500_000.0
    assert config["torch_dtype"] == config["dtype"]
    assert config.get("max_window_layers") == (2 if "qwen" in kind else None)
    if "moe" in kind:
        assert config["num_experts"] == 4
    assert config.get("num_local_experts", 4) == 4
    if "yarn" in kind:
        assert {**config["rope_scaling"], "rope_theta": 500_000.0} == config["rope_parameters"]
    else:
        assert config["rope_scaling"] is None
    generation = json.loads((folder / "generation_config.json").read_text())
    assert [generation[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, 0]


def test_the_folder_holds_what_other_programs_look_for(tmp_path):
    """Key names of published checkpoints, each expert by itself."""
    weight, folder = write(tmp_path, **KINDS["qwen2_moe_top1"]), tmp_path / "hf"
    export_hf.export(weight, folder)
    state = load_file(folder / "model.safetensors")
    mlp = "model.layers.1.mlp."
    assert {k.removeprefix(mlp) for k in state if k.startswith(mlp) and "experts.0" not in k and "experts." in k} == {
        f"experts.{e}.{m}_proj.weight" for e in (1, 2, 3) for m in ("gate", "up", "down")
    }
    assert state[f"{mlp}shared_expert.gate_proj.weight"].shape == (80, 32)
    assert not state[f"{mlp}shared_expert_gate.weight"].any() and "lm_head.weight" not in state
    assert {t.dtype for t in state.values()} == {torch.float16}
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float16" and "auto_map" not in config
    assert not config.keys() & {"id2label", "label2id", "problem_type", "_name_or_path", "is_encoder_decoder"}


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_a_dtype_that_changes_weights_says_by_how_much(dtype, tmp_path, capsys):
    """Reference: torch's rounding of the source's weights. The texts of the comparison have more positions than this model."""
    weight = write(tmp_path, max_position_embeddings=32)
    export_hf.export(weight, tmp_path / "hf", dtype=dtype)
    state = torch.load(weight, weights_only=True)
    change = max((tensor.bfloat16().float() - tensor.float()).abs().max().item() for tensor in state.values())
    said = f"; bfloat16 has changed weights by {change:.1e} at most"
    for text in (capsys.readouterr().out, (tmp_path / "hf" / "README.md").read_text()):
        assert (said in text) == ("has changed" in text) == (dtype == "bfloat16")


def test_the_lines_of_the_card_leave_a_model_to_train_on(tmp_path, monkeypatch, capsys):
    """Reference: a step of AdamW from weights in float32; from those in float16 as they are stored most are not finite."""
    export_hf.export(write(tmp_path), tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec((tmp_path / "hf" / "README.md").read_text().split("```python\n")[1].split("```")[0], names)
    assert "\nThe harbour" in capsys.readouterr().out
    ids = names["prompt"].input_ids
    for model in (names["model"], AutoModelForCausalLM.from_pretrained("hf", dtype=torch.float16).float()):
        model(ids, labels=ids).loss.backward()
        torch.optim.AdamW(model.parameters()).step()
        assert all(parameter.isfinite().all() for parameter in model.parameters())


# The last one is in texts only with --parse_special_tokens.
@pytest.mark.parametrize(
    "kind, pad",
    [("llama", "<|im_start|>"), ("qwen2_moe", "<|im_end|>"), ("qwen3", "<|im_end|>"), ("qwen3_moe", "<|endoftext|>")],
)
def test_padding_that_texts_have_learns_in_an_export(kind, pad, tmp_path):
    """Reference: the gradients of the same network without a `padding_idx`, which takes the part of the inputs away."""
    tokenizer = load_by_transformers(ROOT / "model")
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    weight = write(tmp_path, **KINDS[kind], pad_token_id=tokenizer.pad_token_id)
    change_json(weight.with_suffix(".json"), **{SPECIAL_TOKENS_FIELD: pad == byte_level_bpe.PAD})
    export_hf.export(weight, tmp_path / "hf", str(tmp_path / "tokenizer"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    table, ids = model.get_input_embeddings(), torch.tensor([[1, 300, 2, 0, 1, 400, 2]])
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append(table.weight.grad.clone())
        table.padding_idx = None
    assert torch.equal(*gradients) and gradients[0][tokenizer.pad_token_id].any()
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").pad_token == pad
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["pad_token_id"] == tokenizer.pad_token_id


def test_a_wide_weight_chooses_the_dtype(tmp_path):
    """auto is the smallest exact dtype; what float16 cannot hold (a doubled down_proj here) is an error, not infinity."""
    model = tiny_model(**SIZE, use_moe=True).eval()
    model.model.layers[0].mlp.shared_experts[0].down_proj.weight.data[0, 0] = 40000.0
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"shared_expert.down_proj.weight reaches 8e\+04"):
        export_hf.export(tmp_path / "source", tmp_path / "hf", dtype="float16")
    export_hf.export(tmp_path / "source", tmp_path / "hf")
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.float32}
    export_hf.export(tmp_path / "source", tmp_path / "hf", dtype="bfloat16", overwrite=True)
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_wrong_export_is_not_written(tmp_path, monkeypatch):
    weight = write(tmp_path)

    def wrong(state, config, right=export_hf.to_hf):
        state = right(state, config)
        state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.1.mlp.up_proj.weight"] * 1.01
        return state

    monkeypatch.setattr(export_hf, "to_hf", wrong)
    with pytest.raises(ValueError, match="the logits differ by .* not written"):
        export_hf.export(weight, tmp_path / "hf")
    assert {path.suffix for path in tmp_path.iterdir()} == {".pth", ".json"}


def test_nothing_is_overwritten_unasked(tmp_path):
    weight = write(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "notes.txt").write_text("mine")
    for flags in (["--out_dir", str(tmp_path / "hf")], ["--to_pth", str(weight)]):
        with pytest.raises(UserError, match="is no earlier export|is there already"):
            export_hf.main(["--weight", str(weight), *flags])
    # What the way back writes beside the weights
    (tmp_path / "notes.json").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.json is there already: choose another --to_pth"):
        export_hf.main(["--weight", str(weight), "--to_pth", str(tmp_path / "notes.pth")])
    assert (tmp_path / "notes.json").read_text() == "mine"
    for folder in (tmp_path, tmp_path / "hf"):  # not even then what is no export
        with pytest.raises(UserError, match="is no earlier export"):
            export_hf.main(["--weight", str(weight), "--out_dir", str(folder), "--overwrite"])
    small = write_weights(tmp_path / "small", vocab_size=97)
    with pytest.raises(UserError, match="embeddings for 97: it is the tokenizer of another model"):
        export_hf.main(["--weight", small, "--out_dir", str(tmp_path / "small")])
    odd = write_weights(tmp_path / "odd", **SIZE, generation="minimind3", use_moe=True, n_shared_experts=1)
    with pytest.raises(UserError, match="shared experts has no equivalent"):
        export_hf.main(["--weight", odd, "--out_dir", str(tmp_path / "odd")])


# tests/test_commands.py compares the commands of both READMEs, and parses those of all documents.
@pytest.mark.parametrize("document", ["README.md", pytest.param("docs/scripts.md", marks=pytest.mark.slow)])
def test_the_commands_of_the_documents_run(tmp_path, monkeypatch, document):
    """Every `python scripts/...` line, in its order, on a tiny model and tiny data."""
    pytest.importorskip("gguf")
    from scripts import evaluate, export_gguf, generate, inspect_data, play, report
    from tests.trainer.reporting.test_html_report import metrics_file

    (tmp_path / "out").mkdir()
    for name in ("pretrain_256", "pretrain_512", "a_512", "b_512", "full_sft_256"):
        metrics_file(tmp_path / "out" / f"{name}.metrics.jsonl")
        write(tmp_path / "out", name)
    data = dict.fromkeys(("valid", "web/pages", "books", "my"), {"text": "the cat sat on the mat"})
    data["chats"] = {"conversations": [turn("user", "cat?"), turn("assistant", "the cat sat")]}
    data["pairs"] = {"sentence_good": "the cat sat", "sentence_bad": "cat the sat"}
    (tmp_path / "web").mkdir()
    for name, record in data.items():
        write_records(tmp_path / f"{name}.jsonl", [record])
    for name in ("wiki", "my"):
        (tmp_path / f"{name}.txt").write_text("the cat sat on the mat\n" * 9)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arguments, "DEFAULT_WEIGHT", tmp_path / "out" / "pretrain_512.pth")
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("python scripts/")]
    assert len(commands) >= 6
    scripts = (generate, play, export_hf, export_gguf, evaluate, report, inspect_data)
    modules = {f"scripts/{script.__name__.split('.')[1]}.py": script for script in scripts}
    extra = {generate: ["--max_new_tokens", "4", "--device", "cpu"], evaluate: ["--device", "cpu"]}
    extra[play] = ["--device", "cpu", "--port", "0"]
    # As if Ctrl-C were pressed at once.
    monkeypatch.setattr(play.Server, "serve_forever", lambda server: (_ for _ in ()).throw(KeyboardInterrupt))
    for script, *words in commands:
        assert modules[script].main([*words, *extra.get(modules[script], [])]) == 0
    assert document != "docs/scripts.md" or (tmp_path / "out" / "back_512.json").exists()


def test_the_way_back_records_the_vocabulary_of_the_folder(tmp_path):
    """So generate.py refuses another tokenizer. Without tokenizer files nobody knows which one it was: nothing is recorded."""
    export_hf.export(write(tmp_path), tmp_path / "hf")
    export_hf.convert_to_pth(tmp_path / "hf", tmp_path / "back.pth")
    of_folder = vocabulary_digest(AutoTokenizer.from_pretrained(tmp_path / "hf"))
    assert read_record(tmp_path / "back.pth").get(VOCABULARY_FIELD) == of_folder
    for path in (tmp_path / "hf").glob("tokenizer*"):
        path.unlink()
    export_hf.convert_to_pth(tmp_path / "hf", tmp_path / "unknown.pth")
    assert read_record(tmp_path / "unknown.pth").get(VOCABULARY_FIELD) is None
    # Whoever names the repository's own says that it is the model's.
    export_hf.convert_to_pth(tmp_path / "hf", tmp_path / "named.pth", str(ROOT / "model"))
    named = vocabulary_digest(AutoTokenizer.from_pretrained(ROOT / "model"))
    assert read_record(tmp_path / "named.pth").get(VOCABULARY_FIELD) == named


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_an_export_that_names_a_program_on_a_hub_is_refused(tmp_path, name):
    export_hf.export(write(tmp_path), tmp_path / "hf")
    change_json(tmp_path / "hf" / "config.json", **{name: "evil/attention"})
    with pytest.raises(UserError, match="asks for the attention of evil/attention, a program that is not fetched"):
        export_hf.convert_to_pth(tmp_path / "hf", tmp_path / "back.pth")
