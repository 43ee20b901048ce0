"""What a finished ELECTRA run shows of itself. References: the texts of the files, and detect.py's own reading."""

import json
import random
import re

import pytest
import torch

from common.terminal import TerminalText, width_of_terminal
from model.electra.detection import passage_of_record
from tests.dataset.electra.test_electra_dataset import WORDS, write_vocab
from tests.trainer.test_train_electra import train
from trainer.electra.closing import LEAST_CHARACTERS, MOST_CHARACTERS, PASSAGES, excerpt_of
from trainer.electra.detector import open_detector
from trainer.electra.passages import passage_lines
from trainer.reporting.ending import tell_closing


def write_documents(path, n=60):
    """Documents of a title and some sentences; returns their texts."""
    generator = random.Random(0)
    texts = []
    for number in range(n):
        sentences = [" ".join(generator.choices(WORDS, k=12)) + f" {number}." for _ in range(6)]
        texts.append("A title\n\n" + " ".join(sentences))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    texts = write_documents(folder / "data.jsonl")
    return folder, texts, {"data_path": folder / "data.jsonl", "vocab_path": write_vocab(folder / "vocab.txt")}


class RunRecordsOf:
    """The lines of a run's metrics that have passages."""

    def __init__(self, out):
        path = out / "electra_small" / "electra_small.metrics.jsonl"
        self.found = [line for line in map(json.loads, path.read_text().splitlines()) if "passages" in line]
        self.passages = list(map(passage_of_record, self.found[-1]["passages"])) if self.found else []


def test_a_run_ends_with_passages_that_it_has_not_trained(data, tmp_path, capsys):
    folder, texts, flags = data
    run = train(**flags, out_dir=tmp_path, val_fraction=0.3, max_steps=2, report=1)
    records = RunRecordsOf(tmp_path)
    (record,) = records.found
    said = r"Held-out text, in which the generator has written 15% of the tokens anew: \d+ of \d+ replaced words? doubted, .*"
    assert re.fullmatch(said, record["passages_of"]) and record["update"] == 2
    passages = records.passages
    assert len(passages) == PASSAGES
    held_out = {texts[int(number)] for number in run.job.held_out.val_documents}
    detector = open_detector("--model", str(tmp_path / "electra_small"), torch.device("cpu"))
    for seed, passage in enumerate(passages):
        original = "".join(word.before + (word.original or word.text) for word in passage.words) + passage.after
        assert len([text for text in held_out if original in text]) == 1
        assert passage == detector.passage(original, share=0.15, seed=seed)
    out = capsys.readouterr().out
    assert passage_lines(passages, width_of_terminal(), False) in out
    assert out.index("Held-out text") < out.index("discriminator: ")


def test_without_validation_they_are_of_the_trained_text(data, tmp_path, capsys):
    folder, texts, flags = data
    train(**flags, out_dir=tmp_path, max_steps=1)
    assert "The text that was trained, in which the generator" in capsys.readouterr().out
    first = RunRecordsOf(tmp_path).passages[0]
    assert "".join(word.before + (word.original or word.text) for word in first.words) in texts[0]


def test_words_are_replaced_as_the_run_has_replaced_them(data, tmp_path):
    """With disallow_correct each masked token is another one. Reference: the saved generator's config."""
    folder, texts, flags = data
    own = {"mask_style": "bert", "temperature": 0.5, "disallow_correct": 1}
    run = train(**flags, out_dir=tmp_path, max_steps=1, **own)
    config = json.loads((tmp_path / "electra_small" / "generator" / "config.json").read_text())
    assert config["replaced_by"] == {**own, "disallow_correct": True}
    detector = open_detector("--model", str(tmp_path / "electra_small"), torch.device("cpu"))
    assert detector.draws == run.job.objective.draws
    # A run that begins with these networks, and draws as usual, says nothing of it.
    sizes = dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "embedding_size")
    )
    train(**flags, **sizes, out_dir=tmp_path / "b", max_steps=1, model_path=tmp_path / "electra_small")
    again = json.loads((tmp_path / "b" / "electra_small" / "generator" / "config.json").read_text())
    assert "replaced_by" not in again


def test_they_come_in_colour_on_a_terminal(data, tmp_path, capsys, monkeypatch):
    folder, texts, flags = data
    monkeypatch.setattr("trainer.electra.closing.has_colours", lambda stream: True)
    run = train(**flags, out_dir=tmp_path, max_steps=1)
    closing = run.job.closing()
    assert isinstance(closing.text, TerminalText) and "\x1b[32m" in closing.text
    assert closing.text in capsys.readouterr().out


def test_a_run_whose_text_has_gone_ends_all_the_same(data, tmp_path, capsys):
    folder, texts, flags = data
    run = train(**flags, out_dir=tmp_path, max_steps=1, val_fraction=0.3)
    run.job.data_path = [str(tmp_path / "gone.jsonl")]
    tell_closing(run.job, run.progress, run.reporter)
    assert "warning: the run is done, but nothing can be shown of it: " in capsys.readouterr().out
    run.job.closing = lambda: 1 // 0
    tell_closing(run.job, run.progress, run.reporter)
    assert "nothing can be shown of it: integer division" in capsys.readouterr().out
    del run.job.closing
    # An untrained discriminator has nothing to show.
    run.job.data_path = [str(flags["data_path"])]
    run.job.objective.tells_replaced = False
    assert run.job.closing() is None


def test_an_excerpt_is_of_whole_sentences_of_the_first_long_paragraph():
    sentence = "the cat sat on a mat while dogs ran over far hills and rain fell."
    assert excerpt_of("title\n\nshort.") is None
    paragraph = f"{sentence} {sentence} {sentence}"
    assert excerpt_of(f"title\n \n  {paragraph}\n\n{paragraph}") == f"{sentence} {sentence}"
    chinese = "猫坐在垫子上。" * 40
    found = excerpt_of(chinese)
    assert chinese.startswith(found) and found.endswith("。") and LEAST_CHARACTERS <= len(found) < LEAST_CHARACTERS + 8
    endless = excerpt_of("word " * 1000)
    assert len(endless) <= MOST_CHARACTERS and endless.endswith("word")
