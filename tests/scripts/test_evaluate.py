"""scripts/evaluate.py: every task against brute force (a sequence a time, fp32, all logits), intervals."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from dataset.tokenizing.encoder import DocumentEncoder
from model.weight_record import ROW_LENGTH_FIELD
from scripts import evaluate, export_hf, generate
from scripts.common import load_model
from scripts.evaluate import ratio, share
from tests.dataset.reading.test_formats import write_arrow
from tests.helpers import WORDS, write_records
from tests.scripts.test_export import write
from trainer.saving.weights import save_pth

PAIR = '{"sentence_good": "a b", "sentence_bad": "b"}\n'


@pytest.fixture(scope="module")
def weight(tmp_path_factory):
    """Weights far from their initial values, so that sentences differ in probability."""
    return str(write(tmp_path_factory.mktemp("out")))


def sentence(generator, n=None):
    return " ".join(generator.choices(WORDS, k=n or generator.randint(3, 12)))


def run(task, weight, data, out, *flags):
    arguments = [task, "--weight", str(weight), "--data_path", data, "--out", str(out), "--device", "cpu", *flags]
    assert evaluate.main(arguments if "--dtype" in flags else [*arguments, "--dtype", "float32"]) == 0
    result = json.loads(out.with_name(f"{out.name}.json").read_text())
    return result, {name: metric["value"] for name, metric in result["metrics"].items()}


@torch.no_grad()
def brute_force(model, ids, start=1):
    """Sum of log P of ids[start:] given all before: one forward, no mask, no batch."""
    logprobs = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)[start - 1 :]
    return float(logprobs.gather(1, torch.tensor(ids[start:]).unsqueeze(1)).sum())


def test_pairs_equal_brute_force(weight, tokenizer, tmp_path):
    generator, encoder = random.Random(0), DocumentEncoder(tokenizer)
    pairs = []
    for i in range(40):
        words = sentence(generator).split()
        bad = sorted(words) if i % 2 else words[:-1]  # one sentence may begin with the other
        pairs.append({"sentence_good": " ".join(words), "sentence_bad": " ".join(bad) + "x"})
    paths = [tmp_path / f"kind{i}{suffix}" for i, suffix in enumerate((".jsonl", ".tsv", ".parquet"))]
    write_records(paths[0], pairs[::3])
    paths[1].write_text("".join("\t".join(row) + "\n" for row in (pairs[0], *(pair.values() for pair in pairs[1::3]))))
    write_arrow(paths[2], pytest.importorskip("pyarrow").Table.from_pylist(pairs[2::3]), "parquet")
    result, values = run("pairs", weight, "", tmp_path / "r", "--batch_tokens", "64", "--data_path", *map(str, paths))
    model, right = load_model(weight), []
    for pair in pairs:
        good, bad = (brute_force(model, encoder.encode([pair[f"sentence_{x}"]])[0][:-1]) for x in ("good", "bad"))
        right.append(good > bad)
    assert 0 < sum(right) < 40 and values["accuracy"] == sum(right) / 40
    assert values["accuracy/kind1"] == sum(right[1::3]) / len(right[1::3])
    assert result["counts"] == {"pairs": 40}


def test_the_window_is_a_row_of_training_and_what_is_longer_is_told(weight, tmp_path, capsys):
    """From the .json beside a weight and from an export, which has the same loss; without a record the window is 512."""
    stem = Path(weight).with_name("short")
    model = load_model(weight)
    save_pth(model.state_dict(), {**model.config.to_dict(), ROW_LENGTH_FIELD: 8}, stem)
    export_hf.export(f"{stem}.pth", tmp_path / "hf")
    export_hf.convert_to_pth(tmp_path / "hf", tmp_path / "back.pth")
    data = write_records(tmp_path / "data.jsonl", [{"text": sentence(random.Random(0), 40)}])
    losses = {512: [], 8: []}
    for known, length in ((weight, 512), (f"{stem}.pth", 8), (tmp_path / "hf", 8), (tmp_path / "back.pth", 8)):
        capsys.readouterr()
        result, values = run("perplexity", known, data, tmp_path / "r")
        assert result["max_length"] == length
        losses[length].append(values["loss"])
        assert "note:" not in capsys.readouterr().err
        run("perplexity", known, data, tmp_path / "r", "--max_length", "16")
        told = "note: a text of 16 positions, but the rows in training had 8: beyond them it gets worse\n"
        assert (told in capsys.readouterr().err) == (length == 8)
    assert losses[8] == pytest.approx([losses[8][0]] * 3, abs=1e-4)
    assert generate.main(["--weight", f"{stem}.pth", "--device", "cpu", "--temperature", "0", "the cat"]) == 0
    shown = capsys.readouterr().err
    assert "[8 tokens, " in shown and "note: a text of 1" in shown


@pytest.mark.parametrize(("max_length", "stride"), [(16, 8), (16, 16), (16, 5), (512, 256)])
def test_perplexity_equals_brute_force_windows(weight, tokenizer, tmp_path, max_length, stride):
    """Every token is predicted once, after the same context as in a plain loop over strided windows."""
    texts = [sentence(random.Random(i), n) for i, n in enumerate((1, 60, 33, 7))] + ["一二三，四五六。"]
    data = write_records(tmp_path / "t.jsonl", [{"text": t} for t in texts])
    flags = ["--max_length", str(max_length), "--stride", str(stride), "--batch_tokens", "70"]
    result, values = run("perplexity", weight, data, tmp_path / "r", *flags)
    model, encoder, total, tokens = load_model(weight), DocumentEncoder(tokenizer), 0.0, 0
    for ids in encoder.encode(texts):
        done = 1
        while done < len(ids):
            end = min(len(ids), max_length + 1 if done == 1 else done + stride)
            begin = max(0, end - 1 - max_length)
            total -= brute_force(model, ids[begin:end], done - begin)
            tokens, done = tokens + end - done, end
    n_bytes = sum(len(text.encode()) for text in texts)
    assert tokens == sum(len(ids) - 1 for ids in encoder.encode(texts)) == result["counts"]["tokens"]
    assert values["loss"] == pytest.approx(total / tokens, abs=1e-5)
    assert values["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert values["bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes, rel=1e-5)
    assert math.log(values["word_perplexity"]) == pytest.approx(total / sum(len(t.split()) for t in texts), rel=1e-5)


def test_bad_lines_are_counted_once_and_files_of_one_name_told_apart(weight, tmp_path, capsys):
    bad = '{"sentence_good": "a b"}\n{\n{"sentence_good": "a", "sentence_bad": ""}\n'
    paths = [tmp_path / folder / "d.jsonl" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(PAIR + bad + PAIR)
        # Without --out each data has its own file.
        assert evaluate.main(["pairs", "--weight", weight, "--data_path", str(path), "--skip_bad_lines"]) == 0
    assert len(list(Path(weight).parent.glob("pretrain_32.pairs.d.jsonl-*.json"))) == 2
    capsys.readouterr()
    (tmp_path / "c.csv").write_text("text\na\n")
    result, values = run("pairs", weight, str(tmp_path / "**"), tmp_path / "r", "--skip_bad_lines")
    assert result["counts"] == {"pairs": 4}
    assert values.keys() == {"accuracy", *(f"accuracy/{path}" for path in paths)}
    told = capsys.readouterr().err
    assert "skipped 6 bad lines:" in told and "2 files read (.jsonl), 1 of other kinds (such as c.csv) left out" in told


def test_a_text_that_is_too_long_to_encode_is_a_bad_line(weight, tmp_path, capsys):
    data = write_records(tmp_path / "t.jsonl", [{"text": text} for text in ("the cat", "a" * (1 << 22))])
    result, _ = run("perplexity", weight, data, tmp_path / "r", "--skip_bad_lines")
    assert result["counts"]["documents"] == 1 and "too long: 1\n" in capsys.readouterr().err


def test_intervals():
    """References: Wilson's formula, and a bootstrap over documents for a ratio of sums."""
    z = 1.959963984540054
    for right, n in ((0, 7), (3, 10), (700, 1000)):
        p = right / n
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        ends = [(middle + sign * half) / (1 + z * z / n) for sign in (-1, 1)]
        metric = share([True] * right + [False] * (n - right))
        assert metric.value == p and (metric.low, metric.high) == pytest.approx(ends, abs=1e-9)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 200, (300,), generator=generator).double()
    losses = tokens * (3 + torch.randn(300, generator=generator).double())
    metric = ratio(losses.tolist(), tokens.tolist())
    draws = torch.randint(0, 300, (4000, 300), generator=generator)
    ratios = losses[draws].sum(1) / tokens[draws].sum(1)
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975]).double()).tolist()
    assert metric.high - metric.low == pytest.approx(high - low, rel=0.08)
    assert metric.low == pytest.approx(low, abs=0.02)


def test_one_line_for_a_bad_file(weight, tmp_path):
    for task, content, message in (
        ("pairs", "no JSON", "d.txt:1: no 'sentence_good'"),
        ("pairs", "{", "d.jsonl:1: cut line: "),
        ("pairs", PAIR + '{"sentence_good": "", "sentence_bad": "a"}', "d.jsonl:2: sentence_good has 0 tokens"),
        ("pairs", "", "nothing to evaluate there"),
        ("perplexity", '{"text": null}', "d.jsonl:1: 'text' is a null"),
    ):
        (file := tmp_path / ("d.txt" if "d.txt" in message else "d.jsonl")).write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            run(task, weight, str(file), tmp_path / "r")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("task, flags", [("perplexity", ("--questions", "3")), ("pairs", ("--text_field", "a"))])
def test_a_flag_that_a_task_does_not_read_is_refused(weight, tmp_path, task, flags):
    data = write_records(tmp_path / "data.jsonl", [{"text": "the cat", "sentence_good": "a", "sentence_bad": "b"}])
    with pytest.raises(UserError, match=f"{flags[0]} has no effect on {task}"):
        run(task, weight, data, tmp_path / "r", *flags)
