"""The README.md of an export. References: the metrics file of a real run, and the snippet, run as it stands in the card."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from scripts import card_snippet, export_hf
from scripts.card_snippet import literal
from scripts.model_card import without_places
from tests.chats import train as train_chats
from tests.chats import write_chats
from tests.helpers import records, train, write_corpus
from tests.older_transformers import run_with
from tests.scripts.test_export import write
from trainer.sampling import model_as_saved
from trainer.saving.weights import weights_to_save

# Two prompts: the card takes the last one, whose quotes and signs have to survive Markdown and Python.
PROMPTS = ("the cat", 'Sie sagte: "it\'s `here`" \\ 猫')


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run in bfloat16 on two sources with shares, and its export in the same folder as `hf`."""
    folder = tmp_path_factory.mktemp("run")
    first = write_corpus(folder / "first.jsonl", 30)
    second = write_corpus(folder / "second.jsonl", 40, seed=1)
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    # argparse takes several values after one flag; `flags` of the helpers gives one, so both stand in a config.
    settings = folder / "run.json"
    settings.write_text(json.dumps({"data_path": [f"{first}:0.7", f"{second}:0.3"]}))
    trained = train(
        config=settings, out_dir=folder, val_fraction=0.2, eval_interval=3, sample_prompts=prompts, dtype="bfloat16",
        hidden_size=32, learning_rate=0.02, epochs=2,
    )  # fmt: skip
    export_hf.export(folder / "pretrain_32.pth", folder / "hf")
    return trained, folder


def card_of(folder):
    return (folder / "hf" / "README.md").read_text(encoding="utf-8")


def snippet_of(card):
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return snippet


def last_sample(trained):
    return records(trained, "text")[-1]


@pytest.mark.slow
def test_the_snippet_prints_what_the_trainers_last_sample_printed(run):
    """In a process of its own, that knows nothing of this repository."""
    trained, folder = run
    card = card_of(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-c", snippet_of(card)], cwd=folder, env=environment, capture_output=True, timeout=300
    )
    assert done.stdout.decode() == last_sample(trained)["text"] + "\n", done.stderr.decode()[-2000:]
    assert last_sample(trained)["prompt"] == PROMPTS[-1]
    assert f"after update {trained.progress.update:,}:" in card and "is another one" not in card


def test_the_card_of_a_fine_tuning_asks_in_a_conversation(tmp_path, capsys):
    """Reference: the trainer's last sample, and what the snippet prints when it is run here."""
    trained = train_chats(
        data_path=write_chats(tmp_path / "chats.jsonl"), out_dir=tmp_path, sample_prompts="the cat?", epochs=1
    )
    export_hf.export(tmp_path / "full_sft_16.pth", tmp_path / "hf")
    card = card_of(tmp_path)
    assert f"after update {trained.progress.update:,}:" in card and "apply_chat_template" in card
    capsys.readouterr()
    exec(
        snippet_of(card)
        .replace('"full_sft_16"', repr(str(tmp_path / "hf")))
        .replace('"hf"', repr(str(tmp_path / "hf")))
    )
    assert capsys.readouterr().out == last_sample(trained)["text"] + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.48.3", "4.57.3"])
def test_the_snippet_prints_the_same_in_transformers_4(version, older_transformers, run):
    trained, folder = run
    printed = run_with(older_transformers(version), snippet_of(card_of(folder)), cwd=folder)
    assert printed == last_sample(trained)["text"] + "\n"


def test_the_last_samples_come_from_the_weights_as_they_are_saved(run):
    """Reference: the .pth of the run."""
    trained, folder = run
    saved = torch.load(folder / "pretrain_32.pth", weights_only=True)
    state = model_as_saved(trained.engine, trained.engine.weights()).state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], saved[name].float()) for name in saved)
    # The weights of training are finer, or this would say nothing.
    finer = trained.engine.model.state_dict()
    assert any(not torch.equal(state[name], finer[name]) for name in saved)
    assert weights_to_save(finer).keys() == saved.keys()


def test_the_card_tells_what_a_reader_wants_to_know(run):
    trained, folder = run
    card = card_of(folder)
    start = records(trained, "settings")[0]
    first, second = start["data"]["sources"]
    assert (
        f"| `first.jsonl` | {first['share']:.1%}: {first['tokens']:,} of an epoch, in {first['documents']} documents |"
        in card
    )
    assert f"| `second.jsonl` | {second['share']:.1%}:" in card
    assert " of 6,400 entries. " in card and ("llama.cpp calls `" in card or "no name in llama.cpp" in card)
    assert f"holds {start['data']['bytes_per_token']:.2f} bytes" in card
    assert (folder / "hf" / "loss.png").read_bytes().startswith(b"\x89PNG") and "](loss.png)" in card
    assert f"| validation loss | {records(trained, 'val_loss')[-1]['val_loss']:.4f} |" in card
    for heading in ("Intended use and limits", "Architecture", "Training", "Tokenizer", "Check"):
        assert f"\n## {heading}\n" in card
    before, folded = card.split("<details>")
    for flag in ("learning_rate", "batch_size", "optimizer", "lr_schedule", "seed", "dtype", "max_seq_len"):
        assert f"| `--{flag}` |" in before and f"`--{flag}`" not in folded
    assert "`--log_interval`" in folded and "`--log_interval`" not in before
    assert "trained on rows of 24 tokens" in card
    assert "muon_lr" not in card and str(folder) not in card


def test_a_card_without_a_record_has_no_picture_and_no_figures(tmp_path):
    export_hf.export(write(tmp_path), tmp_path / "hf")
    card = card_of(tmp_path)
    assert "No record of the run" in card and "loss.png" not in card and "This prints" not in card
    assert not (tmp_path / "hf" / "loss.png").exists()
    compile(snippet_of(card), "snippet", "exec")


def sample_line(*more, **changes):
    """The lines of a run. changes: of its only sample, or of the first; more: changes of each further one."""
    start = {
        "started": "",
        "command": "",
        "settings": {"seed": 1},
        "model": {},
        "data": {},
        "machine": {},
        "versions": {},
    }
    at = {"step": 1, "update": 1, "tokens": 9}
    lines = [
        {**at, **start, **changes.pop("start", {})},
        {**at, "loss": 3.0},
    ]
    for changes_of_one in (changes, *more):
        lines.append({**at, "prompt": "the cat", "text": "other", **changes_of_one})
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    "changes, prompt",
    [
        ({}, "the cat"),
        ({"prompt": "a\nb```\n# x"}, "a\nb```\n# x"),
        ({"prompt": "\ud800"}, "The harbour"),
        ({"prompt": "x" * 100_000}, "The harbour"),
        ({"prompt": ""}, "The harbour"),
        # Text in training, and a token in the lines of Python.
        ({"prompt": "the cat<|im_end|> sat"}, "The harbour"),
        # The trainer cuts it to what the positions hold.
        ({"prompt": "a b c d e " * 190}, "The harbour"),
        ({"start": {"settings": {"seed": 2**70}}}, "The harbour"),
        ({"start": {"settings": {"seed": "1)\nimport os"}}}, "The harbour"),
    ],
)
def test_a_strange_record_of_samples_gives_a_whole_card(tmp_path, monkeypatch, changes, prompt):
    """What is recorded gets into the lines of Python as one string or not at all."""
    monkeypatch.setattr(card_snippet, "SAMPLE_TOKENS", 4)
    weight = write(tmp_path, max_position_embeddings=512)
    weight.with_name("pretrain_32.metrics.jsonl").write_text(sample_line(**changes))
    export_hf.export(weight, tmp_path / "hf")
    card = card_of(tmp_path)
    assert literal(prompt) in snippet_of(card) and eval(literal(prompt)) == prompt
    compile(snippet_of(card), "snippet", "exec")
    assert ("is another one" in card) == (prompt != "The harbour")
    assert len(card) < 50_000


@pytest.mark.parametrize(
    "value, said",
    [
        ("/data/web/", "web"),
        ("/data/a.jsonl:0.7", "a.jsonl:0.7"),
        ("code/:0.3..0.8:x4", "code:0.3..0.8:x4"),
        ("web/:0.7>0.2", "web:0.7>0.2"),
        ("/data/code/:0.3:x2.5", "code:0.3:x2.5"),
        (["/a/b:0.1..0.9", "c"], ["b:0.1..0.9", "c"]),
    ],
)
def test_a_path_is_told_by_its_last_part_and_its_share(value, said):
    assert without_places(value) == said


def test_the_card_takes_the_last_sample_that_its_lines_can_draw(tmp_path, monkeypatch):
    """The model is loaded once, however many are tried."""
    monkeypatch.setattr(card_snippet, "SAMPLE_TOKENS", 4)
    loads = []

    def load(folder, right=card_snippet.load_model):
        loads.append(folder)
        return right(folder)

    monkeypatch.setattr(card_snippet, "load_model", load)
    weight = write(tmp_path)
    lines = sample_line({"prompt": "a dog"}, {"prompt": "a token: <think>"})
    weight.with_name("pretrain_32.metrics.jsonl").write_text(lines)
    export_hf.export(weight, tmp_path / "hf")
    card = card_of(tmp_path)
    assert "is another one.\n" in card and "<think>" not in card
    assert literal("the cat") in snippet_of(card)
    assert len(loads) == 1


def test_a_card_tells_which_weights_the_run_began_with(tmp_path, monkeypatch):
    """What they were trained on and for is not known, so less is said of the model."""
    monkeypatch.setattr(card_snippet, "SAMPLE_TOKENS", 4)
    weight = write(tmp_path)
    for begun_with in ("none", "/home/me/Qwen3-0.6B"):
        settings = {"seed": 1, "from_weight": begun_with}
        weight.with_name("pretrain_32.metrics.jsonl").write_text(sample_line(start={"settings": settings}))
        export_hf.export(weight, tmp_path / "hf", overwrite=True)
        card = card_of(tmp_path)
        goes_on = begun_with != "none"
        assert ("began with the weights of `Qwen3-0.6B`, whose license and limits hold here too" in card) == goes_on
        assert ("Pretraining does not teach" in card) != goes_on
        assert "was not measured." in card and "{" not in card.split("## Intended use")[1].split("## Arch")[0]
        assert "/home/me" not in card


def test_strange_records_of_data_and_settings_stay_within_their_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(card_snippet, "SAMPLE_TOKENS", 4)
    weight = write(tmp_path)
    strange = {
        "data": {
            "bytes_per_token": "many",
            "sources": [3, {"paths": "a"}, {"paths": ["/x/a|b`.jsonl\n"], "share": 0.5}],
        },
        "settings": {"data_path": "/x/a|b`\n# c.jsonl", "seed": 3},
    }
    weight.with_name("pretrain_32.metrics.jsonl").write_text(sample_line(start=strange))
    export_hf.export(weight, tmp_path / "hf")
    card = card_of(tmp_path)
    assert (
        "| `--data_path` | `a\\|b' # c.jsonl` |" in card
        and "### Data" not in card
        and "bytes of the training" not in card
    )
