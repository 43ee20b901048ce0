"""Exports in older versions of transformers and in lm_eval, installed aside. References: the logits and ids of our own code."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import BertTokenizer, ElectraConfig, ElectraForSequenceClassification

from dataset.tokenizing.encoder import load_tokenizer
from encoders.glue.job import save_model
from scripts import export_hf
from scripts.common import load_model
from tests.encoders.glue.test_examples import WORDS
from tests.scripts.test_export import CLASSES, KINDS, write

# theta away from the default of transformers 4, that a name it does not know cannot hide.
FIELDS = {kind: {**fields, "rope_theta": 50_000.0} for kind, fields in KINDS.items()}
FIELDS["llama_yarn"] = {"inference_rope_scaling": True, "rope_theta": 50_000.0}
# What each version is said to compute: docs/scripts.md and the model cards say the same. The newer one reads the rest too.
OLDEST = [kind for kind in FIELDS if "qwen3" not in kind and "yarn" not in kind]
NEWER = [kind for kind in FIELDS if kind not in OLDEST]
READS = {"4.48.3": OLDEST, "4.51.3": NEWER, "4.57.3": NEWER}
CHAT = [{"role": "user", "content": "hi"}]
# Words that the classifier's vocabulary has, and a text of several scripts.
TEXT = {"classes": "a cab", "causal": " ".join(export_hf.TEXTS)}

# Loads what is named on its standard input and answers with what came of it; knows nothing of this repository.
READER = """
import contextlib, io, json, os, sys, tempfile, torch, transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
answers = {"version": transformers.__version__}
for folder, kind, text in json.load(sys.stdin):
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    inputs = tokenizer(text, return_tensors="pt")
    answer = {"ids": inputs.input_ids[0].tolist(), "tokenizer": type(tokenizer).__name__, "inputs": sorted(inputs)}
    answers[folder] = answer
    if kind != "classes":
        chat = [{"role": "user", "content": "hi"}]
        answer["chat"] = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        answer["special"] = tokenizer.all_special_ids
        answer["additional"] = tokenizer.additional_special_tokens
        answer["hidden"] = tokenizer.decode([1, 3, *tokenizer("hi", add_special_tokens=False).input_ids], skip_special_tokens=True)
    loader = AutoModelForCausalLM if kind == "causal" else AutoModelForSequenceClassification
    model = loader.from_pretrained(folder, torch_dtype=torch.float32, trust_remote_code=False).eval()
    answer["class"] = type(model).__name__
    with torch.no_grad():
        answer["logits"] = model(inputs.input_ids).logits.tolist()
    if kind == "causal":
        answer["greedy"] = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0].tolist()
        answer["eos"] = model.generation_config.eos_token_id
        with tempfile.TemporaryDirectory() as written:
            model.save_pretrained(written)
            answer["fields"] = list(json.load(open(written + "/config.json")))
        # The lines of the card, for versions that know their dtype
        if transformers.__version__ >= "4.56":
            os.chdir(os.path.dirname(folder))
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(open(folder + "/README.md").read().split("```python\\n")[1].split("```")[0])
            answer["card"] = printed.getvalue()
json.dump(answers, sys.stdout)
"""


# {version: that of tokenizers beside it}; torch, numpy and the rest are those of this process.
TOKENIZERS = {"4.48.3": "0.21.4", "4.51.3": "0.21.4", "4.57.3": "0.22.1"}


@pytest.fixture(scope="module", params=TOKENIZERS)
def version(request):
    return request.param


@pytest.fixture(scope="module")
def answers(version, references, exports, classifier, tmp_path_factory):
    """{kind: answer of READER in that version}; skipped where no package index answers."""
    place = tmp_path_factory.mktemp(f"transformers-{version}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(place)]
    pinned = [f"transformers=={version}", f"tokenizers=={TOKENIZERS[version]}", "huggingface_hub==0.36.0"]
    if subprocess.run([*command, *pinned], capture_output=True, timeout=300).returncode:
        pytest.skip(f"pip cannot install {', '.join(pinned)}: no network?")
    asked = {kind: (str(exports / f"{kind}_hf"), "causal", TEXT["causal"]) for kind in READS[version]}
    asked["classes"] = (str(classifier[0]), "classes", TEXT["classes"])
    environment = {**os.environ, "PYTHONPATH": str(place), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", READER], input=json.dumps(list(asked.values())), capture_output=True, text=True,
        env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["version"] == version
    return {kind: found[folder] for kind, (folder, *_) in asked.items()}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A folder with {kind}.pth and {kind}_hf of each kind."""
    folder = tmp_path_factory.mktemp("exports")
    for kind, fields in FIELDS.items():
        export_hf.export(write(folder, kind, **fields), folder / f"{kind}_hf")
    return folder


@pytest.fixture(scope="module")
def references(exports):
    """The tokenizer, the ids of the text, and {kind: (logits, greedy continuation)} by this repository's code."""
    tokenizer = load_tokenizer(exports / "llama_hf")
    ids = tokenizer(TEXT["causal"], return_tensors="pt").input_ids
    computed = {}
    for kind in FIELDS:
        model = load_model(exports / f"{kind}.pth")
        with torch.no_grad():
            computed[kind] = model(ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)[0].tolist()
    return tokenizer, ids, computed


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """(folder, ids, logits) as train_glue.py leaves it, with a WordPiece tokenizer as train_electra.py leaves that."""
    folder = tmp_path_factory.mktemp("classifier") / "model"
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ElectraForSequenceClassification(ElectraConfig(vocab_size=len(WORDS), intermediate_size=32, **sizes)).eval()
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)})
    save_model(folder, model, tokenizer, model.state_dict())
    ids = tokenizer(TEXT["classes"], return_tensors="pt").input_ids
    with torch.no_grad():
        return folder, ids, model(ids).logits


@pytest.mark.slow
def test_transformers_4_reads_every_export_as_it_is(version, answers, references, exports):
    tokenizer, ids, computed = references
    for kind in READS[version]:
        answer = answers[kind]
        logits, greedy = computed[kind]
        assert answer["ids"] == ids[0].tolist() and answer["ids"][0] == 1
        assert answer["class"] == CLASSES.get(kind, "LlamaForCausalLM" if "llama" in kind else "Qwen2MoeForCausalLM")
        apart = (torch.tensor(answer["logits"]) - logits).abs().max() / logits.abs().max()
        assert apart < 1e-5, kind
        assert answer["greedy"] == greedy
        assert answer["eos"] == 2
        ours = json.loads((exports / f"{kind}_hf" / "config.json").read_text())
        assert ours.keys() >= set(answer["fields"]) - {"_name_or_path"}, kind
        assert version < "4.56" or answer["card"].startswith("The harbour")
        # What it says of the tokenizer is what the version of this process says.
        assert answer["tokenizer"] == "PreTrainedTokenizerFast"
        # generate() would refuse token_type_ids.
        assert answer["inputs"] == ["attention_mask", "input_ids"]
        assert answer["chat"] == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        assert sorted(answer["special"]) == sorted(tokenizer.all_special_ids)
        assert answer["additional"] == tokenizer.extra_special_tokens
        assert answer["hidden"] == "hi"


@pytest.mark.slow
def test_transformers_4_reads_a_fine_tuned_classifier(answers, classifier):
    _, ids, logits = classifier
    assert answers["classes"]["ids"] == ids[0].tolist()
    torch.testing.assert_close(torch.tensor(answers["classes"]["logits"]), logits, atol=1e-5, rtol=0)


# Log-likelihoods of a text, and of an answer after its beginning, in lm-evaluation-harness; of both by each add_bos_token
HARNESS = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
folder, text, answer = sys.argv[1:]
for bos in (None, True, False):
    model = HFLM(folder, add_bos_token=bos, device="cpu", dtype="float32")
    (whole,) = model.loglikelihood_rolling([Instance("", {}, (text + answer,), 0)], disable_tqdm=True)
    ((end, _),) = model.loglikelihood([Instance("", {}, (text, answer), 0)], disable_tqdm=True)
    print(json.dumps([whole, end]))
"""


@pytest.mark.slow
def test_lm_eval_scores_texts_without_a_start_token_of_its_own(tmp_path):
    """As docs/scripts.md says. References: the text's ids, counted after one start token; with two, another sum."""
    export_hf.export(write(tmp_path), tmp_path / "hf")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "lm")]
    if subprocess.run([*install, "lm_eval==0.4.13"], capture_output=True, timeout=300).returncode:
        pytest.skip("pip cannot install lm_eval: no network?")
    texts = ("The harbour is full of small boats", " and of people")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lm"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", HARNESS, str(tmp_path / "hf"), *texts]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    by_default, with_token, without = map(json.loads, done.stdout.splitlines()[-3:])
    tokenizer, model = load_tokenizer(tmp_path / "hf"), load_model(tmp_path / "pretrain_32.pth")

    def scored(ids, first):
        """Log-likelihood of the ids from number `first` on."""
        found = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(found[at - 1, ids[at]].item() for at in range(first, len(ids)))

    ids, border = tokenizer("".join(texts)).input_ids, len(tokenizer(texts[0]).input_ids)
    right = [scored(ids, 1), scored(ids, border)]
    assert without == pytest.approx([right[0], scored(ids[1:], border - 1)], abs=1e-3)
    assert by_default == with_token == pytest.approx([scored([1, *ids], 1), right[1]], abs=1e-3)
    assert abs(with_token[0] - right[0]) > 1 and abs(without[1] - right[1]) > 0.1
