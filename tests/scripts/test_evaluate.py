"""scripts/evaluate.py: every task against brute force (a sequence a time, fp32, all logits), resuming, intervals."""

import importlib.util
import json
import math
import os
import random
import subprocess
import sys

import pytest
import torch
import transformers

from common.errors import UserError
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from model.model_minimind import MiniMindForCausalLM
from scripts import evaluate, export_hf
from scripts.common import load_model
from scripts.scoring import Group, batches, score_groups
from scripts.tasks import ratio, share, windows
from tests.helpers import ROOT, tiny_model
from trainer.machine.command_line import run_cli
from trainer.saving.weights import save_weights

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran", "over", "far", "hills", "and", "rain", "fell"]


@pytest.fixture(scope="module")
def weight(tmp_path_factory):
    """Weights far from their initial values, so that sentences differ in probability."""
    stem = tmp_path_factory.mktemp("out") / "pretrain_32"
    model = tiny_model(vocab_size=6400)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    save_weights(model.state_dict(), model.config.to_dict(), stem)
    return f"{stem}.pth"


@pytest.fixture(scope="module")
def encoder():
    return DocumentEncoder(load_tokenizer(ROOT / "model"))


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def sentence(generator, n=None):
    return " ".join(generator.choices(WORDS, k=n or generator.randint(3, 12)))


def run(task, weight, data, out, *flags):
    arguments = [task, "--weight", str(weight), "--data_path", data, "--out", str(out), "--device", "cpu", *flags]
    assert evaluate.main(arguments if "--dtype" in flags else [*arguments, "--dtype", "float32"]) == 0
    result = json.loads(out.with_name(f"{out.name}.json").read_text())
    return result, {name: metric["value"] for name, metric in result["metrics"].items()}


def journal(out):
    """The lines of {out}.items.jsonl without the first, as dicts."""
    text = out.with_name(f"{out.name}.items.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()][1:]


@torch.no_grad()
def brute_force(model, ids, start=1):
    """(sum of log P of ids[start:] given all before, whether each is the likeliest): one forward, no mask, no batch."""
    logprobs = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)[start - 1 :]
    targets = torch.tensor(ids[start:])
    return float(logprobs.gather(1, targets.unsqueeze(1)).sum()), bool((logprobs.argmax(-1) == targets).all())


def test_pairs_equal_brute_force(weight, encoder, tmp_path):
    generator = random.Random(0)
    pairs = []
    for i in range(40):
        words = sentence(generator).split()
        bad = sorted(words) if i % 2 else words[:-1]  # one sentence may begin with the other
        pairs.append({"sentence_good": " ".join(words), "sentence_bad": " ".join(bad) + "x", "UID": f"kind{i % 3}"})
    data = jsonl(tmp_path / "pairs.jsonl", pairs)
    result, values = run("pairs", weight, data, tmp_path / "r", "--batch_tokens", "64", "--group_by", "UID")
    model, right, margins = load_model(weight), [], []
    for pair in pairs:
        good, bad = (brute_force(model, encoder.encode([pair[f"sentence_{x}"]])[0][:-1])[0] for x in ("good", "bad"))
        right.append(good > bad)
        margins.append(good - bad)
    assert 0 < sum(right) < 40 and values["accuracy"] == sum(right) / 40
    assert values["accuracy/kind1"] == sum(right[1::3]) / len(right[1::3])
    lines = journal(tmp_path / "r")
    ours = {line["item"]: line["logprob"][0] - line["logprob"][1] for line in lines}
    assert [ours[i] for i in range(40)] == pytest.approx(margins, abs=2e-4)
    assert result["counts"] == {"pairs": 40} and result["metrics"]["accuracy"]["interval"] == "Wilson"


def test_a_tie_is_not_right(weight, tmp_path):
    """Of BLiMP's 67,000 pairs seven are two equal sentences."""
    pairs = [{"sentence_good": "the cat sat", "sentence_bad": "the cat sat", "UID": f"kind{i}"} for i in range(2)]
    result, values = run("pairs", weight, jsonl(tmp_path / "p.jsonl", pairs), tmp_path / "p", "--group_by", "UID")
    assert values == {"accuracy": 0, "accuracy/kind0": 0, "accuracy/kind1": 0}
    assert result["counts"] == {"pairs": 2}
    questions = [{"context": "the cat", "choices": ["sat", "sat"], "answer": i} for i in (0, 1)]
    _, values = run("choice", weight, jsonl(tmp_path / "q.jsonl", questions), tmp_path / "q")
    assert values == {"accuracy": 0, "accuracy_per_byte": 0}


def test_progress_is_told(weight, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "LOG_SECONDS", 0)
    texts = [{"text": "the cat sat on the mat"} for _ in range(8)]
    run("perplexity", weight, jsonl(tmp_path / "t.jsonl", texts), tmp_path / "r", "--batch_tokens", "16")
    out, err = capsys.readouterr()
    assert "50% of" in err and " tokens/s" in err and " tokens/s" in out


def test_a_folder_of_a_run_names_its_weight(weight, tmp_path):
    folder = os.path.dirname(weight)
    with pytest.raises(UserError, match="no config.json; .* there is .*pretrain_32.pth"):
        run("pairs", folder, jsonl(tmp_path / "p.jsonl", []), tmp_path / "r")


def test_choices_equal_brute_force(weight, encoder, tmp_path):
    generator = random.Random(1)
    questions = [
        {"context": sentence(generator), "choices": [sentence(generator) for _ in range(3)], "answer": i % 3}
        for i in range(15)
    ]
    _, values = run("choice", weight, jsonl(tmp_path / "q.jsonl", questions), tmp_path / "r", "--batch_tokens", "100")
    model, right, right_per_byte = load_model(weight), 0, 0
    for question in questions:
        start = len(encoder.encode([question["context"]])[0]) - 1
        sums = []
        for choice in question["choices"]:
            ids = encoder.encode([question["context"] + " " + choice])[0][:-1]
            sums.append(brute_force(model, ids, start)[0])
        means = [total / len(choice) for total, choice in zip(sums, question["choices"], strict=True)]
        right += sums.index(max(sums)) == question["answer"]
        right_per_byte += means.index(max(means)) == question["answer"]
    assert (values["accuracy"], values["accuracy_per_byte"]) == (right / 15, right_per_byte / 15)


def test_last_words_equal_brute_force(weight, encoder, tmp_path):
    generator, model = random.Random(2), load_model(weight)
    texts = [sentence(generator) for _ in range(10)]
    ids = encoder.encode(["the cat"])[0][:-1]  # and one that the model gets right
    while " " not in encoder._backend.decode(ids[3:]).strip():
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    sure = encoder._backend.decode(ids)
    texts += [sure] if encoder.encode([sure])[0][:-1] == ids else []
    _, values = run("last_word", weight, jsonl(tmp_path / "t.jsonl", [{"text": t} for t in texts]), tmp_path / "r")
    scores = []
    for text in texts:
        start = len(encoder.encode([text.rstrip().rpartition(" ")[0]])[0]) - 1
        scores.append(brute_force(model, encoder.encode([text.rstrip()])[0][:-1], start))
    assert values["accuracy"] == sum(greedy for _, greedy in scores) / len(texts)
    mean = -sum(logprob for logprob, _ in scores) / len(texts)
    assert math.log(values["word_perplexity"]) == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize(("max_length", "stride"), [(16, 8), (16, 16), (16, 5), (512, 256)])
def test_perplexity_equals_brute_force_windows(weight, encoder, tmp_path, max_length, stride):
    """Every token is predicted once, after the same context as in a plain loop over strided windows."""
    texts = [sentence(random.Random(i), n) for i, n in enumerate((1, 60, 33, 7))] + ["一二三，四五六。"]
    data = jsonl(tmp_path / "t.jsonl", [{"text": t} for t in texts])
    flags = ["--max_length", str(max_length), "--stride", str(stride), "--batch_tokens", "70"]
    result, values = run("perplexity", weight, data, tmp_path / "r", *flags)
    model, total, tokens = load_model(weight), 0.0, 0
    for ids in encoder.encode(texts):
        done = 1
        while done < len(ids):
            end = min(len(ids), max_length + 1 if done == 1 else done + stride)
            begin = max(0, end - 1 - max_length)
            total -= brute_force(model, ids[begin:end], done - begin)[0]
            tokens, done = tokens + end - done, end
    n_bytes = sum(len(text.encode()) for text in texts)
    assert tokens == sum(len(ids) - 1 for ids in encoder.encode(texts)) == result["counts"]["tokens"]
    assert values["loss"] == pytest.approx(total / tokens, abs=1e-5)
    assert values["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert values["bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes, rel=1e-5)
    assert math.log(values["word_perplexity"]) == pytest.approx(total / sum(len(t.split()) for t in texts), rel=1e-5)


def test_a_text_file_is_one_document_as_in_the_wikitext_protocol(weight, encoder, tmp_path):
    """Per-word perplexity: the loss of the whole text over its words by white space."""
    text = "\n".join(sentence(random.Random(i), 9) for i in range(12))
    (tmp_path / "wiki.txt").write_text(text)
    flags = ["--max_length", "32", "--stride", "16"]
    result, values = run("perplexity", weight, str(tmp_path / "wiki.txt"), tmp_path / "r", *flags)
    assert result["counts"]["documents"] == 1 and result["counts"]["words"] == 108
    tokens = result["counts"]["tokens"]
    assert math.log(values["word_perplexity"]) == pytest.approx(values["loss"] * tokens / 108, rel=1e-6)
    low, high = (result["metrics"]["loss"][end] for end in ("low", "high"))
    assert low < values["loss"] < high and "windows" in result["metrics"]["loss"]["interval"]


def test_windows_cover_each_token_once():
    for n, length, stride in ((2, 4, 2), (5, 4, 4), (6, 4, 1), (50, 7, 3)):
        groups = windows(list(range(n)), length, stride)
        assert [t for group in groups for t in group.branches[0]] == list(range(1, n))
        assert all(group.length <= length for group in groups)


def random_tree(generator):
    """([ids of each of three sequences with a common beginning], [the place in each from which it is scored])."""
    prefix = [generator.randrange(97) for _ in range(generator.randint(1, 9))]
    sequences = [[*prefix, *(generator.randrange(97) for _ in range(generator.randint(1, 9)))] for _ in range(3)]
    starts = [generator.randint(len(prefix), len(ids) - 1) for ids in sequences]
    return sequences, starts


@pytest.mark.parametrize("kind", [{}, {"use_moe": True}, {"generation": "minimind3", "head_dim": 16}])
def test_a_tree_of_branches_scores_as_its_sequences_do(kind):
    """Reference: each sequence alone. Padding, sharing and the neighbours in the batch change nothing."""
    model = tiny_model(**kind).eval()
    generator = random.Random(0)
    groups, wanted = [], []
    for _ in range(12):
        sequences, starts = random_tree(generator)
        groups.append(Group.of(sequences, starts, 64))
        wanted.append([brute_force(model, ids, start)[0] for ids, start in zip(sequences, starts, strict=True)])
    scores = [None] * 12
    for batch in batches(groups, 60):
        for i, of_group in zip(batch, score_groups(model, [groups[i] for i in batch]), strict=True):
            scores[i] = [score.logprob for score in of_group]
    assert sum(scores, []) == pytest.approx(sum(wanted, []), abs=1e-4)


# Of each class of models one that does something of its own: to the logits, with a mask, with positions, or without attention.
OTHER_CLASSES = {
    "Gemma2": {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4, "final_logit_softcapping": 0.5},
    "Granite": {"num_key_value_heads": 1, "logits_scaling": 0.1},
    "GPTNeo": {"num_heads": 2, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "Bloom": {"n_head": 2, "n_layer": 2},
    "Mamba": {"state_size": 4},
}


@pytest.mark.parametrize("kind", OTHER_CLASSES)
def test_models_of_other_classes_score_as_their_sequences_do(kind):
    """Reference: the model's own logits of each sequence by itself, as `brute_force` has them."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    if kind not in ("GPTNeo", "Bloom", "Mamba"):
        sizes["num_attention_heads"] = 2
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **OTHER_CLASSES[kind]})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    generator = random.Random(0)
    groups, wanted = [], []
    for _ in range(6):
        sequences, starts = random_tree(generator)
        groups.append(Group.of(sequences, starts, 64))
        wanted.append([brute_force(model, ids, start) for ids, start in zip(sequences, starts, strict=True)])
    found = [(score.logprob, score.greedy) for of_group in score_groups(model, groups) for score in of_group]
    flat = [pair for of_group in wanted for pair in of_group]
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in flat], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in flat]


def test_an_export_gets_the_same_scores(weight, tmp_path):
    """Reference: the .pth. The folder is a LlamaForCausalLM of transformers."""
    generator = random.Random(3)
    pairs = [{"sentence_good": sentence(generator), "sentence_bad": sentence(generator) + "."} for _ in range(12)]
    data = jsonl(tmp_path / "pairs.jsonl", pairs)
    export_hf.export(weight, tmp_path / "hf")
    assert not isinstance(load_model(tmp_path / "hf"), MiniMindForCausalLM)
    logprobs = []
    for i, source in enumerate((weight, tmp_path / "hf")):
        run("pairs", source, data, tmp_path / str(i))
        lines = journal(tmp_path / str(i))
        logprobs.append([value for line in lines for value in line["logprob"]])
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


def test_an_interrupted_evaluation_goes_on(weight, tmp_path, monkeypatch, capsys):
    """Reference: the uninterrupted one. The last line of the journal is cut, as a kill does."""
    pairs = [
        {"sentence_good": sentence(random.Random(i)), "sentence_bad": sentence(random.Random(-i)) + "!"}
        for i in range(20)
    ]
    data = jsonl(tmp_path / "pairs.jsonl", pairs)
    whole, _ = run("pairs", weight, data, tmp_path / "whole", "--batch_tokens", "60")
    calls, score = [], evaluate.score_groups

    def limited(model, groups, stop_after):
        calls.append(len(groups))
        if sum(calls) > stop_after:
            raise KeyboardInterrupt
        return score(model, groups)

    monkeypatch.setattr(evaluate, "score_groups", lambda model, groups: limited(model, groups, 10))
    with pytest.raises(KeyboardInterrupt):
        run("pairs", weight, data, tmp_path / "cut", "--batch_tokens", "60")
    journal = tmp_path / "cut.items.jsonl"
    scored = journal.read_text().count("\n") - 1
    assert 0 < scored <= 10
    journal.write_text(journal.read_text()[:-5])
    calls.clear()
    monkeypatch.setattr(evaluate, "score_groups", lambda model, groups: limited(model, groups, 99))
    resumed, _ = run("pairs", weight, data, tmp_path / "cut", "--batch_tokens", "60")
    assert sum(calls) == 20 - (scored - 1) and resumed["metrics"] == whole["metrics"]
    calls.clear()
    run("pairs", weight, data, tmp_path / "cut")
    assert not calls and "every score was there already" in capsys.readouterr().out
    run("pairs", weight, data, tmp_path / "cut", "--dtype", "bfloat16")  # other settings, other scores
    assert sum(calls) == 20 and "starting anew" in capsys.readouterr().err


def test_intervals():
    """References: scipy's Wilson interval, and a bootstrap over documents for a ratio of sums."""
    from scipy.stats import binomtest

    for right, n in ((0, 7), (3, 10), (700, 1000)):
        metric = share([True] * right + [False] * (n - right))
        theirs = binomtest(right, n).proportion_ci(method="wilson")
        assert (metric.low, metric.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 200, (300,), generator=generator).double()
    losses = tokens * (3 + torch.randn(300, generator=generator).double())
    metric = ratio(losses.tolist(), tokens.tolist(), "")
    draws = torch.randint(0, 300, (4000, 300), generator=generator)
    ratios = losses[draws].sum(1) / tokens[draws].sum(1)
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975]).double()).tolist()
    assert metric.high - metric.low == pytest.approx(high - low, rel=0.08) and metric.low == pytest.approx(
        low, abs=0.02
    )


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("pairs", '{"sentence_good": "a b"}', r"d.jsonl:1: an object with the fields sentence_good, sentence_bad"),
        ("pairs", "{", r"d.jsonl:1: not JSON"),
        ("last_word", '{"text": "word"}', r"d.jsonl:1: no word follows a space"),
        ("choice", '{"context": "a", "choices": ["b"], "answer": 0}', r"d.jsonl:1: choices wants two or more"),
        ("choice", '{"context": "a", "choices": ["b", "c"], "answer": 2}', r"d.jsonl:1: choices wants two or more"),
        ("pairs", "", "nothing to evaluate there"),
        ("perplexity", '{"text": null}', "d.jsonl:1: 'text' is a null"),
    ],
)
def test_one_line_for_a_bad_file(weight, tmp_path, task, content, message):
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        run(task, weight, str(tmp_path / "d.jsonl"), tmp_path / "r")
    assert "\n" not in str(error.value)


def test_a_text_that_cannot_be_encoded_is_named_or_passed_over(weight, tmp_path, capsys):
    """Reference: the figures without it. The tokenizer allows no cut between letters without a gap."""
    texts = ["the cat sat", "a" * 3_000_000, "on a mat"]
    data = jsonl(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    with pytest.raises(ValueError, match=r"d\.jsonl:2: .*allows no cut.*; mend the line, or pass --skip_bad_lines"):
        run("perplexity", weight, data, tmp_path / "r")
    _, values = run("perplexity", weight, data, tmp_path / "r", "--skip_bad_lines", "1")
    assert "too long: 1" in capsys.readouterr().err
    rest = jsonl(tmp_path / "rest.jsonl", [{"text": text} for text in (texts[0], texts[2])])
    assert run("perplexity", weight, rest, tmp_path / "s")[1] == values


def test_a_stride_beyond_the_window_is_refused(weight, tmp_path):
    data = jsonl(tmp_path / "d.jsonl", [{"text": "a cat"}])
    with pytest.raises(UserError, match="--stride 9 exceeds"):
        run("perplexity", weight, data, tmp_path / "r", "--max_length", "8", "--stride", "9")


def test_a_long_context_loses_its_beginning_only():
    group = Group.of([[*range(20), 1, 2], [*range(20), 3, 4]], [20, 20], max_length=8)
    assert group.prefix[-1] == 19 and group.branches == [[1, 2], [3, 4]] and len(group.prefix) + 2 == 9
    with pytest.raises(ValueError, match="exceed 8"):
        Group.of([list(range(20))], [2], max_length=8)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval (pip install lm_eval)")
def test_lm_evaluation_harness_agrees_on_the_export(weight, tmp_path):
    """The harness with a local task file, on the same questions as `choice` here."""
    generator = random.Random(4)
    questions = [
        {"context": sentence(generator), "choices": [sentence(generator) for _ in range(3)], "answer": i % 3}
        for i in range(30)
    ]
    data = jsonl(tmp_path / "questions.jsonl", questions)
    _, values = run("choice", weight, data, tmp_path / "r")
    export_hf.export(weight, tmp_path / "hf")
    (tmp_path / "local_choice.yaml").write_text(
        f"task: local_choice\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "{{context}}"\ndoc_to_choice: choices\ndoc_to_target: answer\n'
        "metric_list:\n  - metric: acc\n"
    )
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "4"),
        *("--model_args", f"pretrained={tmp_path / 'hf'},dtype=float32,add_bos_token=True"),
        *("--include_path", str(tmp_path), "--tasks", "local_choice", "--output_path", str(tmp_path / "theirs.json")),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = tmp_path.glob("theirs*.json")
    theirs = json.loads(file.read_text())["results"]["local_choice"]["acc,none"]
    assert theirs == pytest.approx(values["accuracy"])


@pytest.mark.parametrize(
    "task, flags",
    [
        ("perplexity", ("--group_by", "UID")),
        ("perplexity", ("--delimiter", "")),
        ("pairs", ("--stride", "4")),
        ("last_word", ("--skip_bad_lines",)),
    ],
)
def test_a_flag_that_a_task_does_not_read_is_refused(weight, tmp_path, task, flags):
    data = jsonl(tmp_path / "data.jsonl", [{"text": "the cat", "sentence_good": "a", "sentence_bad": "b"}])
    with pytest.raises(UserError, match=f"{flags[0]} has no effect on {task}"):
        run(task, weight, data, tmp_path / "r", *flags)


def test_a_reader_of_the_table_who_leaves_costs_no_figures(weight, tmp_path, monkeypatch, capfd):
    """A pipe that nobody reads, as the one to `head` once it has ended."""
    data = jsonl(tmp_path / "data.jsonl", [{"text": "the cat sat on a mat"}])
    arguments = ["perplexity", "--weight", weight, "--data_path", data, "--out", str(tmp_path / "r"), "--device", "cpu"]
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "stdout", os.fdopen(writer, "w", encoding="utf-8"))
        run_cli(lambda: evaluate.main([*arguments, "--tokenizer_path", str(ROOT / "model")]))
    assert ended.value.code == 1
    assert capfd.readouterr().err == ""
    assert json.loads((tmp_path / "r.json").read_text())["metrics"]["perplexity"]["value"] > 0


@pytest.mark.slow
def test_a_reader_of_the_table_who_leaves_gets_no_false_line(weight, tmp_path):
    """In a process of its own, which might complain when it ends."""
    data = jsonl(tmp_path / "data.jsonl", [{"text": "the cat sat on a mat"}])
    script = str(ROOT / "scripts" / "evaluate.py")
    arguments = ["perplexity", "--weight", weight, "--data_path", data, "--out", str(tmp_path / "r"), "--device", "cpu"]
    arguments += ["--tokenizer_path", str(ROOT / "model")]
    process = subprocess.Popen(
        [sys.executable, script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait()
    assert json.loads((tmp_path / "r.json").read_text())["metrics"]["perplexity"]["value"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no file names that are not UTF-8")
def test_data_and_weights_may_have_names_that_are_not_utf8(weight, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    data = jsonl(folder / "data.jsonl", [{"text": "the cat sat on a mat"}])
    assert evaluate.main(["perplexity", "--weight", weight, "--data_path", data, "--device", "cpu"]) == 0


def test_a_field_to_group_by_that_is_not_there_is_named_with_its_place(weight, tmp_path):
    data = jsonl(tmp_path / "data.jsonl", [{"sentence_good": "a b", "sentence_bad": "b a", "UID": "x"}])
    with pytest.raises(UserError, match=r"data.jsonl:1: --group_by uid: no such field; there are UID, sentence_bad"):
        run("pairs", weight, data, tmp_path / "r", "--group_by", "uid")
