"""Options of train_electra.py in whole runs. References: formulas, and a run without the option."""

import json

import pytest
import torch
from transformers import ElectraForPreTraining

from common.errors import UserError
from tests.trainer.test_train_electra import equal, log_lines, train, weights
from trainer.electra.job import VAL_SEED


def test_all_intervals_count_updates(data, tmp_path):
    """However many micro-batches an update has. Reference: the same run with one micro-batch an update."""
    found = []
    for parts in (1, 2):
        out = tmp_path / str(parts)
        options = {"accumulation_steps": parts, "batch_size": 8 // parts, "log_interval": 3, "save_interval": 5}
        train(**data, out_dir=out, **options, keep_checkpoints=9, save_steps=5, save_percents="50")
        folder = out / "electra_small"
        updates = [line["update"] for line in log_lines(out)]
        places = [*folder.glob("electra_small_resume/*.pt"), *folder.glob("checkpoint-*"), *folder.glob("percent_*")]
        found.append((updates, sorted(path.name for path in places)))
    assert found[0] == found[1]
    assert found[0][0] == [1, 4, 7, 10, 12]
    saved = [f"update_{update:08d}.pt" for update in (5, 6, 10, 12)]
    assert found[0][1] == ["checkpoint-10", "checkpoint-5", "percent_50", *saved]
    at_5, at_6 = (
        ElectraForPreTraining.from_pretrained(folder / name / "discriminator").state_dict()
        for name in ("checkpoint-5", "percent_50")
    )
    assert not equal(at_5, at_6) and (folder / "checkpoint-10" / "generator" / "vocab.txt").is_file()
    # A fresh run moves them away with the rest.
    train(**data, out_dir=out, max_steps=1)
    assert not list(folder.glob("checkpoint-*"))


def test_an_example_is_shown_every_so_many_updates_and_changes_nothing(data, tmp_path, capsys):
    """References: for the weights a run without it, for the last look a forward pass, token by token."""
    run = train(**data, out_dir=tmp_path / "a", example_interval=5, accumulation_steps=2)
    assert capsys.readouterr().out.count("--- sample from ") == 3
    plain = train(**data, out_dir=tmp_path / "b", accumulation_steps=2)
    assert equal(weights(run), weights(plain))
    lines = (tmp_path / "a/electra_small/electra_small.metrics.jsonl").read_text().splitlines()
    shown = [line for line in map(json.loads, lines) if "text" in line]
    assert [line["update"] for line in shown] == [5, 10, 12]
    job = run.job
    batch = job.assembler[job.plan(0).recipe(range(1))]
    torch.manual_seed(VAL_SEED)
    found = job.model.eval()(*batch)
    length = int(batch.lengths[0])
    tokens, written = (
        job.tokenizer.convert_ids_to_tokens(ids[0, :length].tolist()) for ids in (batch.ids, found.corrupted)
    )
    original, corrupted, head, *rows, last = shown[-1]["text"].splitlines()
    assert original == shown[-1]["prompt"] == job.tokenizer.decode(batch.ids[0, :length])
    assert corrupted == job.tokenizer.decode(found.corrupted[0, :length])
    assert head.split() == ["position", "original", "generator", "label", "prediction", "probability"]
    by_place = {int(row.split()[0]): row.split()[1:] for row in rows}
    masked = batch.positions[0, batch.labels[0] >= 0].tolist()
    names, right = ["original", "replaced"], 0
    for place, probability in enumerate(found.disc_logits[0, :length].sigmoid().tolist()):
        is_replaced, is_called = bool(found.replaced[0, place]), probability >= 0.5
        right += is_replaced == is_called
        wanted = [tokens[place], *([written[place]] if place in masked else [])]
        wanted += [names[is_replaced], names[is_called], f"{probability:.2f}"]
        assert by_place.get(place) == (wanted if place in masked or is_called else None)
    n_replaced = int(found.replaced[0, :length].sum())
    assert last == f"{n_replaced} of {length} tokens are replaced; the discriminator is right on {right}"


def test_a_seed_that_is_none_is_random_and_goes_on(data, tmp_path):
    """As published: --seed None. The number stands in the settings of the run, and a resume takes it from there."""
    run = train(**data, out_dir=tmp_path, seed="None", max_steps=2)
    drawn = run.job.settings.seed
    assert f"seed: {drawn}\n" in (tmp_path / "electra_small" / "electra_small.settings.yaml").read_text()
    assert train(**data, out_dir=tmp_path, seed="None", max_steps=4, from_resume=1).job.settings.seed == drawn
    assert train(**data, out_dir=tmp_path / "b", seed="None", max_steps=1).job.settings.seed != drawn
    same = train(**data, out_dir=tmp_path / "c", seed=drawn, max_steps=4)
    resumed = train(**data, out_dir=tmp_path, seed=drawn, max_steps=5, from_resume=1)
    assert same.progress.update == 4 and resumed.progress.update == 5
    with pytest.raises(UserError, match="seed"):
        train(**data, out_dir=tmp_path, seed=(drawn + 1) % 2**32, max_steps=6, from_resume=1)
