"""Exports in transformers 4.57.3, installed aside for this test. References: the logits and ids of this repository's own."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import BertTokenizer, ElectraConfig, ElectraForSequenceClassification

from dataset.tokenizing.encoder import load_tokenizer
from scripts import export_hf
from scripts.common import load_model
from tests.dataset.glue.test_glue_dataset import WORDS
from tests.helpers import ROOT
from tests.scripts.test_export import CLASSES, KINDS, write
from trainer.glue.model import save_model

PINNED = ("transformers==4.57.3", "tokenizers==0.22.1", "huggingface_hub==0.36.0")
# Loads what is named on its standard input and answers with what came of it; knows nothing of this repository.
READER = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
answers = {"version": transformers.__version__}
for folder, kind in json.load(sys.stdin):
    loader = AutoModelForCausalLM if kind == "causal" else AutoModelForSequenceClassification
    model = loader.from_pretrained(folder, torch_dtype=torch.float32, trust_remote_code=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = tokenizer("a cab", return_tensors="pt")
    answer = {"class": type(model).__name__, "ids": ids.input_ids[0].tolist(), "tokenizer": type(tokenizer).__name__}
    with torch.no_grad():
        answer["logits"] = model(ids.input_ids).logits.tolist()
    if kind == "causal":
        chat = [{"role": "user", "content": "hi"}]
        answer["chat"] = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        answer["special"] = tokenizer.all_special_ids
        answer["greedy"] = model.generate(**ids, max_new_tokens=4, do_sample=False)[0].tolist()
        answer["eos"] = model.generation_config.eos_token_id
    answers[folder] = answer
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """A folder with transformers 4.57.3 and what belongs to it, for PYTHONPATH; the rest is that of this process."""
    folder = tmp_path_factory.mktemp("transformers4")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PINNED]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        pytest.skip("pip has not finished within 300 seconds")
    if done.returncode:
        pytest.skip(f"pip cannot install {', '.join(PINNED)}: no network?")
    return folder


def read_with(older, folders):
    environment = {**os.environ, "PYTHONPATH": str(older), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    request = json.dumps([(str(folder), kind) for folder, kind in folders])
    done = subprocess.run(
        [sys.executable, "-c", READER], input=request, capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout)
    assert answers["version"] == "4.57.3"
    return answers


@pytest.mark.slow
def test_transformers_4_reads_every_export_as_it_is(older, tmp_path):
    kinds = {**KINDS, "llama_yarn": {"inference_rope_scaling": True}}
    folders = []
    for kind, fields in kinds.items():
        # theta away from the default of transformers 4, that a name it does not know cannot hide
        weight = write(tmp_path, kind, **fields, rope_theta=50_000.0)
        export_hf.export(weight, tmp_path / f"{kind}_hf")
        folders.append((tmp_path / f"{kind}_hf", "causal"))
    answers = read_with(older, folders)
    tokenizer = load_tokenizer(ROOT / "model")
    chat = [{"role": "user", "content": "hi"}]
    for kind in kinds:
        answer = answers[str(tmp_path / f"{kind}_hf")]
        model = load_model(tmp_path / f"{kind}.pth")
        ids = tokenizer("a cab", return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(ids).logits
        assert answer["ids"] == ids[0].tolist() and answer["ids"][0] == 1
        assert answer["class"] == CLASSES.get(kind, "LlamaForCausalLM" if "llama" in kind else "Qwen2MoeForCausalLM")
        assert answer["tokenizer"] == "PreTrainedTokenizerFast"
        apart = (torch.tensor(answer["logits"]) - logits).abs().max() / logits.abs().max()
        assert apart < 1e-5, kind
        assert answer["chat"] == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert sorted(answer["special"]) == sorted(tokenizer.all_special_ids)
        assert answer["greedy"] == model.generate(ids, max_new_tokens=4, do_sample=False)[0].tolist()
        assert answer["eos"] == 2


@pytest.mark.slow
def test_transformers_4_reads_a_fine_tuned_classifier(older, tmp_path):
    """As train_glue.py leaves it, with a WordPiece tokenizer as train_electra.py leaves that."""
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ElectraForSequenceClassification(ElectraConfig(vocab_size=len(WORDS), intermediate_size=32, **sizes)).eval()
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)})
    save_model(tmp_path / "model", model, tokenizer, model.state_dict())
    (answer,) = list(read_with(older, [(tmp_path / "model", "classes")]).values())[1:]
    ids = tokenizer("a cab", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits
    assert answer["ids"] == ids[0].tolist()
    torch.testing.assert_close(torch.tensor(answer["logits"]), logits, atol=1e-5, rtol=0)
