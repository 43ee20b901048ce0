"""scripts/export_gguf.py. References: the tables of the package gguf, and llama.cpp."""

import functools
import itertools
import json
import operator
import sys

import gguf
import numpy as np
import pytest
import torch

from common.errors import DataError
from dataset.tokenizing import byte_level_bpe
from dataset.tokenizing.byte_level_bpe import MARKED_TEMPLATE
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from scripts import export_gguf, export_hf
from scripts.common import load_model
from tests.chats import turn
from tests.helpers import ROOT, tiny_model
from tests.llama_cpp_server import llama_cpp
from tests.scripts.test_export import KINDS as HF_KINDS
from tests.scripts.test_export import write

VOCABULARY = 700
KINDS = {
    **HF_KINDS,
    "llama_yarn": {"inference_rope_scaling": True},
    "bailing_yarn": {"use_moe": True, "inference_rope_scaling": True, "n_shared_experts": 3},
    "one_key_head": {"num_key_value_heads": 1, "head_dim": 10},
}
# llama.cpp refuses it, and so does the export.
del KINDS["qwen3_moe_unnormalised"]
ARCHITECTURES = {"qwen3": "qwen3", "qwen3_yarn": "qwen3", "qwen3_moe": "qwen3moe", "bailing_yarn": "bailingmoe"}
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
ARCHITECTURES |= {kind: "bailingmoe" for kind in KINDS if kind.startswith("qwen2_moe")}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "a <b> & 'c' é", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "n": 1.5, "b": True}}}
CALLED = [turn("user", "Is it warm?"), turn("assistant", "", tool_calls=[CALL, CALL]), turn("tool", "[21, 22]")]
SAID = turn("assistant", "Yes.", reasoning_content="21\nis warm")
ASKED = turn("user", [{"type": "text", "text": "And there?"}])
CHATS = (
    {"messages": [turn("user", "hi  \n")]},
    {"messages": [turn("system", "be kind"), turn("user", "你好")], "tools": [WEATHER]},
    {"messages": [*CALLED, SAID, ASKED], "tools": [WEATHER]},
)


def train(pieces, folder, texts, vocab_size=VOCABULARY):
    """A tokenizer as train_tokenizer.py makes it; pieces: the name of a rule. Returns its folder."""
    byte_level_bpe.save(byte_level_bpe.train_bpe(texts, vocab_size, pieces=pieces), folder)
    return folder


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """The folder of a tokenizer that cuts by the rule of Llama 3."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))]
    return train("llama-bpe", tmp_path_factory.mktemp("tokens"), texts)


def export(folder, tokens, dtype="auto", overwrite=False, **fields):
    """(the weight, the .gguf made of it) with fresh weights."""
    weight = write(folder, **{**fields, "vocab_size": VOCABULARY})
    export_gguf.export(weight, folder / "model.gguf", str(tokens), dtype, overwrite)
    return weight, folder / "model.gguf"


def fields_of(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def changed(tokens, folder, values):
    """A copy of the tokenizer with other values in its tokenizer.json: {place: value}."""
    content = json.loads((tokens / "tokenizer.json").read_text(encoding="utf-8"))
    for (*way, last), value in values.items():
        functools.reduce(operator.getitem, way, content)[last] = value
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text((tokens / "tokenizer_config.json").read_text(encoding="utf-8"))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_have_the_names_and_types_that_llama_cpp_wants(kind, tmp_path, tokens):
    weight, path = export(tmp_path, tokens, **KINDS[kind])
    architecture = ARCHITECTURES.get(kind, "llama")
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.architecture").contents() == architecture
    (known,) = [gguf.MODEL_TENSORS[arch] for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = {gguf.TENSOR_NAMES[tensor].format(bid=layer) + ".weight" for tensor in known for layer in range(2)}
    for tensor in reader.tensors:
        assert tensor.name in names
        is_exact = len(tensor.shape) == 1 or "ffn_gate_inp" in tensor.name
        assert tensor.tensor_type.name == ("F32" if is_exact else "F16")
    exported = sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert exported >= sum(weight.numel() for weight in load_model(weight).parameters()), "a weight is left out"


@pytest.mark.parametrize("dtype, name", list(TYPES.items()))
def test_types_round_as_they_should(dtype, name, tmp_path, tokens, capsys):
    """Reference: torch's rounding; for Q8_0 that of each 32 weights to multiples of 1/127 of the largest, where rows are of such blocks."""
    model = tiny_model(vocab_size=VOCABULARY, intermediate_size=72)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "source")
    path = tmp_path / "model.gguf"
    change = export_gguf.export(tmp_path / "source", path, str(tokens), dtype)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    gate = found["blk.0.ffn_gate.weight"]
    assert gate.tensor_type.name == found["token_embd.weight"].tensor_type.name == name
    assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    source = model.model.layers[0].mlp.gate_proj.weight.detach()
    read = gguf.dequantize(gate.data, gate.tensor_type).reshape(source.shape)
    blocks = source.view(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    in_blocks = ((blocks / scale).round() * scale.half()).view(source.shape)
    rounded = in_blocks if dtype == "q8_0" else source.to(getattr(torch, dtype)).float()
    assert np.allclose(read, rounded.numpy(), rtol=0, atol=1e-6 if dtype == "q8_0" else 0)
    assert (found["blk.0.ffn_down.weight"].tensor_type.name == "F16") == (dtype in ("float16", "q8_0"))
    assert (change == 0) == ("no weight was changed" in capsys.readouterr().out) == (dtype == "float32")


@pytest.mark.parametrize("value, dtype", [(1e5, "float16"), (1e7, "q8_0")])
def test_what_a_type_cannot_hold_is_no_infinity(value, dtype, tmp_path, tokens):
    model = tiny_model(vocab_size=VOCABULARY).eval()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = value
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.weight reaches 1e\+0[57], which"):
        export_gguf.export(tmp_path / "source", tmp_path / "model.gguf", str(tokens), dtype)
    assert not list(tmp_path.glob("model*"))


def test_models_that_llama_cpp_computes_otherwise_are_refused(tmp_path, tokens):
    for fields, message in (
        ({"generation": "minimind3", "use_moe": True, "norm_topk_prob": False}, "always normalises"),
        ({"generation": "minimind3", "use_moe": True, "n_shared_experts": 1}, "cannot be exported"),
        ({"inference_rope_scaling": True, "yarn_beta_fast": 16.0}, "beta_fast"),
        ({"inference_rope_scaling": True, "yarn_original_positions": 1_000_000}, "in another way"),
    ):
        with pytest.raises(ValueError, match=message):
            export(tmp_path, tokens, **fields)
        assert not list(tmp_path.glob("model*"))


def test_the_vocabulary_is_that_of_the_tokenizer(tmp_path, tokens):
    tokenizer = load_tokenizer(tokens)
    export_gguf.export(write(tmp_path, vocab_size=VOCABULARY + 5), tmp_path / "model.gguf", str(tokens))
    fields = fields_of(tmp_path / "model.gguf")
    names = fields["tokenizer.ggml.tokens"]
    assert names[:VOCABULARY] == tokenizer.convert_ids_to_tokens(range(VOCABULARY))
    assert len(set(names)) == len(names) == VOCABULARY + 5
    special = len(byte_level_bpe.SPECIAL_TOKENS)
    types = [gguf.TokenType.CONTROL] * special + [gguf.TokenType.NORMAL] * (VOCABULARY - special)
    assert fields["tokenizer.ggml.token_type"] == types + [gguf.TokenType.UNUSED] * 5
    content = json.loads((tokens / "tokenizer.json").read_text())
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in content["model"]["merges"]]
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "llama-bpe")
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot", "padding", "unknown")}
    assert ids == {"bos": 1, "eos": 2, "eot": 2, "padding": 0, "unknown": 0}
    assert fields["tokenizer.ggml.add_bos_token"] is True
    assert fields["tokenizer.ggml.add_eos_token"] is False


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_file_that_is_not_whole_is_one_line(tmp_path, tokens):
    import resource

    weight, out = export(tmp_path, tokens)
    length = out.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length - 1, before[1]))
    try:
        with pytest.raises(OSError, match="not all of it could be written, is the disk full") as error:
            export_gguf.export(weight, tmp_path / "again.gguf", str(tokens))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.filename == str(tmp_path / "again.gguf") and not (tmp_path / "again.gguf").exists()


def test_bos_comes_first_in_llama_cpp_where_it_does_here(tmp_path, tokens):
    """Always for a .pth, as in training; for a folder as its tokenizer does."""
    silent = changed(tokens, tmp_path / "silent", {("post_processor",): None})
    weight = write(tmp_path, vocab_size=VOCABULARY)
    export_hf.export(weight, tmp_path / "hf", str(tokens))
    adds_bos = []
    for source, folder in ((weight, tokens), (weight, silent), (tmp_path / "hf", tokens), (tmp_path / "hf", silent)):
        export_gguf.export(source, tmp_path / "model.gguf", str(folder), overwrite=True)
        adds_bos.append(fields_of(tmp_path / "model.gguf")["tokenizer.ggml.add_bos_token"])
    assert adds_bos == [True, True, True, False]


# What differs from the tokenizer of Llama 3's rule, {place: value}: in the public tokenizers, and where the export refuses
GPT2_PIECES = {
    ("pre_tokenizer",): {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ("model", "ignore_merges"): False,
}
OTHER_PIECES = [
    {("pre_tokenizer", "pretokenizers", 0, "pattern"): {"Regex": r"\s+|\S+"}},
    {("normalizer",): {"type": "Lowercase"}},
    {("pre_tokenizer", "pretokenizers", 1, "add_prefix_space"): True},
    {("model", "byte_fallback"): True},
    {("added_tokens", 3, "lstrip"): True},
]


def test_tokenizers_that_llama_cpp_does_not_follow_or_of_other_models_are_refused(tmp_path, tokens):
    cases = [(VOCABULARY - 50, {}, "name the model's own")]
    cases += [(4 * VOCABULARY, {}, "the tokenizer of another model")]
    cases += [(VOCABULARY, change, "--pieces llama-bpe") for change in OTHER_PIECES]
    for number, (vocab_size, change, message) in enumerate(cases):
        weight = write(tmp_path, vocab_size=vocab_size)
        folder = changed(tokens, tmp_path / f"other{number}", change)
        with pytest.raises(ValueError, match=message):
            export_gguf.export(weight, tmp_path / "model.gguf", str(folder))
    assert not list(tmp_path.glob("model*"))


@pytest.mark.parametrize("words", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_the_chat_template_writes_the_same_without_the_marks_of_transformers(words):
    """Reference: the template with the marks of generation, which programs but transformers do not know."""
    tokenizer = load_tokenizer(ROOT / "model")
    assert "generation" not in tokenizer.chat_template.replace("add_generation_prompt", "")
    for chat, ask in itertools.product(CHATS, (True, False)):
        request = {**words, "tools": chat.get("tools"), "tokenize": False, "add_generation_prompt": ask}
        ours = tokenizer.apply_chat_template(chat["messages"], **request)
        assert ours == tokenizer.apply_chat_template(chat["messages"], **request, chat_template=MARKED_TEMPLATE)


def test_without_the_package_one_line_says_what_to_install(tmp_path, tokens, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DataError, match="pip install gguf"):
        export_gguf.main(["--weight", "a.pth", "--out", str(tmp_path / "a.gguf")])


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "qwen2_moe_top1"])
def test_the_folder_of_an_export_becomes_the_same_file(kind, tmp_path, tokens):
    """Reference: the file made of the .pth, byte for byte. The folder brings its tokenizer along."""
    _, path = export(tmp_path, tokens, **KINDS[kind])
    export_hf.export(tmp_path / "pretrain_32.pth", tmp_path / "hf", str(tokens))
    again = tmp_path / "again" / "model.gguf"
    export_gguf.export(tmp_path / "hf", again)
    assert again.read_bytes() == path.read_bytes()


HARD_TEXTS = (
    "I'M sure HE'LL, we'Ve, they'd; 'S 's ''s '\u017f \u212a's",
    "1234567890 1,234.5 x1y22z333 \uff11\uff12\uff13\uff14 \u0663\u0664\u0665\u0666 \u2167 \u00bd",
    "\u00c9cole \u00ceLE STRASSE stra\u00dfe \u041f\u0440\u0438\u0412\u0435\u0442 \u041c\u041e\u0421\u041a\u0412\u0410",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    " \t\n  \r\n\n x \u3000 \u00a0 y\u2028z\u0085 ",
    "a <|im_start|>user <think> <|endoftext|> is only text",
    "e\u0301 a\u0308 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \ufeff",
    "if x:\n\tif y:\n\t\treturn [1]*(2**10)  # \u4f60\u597d\n\n\n    pass\n",
    "a" * 3000,
    "!?" * 700 + "\n" * 50,
    "",
    " ",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "qwen35", "gpt-2", "ours"])
def test_llama_cpp_makes_the_same_tokens_of_texts(name, tmp_path):
    """Reference: the ids of training, of our pages' paragraphs, some of them Chinese, and of texts that are hard to cut."""
    texts = [*HARD_TEXTS, *export_hf.TEXTS]
    for page in (*sorted(ROOT.glob("docs/*.md")), ROOT / "README_zh.md"):
        texts += page.read_text(encoding="utf-8").split("\n\n")
    folder = ROOT / "model"
    if name != "ours":
        pieces = "llama-bpe" if name == "gpt-2" else name
        folder = train(pieces, tmp_path / "tokens", texts, vocab_size=2000)
    if name == "gpt-2":
        folder = changed(folder, tmp_path / "gpt-2", GPT2_PIECES)
    weight = write(tmp_path, vocab_size=6400 if name == "ours" else 2000)
    export_gguf.export(weight, tmp_path / "model.gguf", str(folder))
    rule = "llama-bpe" if name == "ours" else name
    assert fields_of(tmp_path / "model.gguf")["tokenizer.ggml.pre"] == rule
    encoder = DocumentEncoder(load_tokenizer(folder))
    different = []
    with llama_cpp(tmp_path / "model.gguf") as ask:
        for text in texts:
            ids = ask("/tokenize", content=text, add_special=True, parse_special=False)["tokens"]
            if ids != encoder.prompt_ids(text):
                different.append(text[:60])
    assert not different


def log_probabilities(ask, ids):
    """What may follow these ids, by llama.cpp: log probabilities of all ids, before the bias."""
    # Of a token that is no whole character the server sends nothing, so it is made to choose one that is.
    answer = ask("/completion", prompt=ids, n_predict=1, n_probs=VOCABULARY, temperature=0, logit_bias=[["a", 1e4]])
    found = torch.full((VOCABULARY,), torch.nan)
    for entry in answer["completion_probabilities"][0]["top_logprobs"]:
        found[entry["id"]] = entry["logprob"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_gives_the_same_probabilities_and_writes_the_same(kind, tmp_path, tokens):
    """Reference: the source's probabilities and its greedy text, in float32."""
    # Few positions, so that YaRN has some to stretch.
    weight = write(tmp_path, **{**KINDS[kind], "vocab_size": VOCABULARY, "yarn_original_positions": 64})
    export_gguf.export(weight, tmp_path / "model.gguf", str(tokens), "float32")
    model, tokenizer = load_model(weight), load_tokenizer(tokens)
    ids = torch.randint(3, VOCABULARY, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    prompt = torch.tensor([ids[:16]])
    greedy = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=-1)[0, 16:].tolist()
    with llama_cpp(tmp_path / "model.gguf") as ask:
        # The longest first, at once; the others with what is left of it in the cache, and by one id more.
        for n in (600, 1, 2, 63, 64, 65, 128, 129, *range(150, 600, 50)):
            assert (log_probabilities(ask, ids[:n]) - ours[n - 1]).abs().max() < 5e-4, n
        written = ask("/completion", prompt=ids[:16], n_predict=24, temperature=0, return_tokens=True)
    assert written["tokens"] == greedy
    assert written["content"] == tokenizer.decode(greedy, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bound", [("float16", 0.005), ("bfloat16", 0.04), ("q8_0", 0.08)])
def test_llama_cpp_reads_the_smaller_types(dtype, bound, tmp_path, tokens):
    """References: the source's probabilities, which a type moves by its rounding; the rendered chats of transformers."""
    # Dense: with experts a close choice could go the other way.
    weight = write(tmp_path, vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96)
    export_gguf.export(weight, tmp_path / "model.gguf", str(tokens), dtype)
    ids = list(range(3, 103))
    with torch.no_grad():
        logits = load_model(weight)(torch.tensor([ids])).logits[0]
    tokenizer = load_tokenizer(tokens)
    with llama_cpp(tmp_path / "model.gguf") as ask:
        theirs = torch.stack([log_probabilities(ask, ids[:n]) for n in range(1, 101)])
        # relative to the logits' norm; llama.cpp also rounds activations, and random weights are steep
        moved = ((logits.log_softmax(-1) - theirs).norm() / logits.norm()).item()
        assert 0 < moved < bound
        for chat in CHATS:
            words = {"conversation": chat["messages"], "tools": chat.get("tools"), "add_generation_prompt": True}
            prompt = ask("/apply-template", **chat)["prompt"]
            ids = ask("/tokenize", content=prompt, add_special=True)["tokens"]
            # The first token is left to the tokenizer.
            assert "<|im_start|>" + prompt == tokenizer.apply_chat_template(**words, tokenize=False)
            assert ids == tokenizer.apply_chat_template(**words, return_dict=False)
