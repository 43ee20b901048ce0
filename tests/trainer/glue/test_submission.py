"""The leaderboard's ZIP, and tables over seeds. References: figures by hand, and the predictions of the chosen runs."""

import json
import os
import threading
import zipfile

import pytest

from tests.trainer.glue.glue_helpers import fine_tune, make_place, write_task
from trainer.glue.results import (
    TABLES_LOCK,
    chosen_seed,
    glue_table,
    in_order,
    results_of,
    show_table,
    table,
    written_alone,
)
from trainer.glue.submission import write_submission


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three tasks, and the diagnostic sentences where the benchmark's own script puts them."""
    top = make_place(tmp_path_factory.mktemp("place"))
    (top / "glue" / "diagnostic").mkdir()
    lines = ["index\tsentence1\tsentence2", "0\th a\th b", "1\ti a\tj", "2\tj\tj"]
    (top / "glue" / "diagnostic" / "diagnostic.tsv").write_text("\n".join(lines) + "\n")
    return top


def seeds_with(**values):
    return {name.removeprefix("s"): {"results": result} for name, result in values.items()}


def test_the_best_and_the_median_seed_are_those_of_the_first_metric():
    results = {"1": {"f1": 0.2, "acc": 9}, "2": {"f1": 0.9, "acc": 1}, "3": {"f1": None, "acc": 7}, "4": {"f1": 0.5}}
    assert in_order(results) == ["3", "1", "4", "2"]
    assert chosen_seed(results, "best") == "2" and chosen_seed(results, "median") == "1"
    results["5"] = {"f1": 0.9}
    # Of two alike the first one is better.
    assert in_order(results) == ["3", "1", "4", "5", "2"] and chosen_seed(results, "median") == "4"
    assert chosen_seed({"7": {}}, "median") == "7"


def results_by_hand():
    def of(seeds, ensemble, **metrics):
        shown = {name: {"mean": mean, "median": mean - 0.01, "deviation": None} for name, mean in metrics.items()}
        return {"metrics": shown, "seeds": seeds, "ensemble": ensemble}

    return {
        "cola": of(seeds_with(s1={"matthews": 0.5}, s2={"matthews": 0.6}), {"matthews": 0.65}, matthews=0.55),
        "mrpc": of(
            seeds_with(s1={"accuracy": 0.9, "f1": 0.8}, s2={"accuracy": 0.7, "f1": 0.85}),
            {"accuracy": 0.91, "f1": 0.92},
            accuracy=0.8,
            f1=0.825,
        ),
        "mnli": of(seeds_with(s1={"accuracy": 0.7, "accuracy-mm": 0.72}), {}, **{"accuracy": 0.7, "accuracy-mm": 0.72}),
        "wnli": of(seeds_with(s1={"accuracy": 0.1}), {}, accuracy=0.1),
        "mine": of(seeds_with(s1={"r2": 0.1}), {}, r2=0.1),
    }


def test_the_table_has_the_best_seed_and_the_ensemble():
    lines = table(results_by_hand())
    assert lines[0] == "| task | metric | mean | median | deviation | best | ensemble | runs |"
    assert "| cola | matthews | 55.00 | 54.00 | - | 60.00 | 65.00 | 2 |" in lines
    # The first metric says which seed is the best.
    assert "| mrpc | f1 | 82.50 | 81.50 | - | 80.00 | 92.00 | 2 |" in lines
    assert "| mine | r2 | 10.00 | 9.00 | - | 10.00 | - | 1 |" in lines


def test_glues_table_has_f1_before_accuracy_and_an_average_without_wnli():
    lines = glue_table(results_by_hand())
    assert lines[0] == "| | CoLA | MRPC | MNLI-m/mm | WNLI | average |"
    average = (55 + (80 + 82.5) / 2 + (70 + 72) / 2) / 3
    assert lines[2] == f"| mean | 55.0 | 82.5/80.0 | 70.0/72.0 | 10.0 | {average:.2f} |"
    assert lines[4].startswith("| best | 60.0 | 80.0/90.0 | 70.0/72.0 | 10.0 |")
    # MNLI has no ensemble, so there is no row of them.
    assert [line for line in lines if line.startswith("| ensemble")] == []
    assert lines[-1] == "average: of the tasks that are there, without WNLI"
    assert glue_table({"mine": results_by_hand()["mine"], "cola": results_by_hand()["cola"]}) == []


def names_and_contents(path):
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {info.filename: archive.read(info).decode() for info in archive.infolist()}


@pytest.mark.parametrize("submit", ["best", "median", "ensemble"])
def test_the_zip_holds_the_predictions_that_are_chosen(place, tmp_path, capsys, submit):
    options = {"task": "all", "do_predict": 1, "num_seeds": 3, "epochs": 2, "learning_rate": 1e-2}
    found = fine_tune(place, tmp_path, submit=submit, **options)
    said = capsys.readouterr().out
    files = names_and_contents(tmp_path / "submission.zip")
    # In the leaderboard's layout: no folders, its names.
    assert list(files) == ["CoLA.tsv", "STS-B.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"]
    assert "5 files of " in said and "the leaderboard also wants SST-2, MRPC, QQP, QNLI, RTE, WNLI" in said
    for file, task in (("CoLA", "cola"), ("STS-B", "stsb"), ("MNLI-m", "mnli"), ("AX", "mnli")):
        folder = "ensemble"
        if submit != "ensemble":
            runs = found[task]["seeds"]
            metric = next(iter(found[task]["metrics"]))
            values = sorted(
                (-1.0 if run["results"][metric] is None else run["results"][metric], -int(seed))
                for seed, run in runs.items()
            )
            folder = f"seed_{-values[2 if submit == 'best' else 1][1]}"
        assert files[f"{file}.tsv"] == (tmp_path / task / folder / "predictions" / f"{file}.tsv").read_text()
    lines = files["AX.tsv"].splitlines()
    assert lines[0] == "index\tprediction" and [line.split("\t")[0] for line in lines[1:]] == ["0", "1", "2"]
    assert {line.split("\t")[1] for line in lines[1:]} <= {"contradiction", "entailment", "neutral"}
    tables = (tmp_path / "eval_results.md").read_text()
    assert tables.startswith("| task | metric |") and "| | CoLA | STS-B | MNLI-m/mm | average |" in tables
    assert "| ensemble | " in tables
    assert tables.splitlines()[0] in said
    # Byte for byte the same from the same predictions
    before = (tmp_path / "submission.zip").read_bytes()
    write_submission(tmp_path, results_of(tmp_path), submit, print)
    assert (tmp_path / "submission.zip").read_bytes() == before


@pytest.mark.parametrize("submit", ["best", "median"])
def test_without_evaluations_the_first_seed_is_sent_and_called_so(place, tmp_path, capsys, submit):
    fine_tune(place, tmp_path, do_predict=1, do_eval=0, num_seeds=3, max_steps=1, submit=submit)
    said = capsys.readouterr().out
    no_effect = "has no effect: --do_eval is 0, so no seed is known to be better: the first one is sent"
    assert f"warning: --submit {submit} {no_effect}" in said and "of the first seed of each task" in said
    first = tmp_path / "cola" / "seed_42" / "predictions" / "CoLA.tsv"
    assert names_and_contents(tmp_path / "submission.zip") == {"CoLA.tsv": first.read_text()}


@pytest.mark.parametrize(("submit", "seed"), [("best", 3), ("median", 1)])
def test_each_task_is_sent_by_its_own_figures(tmp_path, submit, seed):
    """Of two commands in one folder: the first one has evaluated CoLA, the second one has not evaluated MRPC."""
    evaluated = seeds_with(s1={"matthews": 0.6}, s2={"matthews": 0.5}, s3={"matthews": 0.7})
    found = {
        "cola": {"metrics": {"matthews": {"mean": 0.6, "median": 0.6, "deviation": 0.1}}, "seeds": evaluated},
        "mrpc": {"metrics": {}, "seeds": seeds_with(s9={}, s10={}, s11={})},
    }
    for task, name in (("cola", "CoLA"), ("mrpc", "MRPC")):
        for number in found[task]["seeds"]:
            file = tmp_path / task / f"seed_{number}" / "predictions" / f"{name}.tsv"
            file.parent.mkdir(parents=True)
            file.write_text(number)
    said = []
    write_submission(tmp_path, found, submit, said.append)
    assert names_and_contents(tmp_path / "submission.zip") == {"CoLA.tsv": str(seed), "MRPC.tsv": "9"}
    assert f"2 files of the {submit} seed of cola and the first seed of mrpc; the leaderboard also wants" in said[0]


def test_an_ensemble_of_an_earlier_command_is_not_sent(place, tmp_path, capsys):
    options = {"do_predict": 1, "max_steps": 1, "submit": "ensemble", "num_seeds": 3}
    fine_tune(place, tmp_path, **options)
    assert "CoLA.tsv" in names_and_contents(tmp_path / "submission.zip")
    # A seed's outputs are lost: there is no ensemble of all, and that of before is none.
    (tmp_path / "cola" / "seed_43" / "outputs.npz").unlink()
    found = fine_tune(place, tmp_path, **options, from_resume=1)
    assert "no ensemble" in capsys.readouterr().out and "ensemble" not in found["cola"]
    assert not (tmp_path / "cola" / "ensemble").exists() and not (tmp_path / "submission.zip").exists()
    # Nor where it lies there all the same.
    (tmp_path / "cola" / "ensemble" / "predictions").mkdir(parents=True)
    (tmp_path / "cola" / "ensemble" / "predictions" / "CoLA.tsv").write_text("index\tprediction\n")
    write_submission(tmp_path, found, "ensemble", print)
    assert not (tmp_path / "submission.zip").exists()
    # Without a development file an ensemble has no figures, and is sent.
    capsys.readouterr()
    fine_tune(place, tmp_path / "b", **options, do_eval=0)
    assert "--submit" not in capsys.readouterr().out
    files = names_and_contents(tmp_path / "b" / "submission.zip")
    assert files == {"CoLA.tsv": (tmp_path / "b/cola/ensemble/predictions/CoLA.tsv").read_text()}


def test_one_seed_is_its_own_ensemble_and_own_tasks_are_not_sent(place, tmp_path, capsys):
    options = {"do_predict": 1, "max_steps": 1, "submit": "ensemble"}
    fine_tune(place, tmp_path / "a", **options)
    files = names_and_contents(tmp_path / "a" / "submission.zip")
    assert files == {"CoLA.tsv": (tmp_path / "a/cola/seed_42/predictions/CoLA.tsv").read_text()}
    write_task(tmp_path / "own", "CoLA", {"train.tsv": 8, "dev.tsv": 4})
    (tmp_path / "own" / "a.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    files = {f"{part}_file": tmp_path / "own" / "a.jsonl" for part in ("train", "dev", "test")}
    fine_tune(place, tmp_path / "b", task="mine", kind="classification", data_dir=None, **files, **options)
    assert not (tmp_path / "b" / "submission.zip").exists()
    # What somebody else has put there stays.
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "submission.zip").write_text("mine")
    fine_tune(place, tmp_path / "d", task="mine", kind="classification", data_dir=None, **files, **options)
    assert (tmp_path / "d" / "submission.zip").read_text() == "mine"
    capsys.readouterr()
    fine_tune(place, tmp_path / "c", max_steps=1, submit="median")
    assert "warning: --submit median has no effect: --do_predict is 0" in capsys.readouterr().out


def test_results_that_others_have_put_there_are_left_out(tmp_path):
    for i, content in enumerate(
        (
            {"seeds": {"1": 3}},
            {"seeds": {"a": {"results": {}}}},
            {"seeds": {}},
            {"seeds": {"1": {"results": {}}}, "ensemble": 3},
            {"seeds": {"1": {"results": {"f1": "0.5"}}}},
            {"seeds": {"1": {"results": {"f1": True}}}},
            {"seeds": {"1" * 5000: {"results": {}}}},
            {"seeds": {"1": {"results": {"f1": 0.5}}}, "ensemble": {"f1": [0.5]}},
            {"seeds": {"1": {"results": {"f1": 0.5}}}, "metrics": {"f1": 0.5}},
            {"seeds": {"1": {"results": {"f1": 0.5}}}, "metrics": {"f1": {"mean": 0.5}}},
            {
                "seeds": {"1": {"results": {"f1": 0.5}}},
                "metrics": {"f1": {"mean": 0.5, "median": {}, "deviation": None}},
            },
            {
                "seeds": {"1": {"results": {}}},
                "metrics": {"f1": {"mean": 10**400, "median": 0, "deviation": None}},
            },
        )
    ):
        (tmp_path / f"task{i}").mkdir()
        (tmp_path / f"task{i}" / "eval_results.json").write_text(json.dumps({"metrics": {}, **content}))
    # Brackets without end, and a pipe, which would be waited for.
    for name in ("deep", "pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "deep" / "eval_results.json").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe" / "eval_results.json")
    assert results_of(tmp_path) == {}
    # What is left of them is what a command writes.
    (tmp_path / "mine").mkdir()
    whole = {
        "metrics": {"f1": {"mean": 0.5, "median": 0.5, "deviation": None}},
        "seeds": {"1": {"results": {"f1": 0.5}}},
    }
    (tmp_path / "mine" / "eval_results.json").write_text(json.dumps(whole))
    assert results_of(tmp_path) == {"mine": whole}


def test_the_tables_of_one_folder_are_written_by_one_command_at_a_time(tmp_path):
    """The second one waits, and its table has what the first one's has."""
    shown = []

    def second():
        with written_alone(tmp_path):
            shown.append(show_table(tmp_path, lambda line: None))

    with written_alone(tmp_path):
        other = threading.Thread(target=second)
        other.start()
        other.join(timeout=1)
        assert other.is_alive() and not shown
        (tmp_path / "mine").mkdir()
        whole = {"metrics": {}, "seeds": {"1": {"results": {}}}}
        (tmp_path / "mine" / "eval_results.json").write_text(json.dumps(whole))
    other.join()
    assert shown == [{"mine": whole}]
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"mine": whole}
    assert (tmp_path / TABLES_LOCK).exists()
