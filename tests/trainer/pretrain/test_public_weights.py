"""Going on from Hugging Face folders. References: transformers' own classes on the same documents, uninterrupted runs."""

import shutil
import signal
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from common.errors import DataError, UserError
from dataset.batches import Assembler
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.tokenizer_files import vocabulary_digest
from model.weight_record import VOCABULARY_FIELD, read_record
from scripts import evaluate, export_hf, generate
from scripts.common import load_model
from tests import helpers
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import ROOT, assert_same_weights, flags, losses, stopped_after, train, trainer_of, write_corpus
from tests.model.public import KINDS, change_config, write_public
from trainer import train_pretrain
from trainer.pretrain.settings import PretrainSettings

ENTRIES = 300
END = "<|endoftext|>"
# No flag says what the folder tells.
UNSAID = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"))


def write_tokenizer(folder, entries=ENTRIES):
    """A byte-level tokenizer with an end and no beginning, as Qwen's have none."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    small_tokenizer(None, END, END, vocab_size=entries, texts=[text]).save_pretrained(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A few documents, so that a run takes a moment."""
    return write_corpus(tmp_path_factory.mktemp("few") / "data.jsonl", n_documents=6)


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """{kind: folder with a model of this kind and its tokenizer}"""
    place = tmp_path_factory.mktemp("public")
    for kind in KINDS:
        write_public(place / kind, kind, max_shard_size="20KB")
        write_tokenizer(place / kind)
    return {kind: place / kind for kind in KINDS}


def loss_of(theirs, batch):
    """The mean loss of a batch's targets by transformers, one document at a time."""
    total = 0.0
    with torch.no_grad():
        for ids, targets, documents in zip(batch.input_ids, batch.targets, batch.document_ids, strict=True):
            for number in range(int(documents.max()) + 1):
                inside = documents == number
                logits = theirs(ids[inside][None]).logits[0]
                total += F.cross_entropy(logits, targets[inside], ignore_index=-100, reduction="sum").item()
    return total / batch.n_targets


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_is_that_of_transformers_and_the_run_goes_out_again(data, public, tmp_path, kind, capsys):
    """Reference: transformers' class on the documents of the first micro-batch, and on the export of the trained model."""
    run = train(data_path=data, out_dir=tmp_path, from_weight=public[kind], **UNSAID, learning_rate=1e-2)
    theirs = AutoModelForCausalLM.from_pretrained(public[kind], dtype=torch.float32).eval()
    batch = Assembler(run.job.assembler.store)[run.job.plan(0).recipe(range(2))]
    assert losses(run)[0] == pytest.approx(loss_of(theirs, batch), rel=1e-5)
    found = losses(run)
    assert sum(found[-4:]) < sum(found[:4])
    # The model's own file, its tokenizer's vocabulary beside it, and the export of it.
    weight = tmp_path / f"pretrain_32{'_moe' if 'moe' in kind else ''}.pth"
    assert read_record(weight).get(VOCABULARY_FIELD) == vocabulary_digest(load_tokenizer(public[kind]))
    own = ["--tokenizer_path", str(public[kind])]
    assert export_hf.main(["--weight", str(weight), "--out_dir", str(tmp_path / "hf"), *own]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert type(exported) is type(theirs)
    ids = batch.input_ids
    with torch.no_grad():
        ours = load_model(weight)(ids).logits
        assert (exported(ids).logits - ours).abs().max() <= 1e-5 * ours.abs().max()
        # It has learned something, so the comparison is not one with the folder's own weights.
        assert (theirs(ids).logits - ours).abs().max() > 1e-3
    for script in (generate, evaluate):
        command = ["perplexity"] if script is evaluate else []
        extra = ["--data_path", str(data)] if script is evaluate else ["--max_new_tokens", "3", "the cat"]
        assert script.main([*command, "--weight", str(weight), *own, *extra, "--device", "cpu"]) == 0
    assert "has no effect" not in capsys.readouterr().out


def test_the_shape_and_the_tokenizer_are_the_folders(data, public, tmp_path):
    """They stand in the settings file, which starts the same run again."""
    run = train(data_path=data, out_dir=tmp_path, from_weight=public["qwen3"], **UNSAID)
    config = run.job.config
    expected = {"generation": "minimind3", "hidden_size": 32, "head_dim": 16, "rope_theta": 50_000.0, "vocab_size": 320}
    assert {name: getattr(config, name) for name in expected} == expected
    # The ids of the tokenizer, with which the documents are made: there is no beginning.
    end = run.job.parts.tokenizer.eos_token_id
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, end, end)
    assert len(run.job.parts.tokenizer) == ENTRIES
    path = tmp_path / "pretrain_32.settings.yaml"
    settings = PretrainSettings.parse(["--config", str(path)])
    assert settings == run.job.settings
    assert (settings.generation, settings.num_key_value_heads, settings.use_moe) == ("minimind3", 2, False)
    assert settings.tokenizer_path == settings.from_weight == str(public["qwen3"])
    nothing_said = dict.fromkeys(helpers.SMALL)
    again = train(**{**nothing_said, "config": path, "out_dir": tmp_path / "again", "device": "cpu", "report": 0})
    assert losses(again) == losses(run)


# The default of a fresh model, 512, is a contradiction too where the user says it.
@pytest.mark.parametrize("name, value", [("hidden_size", 512), ("num_key_value_heads", 4), ("generation", "minimind2")])
def test_a_flag_that_contradicts_the_folder_is_refused(data, public, tmp_path, name, value):
    with pytest.raises(UserError, match=f"--{name} .* contradicts .*qwen3, whose {name} is .*: leave the flag out"):
        train(**{**UNSAID, "data_path": data, "out_dir": tmp_path, "from_weight": public["qwen3"], name: value})
    assert not (tmp_path / "pretrain_32.settings.yaml").exists()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: No such file"),
        (lambda folder: next(folder.glob("model-*")).unlink(), "copy: a shard .* is missing"),
        (partial(change_config, hidden_size=64), "not the weights of this config: they have hidden_size=32"),
        (partial(write_tokenizer, entries=321), "has 321 entries and the model embeddings for 320"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "no tokenizer can be loaded"),
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "no tokenizer is in there; name the"),
        (partial(change_config, max_position_embeddings=16), "beyond the position table of 16"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(data, public, tmp_path, spoil, message):
    copied = shutil.copytree(public["qwen3"], tmp_path / "copy")
    spoil(copied)
    with pytest.raises((UserError, DataError), match=message):
        train(data_path=data, out_dir=tmp_path, from_weight=copied, **UNSAID)
    assert not list(tmp_path.glob("pretrain*"))


def test_a_name_of_the_hub_is_told_to_be_downloaded(data, tmp_path):
    line = "--from_weight Qwen/Qwen3-0.6B: there is neither a folder of a model .* hf download"
    with pytest.raises(UserError, match=line):
        train(data_path=data, out_dir=tmp_path, from_weight="Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
def test_a_resume_is_bitwise_with_the_folder_and_without_it(data, public, tmp_path, kind, capsys):
    """Reference: a run that was not stopped. Without the folder, the run's own .pth tells the shape."""
    folder = shutil.copytree(public[kind], tmp_path / "folder")
    of_run = {"data_path": data, "epochs": 2, **UNSAID}
    whole = train(**of_run, out_dir=tmp_path / "whole", from_weight=folder)
    stopped = flags(**of_run, out_dir=tmp_path / "run", from_weight=folder)
    with stopped_after(2):
        assert train_pretrain.main(stopped) == 128 + signal.SIGTERM
    shutil.copytree(tmp_path / "run", tmp_path / "without")
    assert_same_weights(trainer_of(train_pretrain.main, [*stopped, "--from_resume", "1"]), whole)

    shutil.copytree(public[kind], tmp_path / "tokens", ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    shutil.rmtree(folder)
    capsys.readouterr()
    (weight,) = (tmp_path / "without").glob("*.pth")
    own = ["--out_dir", tmp_path / "without", "--from_weight", weight, "--tokenizer_path", tmp_path / "tokens"]
    command = ["--config", weight.with_suffix(".settings.yaml"), *own, "--from_resume", "1"]
    assert_same_weights(trainer_of(train_pretrain.main, list(map(str, command))), whole)
    assert "the run continues from its checkpoint and keeps" in capsys.readouterr().out
    assert whole.progress.update > 2
