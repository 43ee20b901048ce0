"""Tasks of one's own: their description, training, resume and predictions. References: made-up data that a word tells, the
metrics of scikit-learn, and the predictions that were written."""

import csv
import json
import random
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import f1_score, r2_score
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification, AutoTokenizer

from dataset.glue.questions import read_questions
from tests.helpers import trainers_that_fit
from tests.trainer.glue.glue_helpers import arguments, complaint, fine_tune, make_place
from tests.trainer.glue.test_runs import stopped
from trainer.engine import Engine
from trainer.glue.own_task import own_task
from trainer.glue.settings import parse_args
from trainer.glue.squad import answer_scores

FILES = {"train": 24, "dev": 10, "test": 7}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny model, and files of four tasks: what is wanted stands in the text."""
    top = make_place(tmp_path_factory.mktemp("own"))
    write_files(top)
    return top


def write_files(top):
    generator = random.Random(0)
    for part, n in FILES.items():
        reviews, scores, sentences, paragraphs = [], [], [], []
        for i in range(n):
            kind = generator.randrange(3)
            text = " ".join(["hij"[kind], *generator.choices("abcdefg", k=generator.randint(0, 9))])
            reviews.append((text, "g", ("bad", "fair", "good, very")[kind]))
            scores.append({"text": text, "label": 2.5 * kind - 7})
            words = [generator.choice("abh") for _ in range(generator.randint(1, 20))]
            tags = ["B-X" if word == "h" else "O" for word in words]
            sentences.append({"words": words, "tags": tags})
            letters = generator.choices("abcdefg", k=generator.randint(1, 30))
            begin = generator.randrange(len(letters))
            context = " ".join([*letters[:begin], "h", *letters[begin:]])
            answer = {"text": "h", "answer_start": context.index("h")}
            asked = {"id": f"{part}{i}", "question": "i", "answers": [answer]}
            paragraphs.append({"context": context, "qas": [asked]})
        with open(top / f"{part}.csv", "w", newline="") as file:
            csv.writer(file).writerows([("title", "body", "stars"), *reviews])
        for name, records in (("scores", scores), ("ner", sentences)):
            lines = [json.dumps(record) + "\n" for record in records]
            (top / f"{part}.{name}.jsonl").write_text("".join(lines))
        (top / f"{part}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


def of_kind(place, kind, **changes):
    """The settings of one of the four tasks."""
    ending = {"classification": "csv", "regression": "scores.jsonl", "tags": "ner.jsonl", "questions": "json"}[kind]
    files = {f"{part}_file": place / f"{part}.{ending}" for part in FILES}
    columns = {"text": ["title", "body"], "label": "stars"} if kind == "classification" else {}
    return {"task": f"my-{kind}", "kind": kind, "data_dir": None, **files, **columns, **changes}


WANTED = {
    "classification": ["accuracy"],
    "regression": ["pearson", "spearman"],
    "tags": ["entity_f1", "entity_precision", "entity_recall", "accuracy"],
    "questions": ["exact_match", "f1"],
}


@pytest.mark.parametrize("kind", WANTED)
def test_a_task_learns_and_is_evaluated_as_it_was_saved(place, tmp_path, kind):
    """The label stands in the text, so that any such task can be learned; evaluated again it gives the same figures."""
    name = f"my-{kind}"
    options = of_kind(place, kind, epochs=40, learning_rate=1e-2)
    found = fine_tune(place, tmp_path / "a", **options)[name]["metrics"]
    assert list(found) == WANTED[kind]
    assert found[WANTED[kind][0]]["mean"] > 0.85
    model = tmp_path / "a" / name / "seed_42" / "model"
    labels = ["bad", "fair", "good, very"] if kind == "classification" else ["B-X", "O"] if kind == "tags" else None
    options = of_kind(place, kind, train_file=None, epochs=None, learning_rate=None, labels=labels)
    again = fine_tune(place, tmp_path / "b", **options, do_train=0, model_path=model)
    assert again[name]["metrics"] == found


@pytest.mark.parametrize("kind", [*WANTED, "stsb", "mnli"])
def test_features_are_made_once(place, tmp_path, kind):
    """What is found in the cache is checked, and is what was put there."""
    options = of_kind(place, kind, do_predict=1) if kind in WANTED else {"task": kind, "do_predict": 1}
    fine_tune(place, tmp_path / "a", **options, max_steps=1)
    with mock.patch("dataset.glue.feature_cache.make_features", side_effect=AssertionError("it makes them anew")):
        fine_tune(place, tmp_path / "b", **options, max_steps=1)


def test_a_yaml_file_describes_a_task_and_flags_win(place, tmp_path, capsys):
    (tmp_path / "stars.yaml").write_text(
        f"kind: classification\ntrain_file: {place}/train.csv\ndev_file: dev.csv\ntext: [title, body]\nlabel: stars\n"
        "labels: ['good, very', fair, bad]\nmetrics: [macro_f1, accuracy]\n"
    )
    (tmp_path / "dev.csv").write_bytes((place / "dev.csv").read_bytes())
    task = {"task": tmp_path / "stars.yaml", "data_dir": None}
    found = fine_tune(place, tmp_path / "out", **task, max_steps=3)
    assert list(found["stars"]["metrics"]) == ["macro_f1", "accuracy"]
    model = tmp_path / "out" / "stars" / "seed_42" / "model"
    assert json.loads((model / "config.json").read_text())["id2label"] == {"0": "good, very", "1": "fair", "2": "bad"}
    settings = parse_args(["--task", str(tmp_path / "stars.yaml"), "--metrics", "matthews"])
    assert (settings.task, settings.kind, settings.metrics) == ("stars", "classification", ["matthews"])
    assert settings.dev_file == str(tmp_path / "dev.csv")
    # What a run leaves behind is the whole task.
    kept = tmp_path / "out" / "stars" / "seed_42" / "stars_seed_42.settings.yaml"
    again = parse_args(["--config", str(kept)])
    assert (again.task, again.kind, again.text) == ("stars", "classification", ["title", "body"])


def test_macro_f1_is_the_mean_over_classes(place, tmp_path):
    """Reference: scikit-learn on the predictions that were written; the test file is the one that is evaluated on."""
    options = of_kind(
        place, "classification", metrics=["macro_f1"], test_file=place / "dev.csv", do_predict=1, max_steps=4
    )
    found = fine_tune(place, tmp_path, **options)["my-classification"]["metrics"]
    lines = (tmp_path / "my-classification/seed_42/predictions/my-classification.tsv").read_text().splitlines()
    with open(place / "dev.csv", newline="") as file:
        right = [row["stars"] for row in csv.DictReader(file)]
    words = [line.split("\t")[1] for line in lines[1:]]
    assert found["macro_f1"]["mean"] == pytest.approx(f1_score(right, words, average="macro", zero_division=0))


def test_r2_is_that_of_whole_scores_where_they_were_divided_to_train(place, tmp_path):
    """Reference: scikit-learn on the predictions that were written, to three digits; the test file is the one that is
    evaluated on."""
    options = of_kind(
        place,
        "regression",
        metrics=["r2"],
        score_divisor=5,
        test_file=place / "dev.scores.jsonl",
        do_predict=1,
        max_steps=40,
        learning_rate=1e-2,
    )
    found = fine_tune(place, tmp_path, **options)["my-regression"]["metrics"]
    lines = (tmp_path / "my-regression/seed_42/predictions/my-regression.tsv").read_text().splitlines()
    predicted = [float(line.split("\t")[1]) for line in lines[1:]]
    right = [json.loads(line)["label"] for line in (place / "dev.scores.jsonl").read_text().splitlines()]
    assert found["r2"]["mean"] == pytest.approx(r2_score(right, predicted), abs=2e-3)


def test_predictions_of_words_and_answers_are_what_transformers_gives(place, tmp_path):
    """References: the saved models, called by themselves, a sentence or question at a time."""
    with trainers_that_fit() as trainers:
        fine_tune(place, tmp_path, **of_kind(place, "tags", do_predict=1, max_steps=20, learning_rate=1e-2))
        fine_tune(
            place, tmp_path, **of_kind(place, "questions", do_predict=1, max_steps=20, doc_stride=5, max_seq_len=24)
        )
    assert [run.job.data.task.kind for run in trainers] == ["tags", "questions"]
    model = tmp_path / "my-tags" / "seed_42" / "model"
    tagger, tokenizer = AutoModelForTokenClassification.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    lines = (tmp_path / "my-tags/seed_42/predictions/my-tags.jsonl").read_text().splitlines()
    sentences = [json.loads(line)["words"] for line in (place / "test.ner.jsonl").read_text().splitlines()]
    assert len(lines) == len(sentences)
    for line, words in zip(lines, sentences, strict=True):
        found = json.loads(line)["tags"]
        assert len(found) == len(words)
        # 14 words fit into an example.
        wanted = []
        for part in (words[:14], words[14:]):
            if part:
                logits = tagger.eval()(**tokenizer(" ".join(part), return_tensors="pt")).logits[0, 1:-1]
                wanted += [tagger.config.id2label[i] for i in logits.argmax(-1).tolist()]
        assert found == wanted

    answers = json.loads((tmp_path / "my-questions/seed_42/predictions/my-questions.json").read_text())
    reader = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "my-questions/seed_42/model").eval()
    short = [q for q in read_questions(place / "test.json") if len(q.context.split()) <= 20]
    assert short and len(answers) == FILES["test"]
    for question in short:
        words = question.context.split()
        output = reader(**tokenizer("i", question.context, return_tensors="pt"))
        begins, ends = output.start_logits[0, 3:-1], output.end_logits[0, 3:-1]
        sums = torch.triu(begins[:, None] + ends[None, :]).masked_fill(
            torch.ones(len(words), len(words)).tril(-1) > 0, -1e9
        )
        first, last = divmod(int(sums.argmax()), len(words))
        assert answers[question.key] == " ".join(words[first : last + 1])
    # The figure of an evaluation on the same file
    asked = read_questions(place / "test.json")
    options = of_kind(place, "questions", doc_stride=5, max_seq_len=24, dev_file=place / "test.json", train_file=None)
    again = fine_tune(
        place, tmp_path / "b", **options, do_train=0, epochs=None, learning_rate=None, model_path=reader.name_or_path
    )
    scores = {name: values["mean"] for name, values in again["my-questions"]["metrics"].items()}
    assert scores == pytest.approx(answer_scores(asked, answers))


@pytest.mark.parametrize("kind", ["tags", "questions"])
def test_a_stopped_task_goes_on_bitwise(place, tmp_path, kind):
    options = of_kind(place, kind, save_interval=3)
    whole = fine_tune(place, tmp_path / "whole", **options)
    stopped(place, tmp_path / "part", 8, **options)
    assert fine_tune(place, tmp_path / "part", from_resume=1, **options) == whole
    weights = [
        load_file(tmp_path / run / f"my-{kind}" / "seed_42" / "model" / "model.safetensors")
        for run in ("whole", "part")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("kind", ["tags", "questions"])
def test_the_loss_is_that_of_transformers_and_of_the_evaluation(place, tmp_path, kind):
    """References: the loss that transformers computes of each example by itself; its labels are ours."""
    with trainers_that_fit() as trainers:
        fine_tune(place, tmp_path, **of_kind(place, kind, max_steps=2, evaluate_during_training=1, batch_size=5))
    (run,) = trainers
    job = run.job
    dev = job.data.dev[""]
    losses, counts = [], []
    for i in range(len(dev.features.first)):
        batch = dev[torch.tensor([i]).numpy()]
        n = int(batch.mask.sum())
        inputs = {"input_ids": batch.ids[:, :n], "token_type_ids": batch.types[:, :n]}
        if kind == "tags":
            inputs["labels"] = batch.labels[:, :n]
        else:
            inputs |= {"start_positions": batch.labels[:, 0], "end_positions": batch.labels[:, 1]}
        losses.append(job.model.eval()(**inputs).loss.item())
        counts.append(int(dev.features.n_labels[i]))
    wanted = sum(loss * n for loss, n in zip(losses, counts, strict=True)) / sum(counts)
    evaluated = job.evaluation(run.engine, None)(2)[0]
    assert evaluated["val_loss"] == pytest.approx(wanted, rel=1e-5)
    order = torch.arange(len(losses)).numpy()
    loss, sums = job.loss(dev[order], job.plan(0).totals(0, 1)._replace(labels=sum(counts)))
    assert loss.item() == pytest.approx(wanted, rel=1e-5)
    assert sums[1] == sum(counts) and 0 <= sums[2] <= sums[1]


def test_faults_are_told_in_one_line(place, tmp_path, capsys):
    def line(of="classification", **changes):
        return complaint(capsys, place, tmp_path / "out", **{**of_kind(place, of), **changes})

    assert "--task cola is of the benchmark" in line(task="cola")
    assert "--task 'a/b': a name of letters" in line(task="a/b")
    assert "is the name of a file of results" in line(task="eval_results.json")
    assert "a task of your own is a YAML file, or needs --kind" in line(task="colla", kind=None)
    assert "--do_eval 1 needs --dev_file" in line(dev_file=None)
    assert "for tags .jsonl is wanted" in line("tags", train_file=place / "train.csv")
    assert "no column 'label' in the header" in line(label=None)
    assert "--text title body --label body: a column may be named once" in line(label="body")
    assert "classification takes 2 columns at most" in line(text=["a", "b", "c"])
    assert "--text, --label: the format of SQuAD 1.1" in line("questions", text=["a"])
    assert "train.csv:" in line(labels=["bad", "fair"]) and "is not one of bad, fair" in line(labels=["bad", "fair"])
    assert "a class stands there twice" in line(labels=["bad", "bad"])
    assert "1 class (bad); two and more are wanted" in line(labels=["bad"])
    assert "--labels: a class is blank; name it otherwise" in line(labels=["bad", " "])
    assert "--labels: a class 'a\\tb' holds a tab or a line break" in line(labels=["bad", "a\tb"])
    assert "--labels: regression has no classes" in line("regression", labels=["a", "b"])
    assert "--metrics f1: of two classes, and my-classification has 3" in line(metrics=["f1"])
    assert "--metrics f1: tags has entity_f1" in line("tags", metrics=["f1"])
    for part in ("train", "dev", "test"):
        file = tmp_path / f"{part}.json"
        absent = {f"{part}_file": file, "do_predict": 1}
        assert f"--{part}_file {file}: no such file" in line("questions", **absent)
    yaml = tmp_path / "my.yaml"
    assert f"argument --task: {yaml} cannot be read" in line(task=yaml, kind=None)
    yaml.write_text("kind: tags\ntrain: a.jsonl\n")
    assert "my.yaml: train is no setting of this command" in line(task=yaml, kind=None)
    yaml.write_text("train_file: a.jsonl\n")
    assert "my.yaml: no kind in there" in line(task=yaml, kind=None)
    yaml.write_text("kind: colours\n")
    assert "my.yaml: argument --kind: invalid choice: 'colours'" in line(task=yaml, kind=None)
    (tmp_path / "SST-2.yaml").write_text("kind: tags\n")
    assert "--task sst2 is of the benchmark" in line(task=tmp_path / "SST-2.yaml", kind=None)
    assert not (tmp_path / "out").exists()


def test_flags_that_do_nothing_are_named(place, tmp_path, capsys):
    fine_tune(place, tmp_path / "a", max_steps=1, metrics=["accuracy"], epochs=None)
    assert "warning: --metrics ['accuracy'] has no effect: --task cola is of the benchmark" in capsys.readouterr().out
    fine_tune(place, tmp_path / "b", **of_kind(place, "tags", head="plain", doc_stride=9, max_steps=1, epochs=None))
    out = capsys.readouterr().out
    assert "--doc_stride 9 has no effect: it is for questions" in out
    assert "--head plain has no effect: words and answers have a head of one matrix anyway" in out


def test_a_task_with_the_name_of_the_diagnostics_reads_its_own_file(place, tmp_path, monkeypatch):
    """Also in a folder of the benchmark."""
    for name in ("AX", "RTE"):
        (tmp_path / name).mkdir()
    (tmp_path / "AX" / "AX.tsv").write_text("index\tsentence1\tsentence2\n0\th\ti\n")
    monkeypatch.chdir(tmp_path / "RTE")
    options = of_kind(place, "classification", task="AX", test_file=place / "test.csv", do_predict=1, max_steps=1)
    fine_tune(place, tmp_path / "out", **options)
    lines = (tmp_path / "out" / "AX" / "seed_42" / "predictions" / "AX.tsv").read_text().splitlines()
    assert len(lines) == 1 + FILES["test"]


def test_classes_of_a_file_are_sorted_and_parts_of_speech_have_no_entities(place, tmp_path):
    (tmp_path / "pos.jsonl").write_text('{"words": ["a", "b"], "tags": ["NN", "DT"]}\n')
    flags = ["--task", "pos", "--kind", "tags", "--train_file", str(tmp_path / "pos.jsonl"), "--do_eval", "0"]
    said = []
    task = own_task(parse_args(flags), said.append)
    assert task.labels == ("DT", "NN") and task.metrics == ("accuracy",)
    assert said == [f"classes in {tmp_path / 'pos.jsonl'}: DT, NN"]
    flags = arguments(place, tmp_path, **of_kind(place, "tags", metrics=["accuracy"]))
    assert own_task(parse_args(flags), said.append).metrics == ("accuracy",)


def test_other_metrics_and_a_shorter_answer_train_nothing_again(place, tmp_path, capsys):
    options = of_kind(place, "questions", max_steps=2)
    fine_tune(place, tmp_path, **options)
    capsys.readouterr()
    with mock.patch.object(Engine, "update", side_effect=AssertionError("it trains")):
        found = fine_tune(place, tmp_path, **options, metrics=["f1"], max_answer_length=2, from_resume=1)
    out = capsys.readouterr().out
    assert "with another --metrics, --max_answer_length: what is trained is evaluated again" in out
    assert list(found["my-questions"]["metrics"]) == ["f1"]


def test_misplaced_answers_are_not_trained_and_are_evaluated(place, tmp_path, capsys):
    """One in each file is off by two characters. Reference: the same development file with the right place."""
    for name in ("train.json", "dev.json"):
        content = json.loads((place / name).read_text())
        content["data"][0]["paragraphs"][1]["qas"][0]["answers"][0]["answer_start"] += 2
        (tmp_path / name).write_text(json.dumps(content))
    options = of_kind(place, "questions", max_steps=1, train_file=tmp_path / "train.json")
    with trainers_that_fit() as trainers:
        found = fine_tune(place, tmp_path / "a", **{**options, "dev_file": tmp_path / "dev.json"})
    assert capsys.readouterr().out.count("left 1 question out of the training, since their answer does not stand") == 1
    (run,) = trainers
    assert set(range(FILES["train"])) - set(run.job.features.part_of.tolist()) == {1}
    wanted = fine_tune(place, tmp_path / "b", **options)
    assert found["my-questions"]["metrics"] == wanted["my-questions"]["metrics"]


@pytest.mark.parametrize(
    "flags, wanted",
    [([], 384), (["--max_seq_len", "100"], 100), (["--kind", "tags"], 128), (["--kind", "regression"], 128)],
)
def test_examples_of_questions_are_longer(tmp_path, flags, wanted):
    (tmp_path / "mine.yaml").write_text("kind: questions\n")
    assert parse_args(["--task", str(tmp_path / "mine.yaml"), *flags]).max_seq_len == wanted
    assert parse_args(["--task", "cola", "--data_dir", "glue"]).max_seq_len == 128


def test_windows_that_do_not_overlap_are_told_in_one_line(place, tmp_path, capsys):
    """Rows of 16 positions have room for 12 tokens beside a question of one; texts have up to 31. Reference: the windows."""
    options = of_kind(place, "questions", max_steps=1, do_predict=1)
    n_long = sum(len(question.context.split()) > 12 for question in read_questions(place / "train.json"))
    for stride, is_told in ((11, False), (12, True), (128, True)):
        fine_tune(place, tmp_path / str(stride), **options, doc_stride=stride)
        lines = [line for line in capsys.readouterr().out.splitlines() if "windows do not overlap" in line]
        assert len(lines) == is_told
        if is_told:
            assert lines[0].startswith(f"warning: --doc_stride {stride}: beside {n_long} questions ")
