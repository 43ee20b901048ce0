"""Ensembles of seeds. References: the mean of the models' probabilities, computed by numpy from the saved models."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import matthews_corrcoef
from transformers import AutoModelForSequenceClassification

from dataset.glue.glue_tasks import TASKS
from tests.helpers import trainers_that_fit
from tests.trainer.glue.glue_helpers import fine_tune, make_place
from trainer.glue.ensemble import OUTPUTS, combined, ensemble, read_outputs
from trainer.glue.measures import mean_loss


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("place"))


def test_classes_are_the_mean_of_probabilities_and_scores_the_mean():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(3, 5, 4)).astype(np.float32)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    found = combined(TASKS["mnli"], [torch.from_numpy(of_model) for of_model in logits])
    assert found.softmax(-1).numpy() == pytest.approx(probabilities.mean(0), abs=1e-6)
    # Not those of the mean of the logits, which has other classes here and there.
    assert not np.allclose(np.log(probabilities.mean(0)), logits.mean(0))
    found = combined(TASKS["stsb"], [torch.from_numpy(of_model[:, :1]) for of_model in logits])
    assert found.numpy() == pytest.approx(logits[:, :, :1].mean(0), abs=1e-6)


def test_an_ensemble_is_that_of_the_saved_models(place, tmp_path):
    """Of MNLI's three classes, and of STS-B's scores, which two of the trainings have divided."""
    with trainers_that_fit() as trainers:
        found = fine_tune(place, tmp_path / "a", task="all", num_seeds=3, do_predict=1, epochs=3, learning_rate=1e-2)
    jobs = {(run.job.data.name, run.job.settings.seed): run.job for run in trainers}
    for name, split, target in (("cola", "", "CoLA"), ("mnli", "-mm", "MNLI-mm"), ("stsb", "", "STS-B")):
        data = jobs[name, 42].data
        outputs = {"dev": [], "test": []}
        for seed in (42, 43, 44):
            model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "a" / name / f"seed_{seed}" / "model")
            for kind, assembler in (("dev", data.dev[split]), ("test", data.test[target])):
                batch = assembler[np.arange(len(assembler.features.first))]
                with torch.no_grad():
                    logits = model.eval()(batch.ids, attention_mask=batch.mask, token_type_ids=batch.types).logits
                outputs[kind].append(logits if name == "stsb" else logits.softmax(-1))
        dev, test = (torch.stack(of_seeds).mean(0) for of_seeds in outputs.values())
        labels = data.dev[split].features.labels
        figures = found[name]["ensemble"]
        if name == "stsb":
            assert figures["pearson"] == pytest.approx(np.corrcoef(dev[:, 0], labels)[0, 1], abs=1e-5)
        elif name == "cola":
            assert figures["matthews"] == pytest.approx(matthews_corrcoef(labels, dev.argmax(-1)))
        else:
            assert figures["accuracy-mm"] == pytest.approx((dev.argmax(-1).numpy() == labels).mean())
        lines = (tmp_path / "a" / name / "ensemble" / "predictions" / f"{target}.tsv").read_text().splitlines()[1:]
        words = [line.split("\t")[1] for line in lines]
        if name == "stsb":
            assert [float(word) for word in words] == pytest.approx(test[:, 0].clip(0, 5).tolist(), abs=1e-3)
        else:
            assert words == [TASKS[name].labels[i] for i in test.argmax(-1).tolist()]


def test_divided_scores_are_multiplied_before_the_mean(place, tmp_path):
    """Reference: the mean of the seeds' own predictions, which are on the benchmark's scale."""
    fine_tune(place, tmp_path, task="stsb", num_seeds=2, do_predict=1, score_divisor=5, max_steps=8)

    def predictions(folder):
        lines = (tmp_path / "stsb" / folder / "predictions" / "STS-B.tsv").read_text().splitlines()[1:]
        return np.array([float(line.split("\t")[1]) for line in lines])

    seeds = [predictions("seed_42"), predictions("seed_43")]
    assert all(0 < value < 5 for value in np.concatenate(seeds))
    assert predictions("ensemble") == pytest.approx(np.mean(seeds, axis=0), abs=2e-3)


def test_outputs_that_are_damaged_or_of_other_files_make_no_ensemble(place, tmp_path, capsys):
    with trainers_that_fit() as trainers:
        fine_tune(place, tmp_path, num_seeds=2, max_steps=1)
    data = trainers[0].job.data
    folder = tmp_path / "cola"
    runs = [folder / "seed_42", folder / "seed_43"]
    figures = json.loads((folder / "eval_results.json").read_text())["ensemble"]
    assert ensemble(data, folder, runs) == pytest.approx(figures, nan_ok=True)
    whole = (runs[1] / OUTPUTS).read_bytes()
    assert read_outputs(runs[1] / OUTPUTS, data._replace(dev={"": data.dev[""], "-mm": data.dev[""]})) is None
    assert read_outputs(runs[1] / OUTPUTS, data._replace(dev={"": data.train})) is None
    # Of as many examples, so that only its name tells.
    assert read_outputs(runs[1] / OUTPUTS, data._replace(eval_keys={"dev ": "another"})) is None
    for content in (whole[:100], b"", whole[:-30] + bytes(30)):
        (runs[1] / OUTPUTS).write_bytes(content)
        assert ensemble(data, folder, runs) is None
    capsys.readouterr()
    found = fine_tune(place, tmp_path, num_seeds=2, max_steps=1, from_resume=1)
    assert "no ensemble" in capsys.readouterr().out and "ensemble" not in found["cola"]


@pytest.mark.parametrize("kind", ["tags", "questions"])
def test_words_and_answers_have_ensembles_too(tmp_path, kind):
    """Of three runs of one model, which is that model; and the loss of its outputs is the same."""
    from tests.trainer.glue.test_own_task import of_kind, write_files

    place = make_place(tmp_path / "place")
    write_files(place)
    with trainers_that_fit() as trainers:
        found = fine_tune(place, tmp_path / "a", **of_kind(place, kind, num_seeds=2, max_steps=6, do_predict=1))
    assert found[f"my-{kind}"]["ensemble"].keys() == found[f"my-{kind}"]["metrics"].keys()
    job = trainers[0].job
    folder = tmp_path / "a" / f"my-{kind}"
    first = ensemble(job.data, folder, [folder / "seed_42"] * 3)
    assert first == pytest.approx(found[f"my-{kind}"]["seeds"]["42"]["results"])
    outputs = read_outputs(folder / "seed_42" / OUTPUTS, job.data)
    features = job.data.dev[""].features
    losses = [
        mean_loss(job.data.task, features, logits, 1.0)
        for logits in (outputs.dev[""], combined(job.data.task, [outputs.dev[""]] * 3))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
