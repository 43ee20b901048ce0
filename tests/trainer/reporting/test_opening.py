"""The settings that fine-tuning leaves beside its weights; those of pretraining: pretrain/test_public_weights.py, test_mixtures.py."""

import json

import pytest

from tests.trainer.glue.glue_helpers import arguments, fine_tune, make_place
from trainer import train_glue
from trainer.glue.settings import GlueSettings


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
