"""The settings that a run leaves beside its weights. Reference: the run itself, trained again from them bit for bit."""

import json

import pytest
import torch

from tests.helpers import train
from tests.trainer.glue.glue_helpers import arguments, fine_tune, make_place
from trainer import train_glue, train_pretrain
from trainer.glue.settings import GlueSettings
from trainer.pretrain.settings import PretrainSettings


def test_pretraining_starts_again_from_its_settings(data, tmp_path):
    changes = {"out_dir": tmp_path / "first", "epochs": 2, "lr_schedule": "wsd", "seed": 3, "val_fraction": 0.2}
    first = train(data_path=data, sample_prompts="- The cat", **changes)
    kept = tmp_path / "first" / "pretrain_16.settings.yaml"
    assert PretrainSettings.parse(["--config", str(kept)]) == first.settings

    assert train_pretrain.main(["--config", str(kept), "--out_dir", str(tmp_path / "second")]) == 0
    before, after = [torch.load(tmp_path / name / "pretrain_16.pth") for name in ("first", "second")]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_fine_tuning_starts_again_with_one_seed_of_several(tmp_path):
    place = make_place(tmp_path)
    first = fine_tune(place, tmp_path / "first", task="all", num_seeds=2, epochs=1)
    kept = tmp_path / "first" / "cola" / "seed_43" / "cola_seed_43.settings.yaml"
    given = GlueSettings.parse(arguments(place, tmp_path / "first", epochs=1))
    given.seed = 43
    assert GlueSettings.parse(["--config", str(kept)]) == given

    assert train_glue.main(["--config", str(kept), "--out_dir", str(tmp_path / "second")]) == 0
    second = json.loads((tmp_path / "second" / "eval_results.json").read_text())
    assert list(second) == ["cola"]
    assert second["cola"]["seeds"] == {"43": first["cola"]["seeds"]["43"]}
