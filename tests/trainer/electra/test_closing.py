"""What a finished ELECTRA run shows of itself. References: the texts of the files, and detect.py's own reading."""

import json
import random
import re

import pytest
import torch

from common.terminal import TerminalText, width_of_terminal
from tests.dataset.electra.test_electra_dataset import WORDS, write_vocab
from tests.trainer.test_train_electra import train
from trainer.electra.closing import LEAST_CHARACTERS, MOST_CHARACTERS, PASSAGES, excerpt_of
from trainer.electra.detector import open_detector
from trainer.electra.passages import passage_lines
from trainer.reporting.ending import tell_closing
from trainer.reporting.html_report import write_report
from trainer.reporting.records import RunRecords


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
        self.run = RunRecords(path)


def test_a_run_ends_with_passages_that_it_has_not_trained(data, tmp_path, capsys):
    folder, texts, flags = data
    run = train(**flags, out_dir=tmp_path, val_fraction=0.3, max_steps=2, report=1)
    records = RunRecordsOf(tmp_path)
    (record,) = records.found
    said = r"Held-out text, in which the generator has written 15% of the tokens anew: \d+ of \d+ replaced words? doubted, .*"
    assert re.fullmatch(said, record["passages_of"]) and record["update"] == 2
    passages = records.run.passages
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
    page = (tmp_path / "electra_small" / "electra_small.report.html").read_text(encoding="utf-8")
    doubted = sum(len(passage.doubted) for passage in passages)
    assert page.count('class="doubted" title=') == doubted and page.count('<section class="passage">') == PASSAGES
    assert page.count("<s>") == 1 + sum(passage.counts.replaced for passage in passages)


def test_without_validation_they_are_of_the_trained_text(data, tmp_path, capsys):
    folder, texts, flags = data
    train(**flags, out_dir=tmp_path, max_steps=1)
    assert "The text that was trained, in which the generator" in capsys.readouterr().out
    first = RunRecordsOf(tmp_path).run.passages[0]
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
    tell_closing(run)
    assert "warning: the run is done, but nothing can be shown of it: " in capsys.readouterr().out
    run.job.closing = lambda: 1 // 0
    tell_closing(run)
    assert "nothing can be shown of it: integer division" in capsys.readouterr().out
    del run.job.closing
    # An untrained discriminator has nothing to show.
    run.job.data_path = [str(flags["data_path"])]
    run.job.objective.tells_replaced = False
    assert run.job.closing() is None


def test_a_metrics_file_of_anybodys_makes_a_harmless_report(data, tmp_path):
    hostile = "</u><script>alert(1)</script>\x1b[2J\u202e"
    word = {"before": hostile, "word": hostile, "probability": 0.9, "original": hostile, "replaced": True}
    passage = {"threshold": 0.5, "corrupted": True, "after": hostile, "words": [word]}
    lines = [
        {"tokens": 1, "step": 1, "update": 1, "loss": 1.0},
        {"tokens": 1, "passages": [passage], "passages_of": hostile},
        {"tokens": 1, "passages": [{**passage, "words": 3}], "passages_of": "no passages"},
        {"tokens": 1, "passages": "none", "passages_of": "no passages"},
    ]
    path = tmp_path / "a.metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(RunRecords(path).passages) == 1
    write_report([path], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<script" not in page and "\x1b" not in page and "\u202e" not in page and "&lt;script&gt;" in page


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
