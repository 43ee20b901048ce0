"""Options of train_electra.py in whole runs. References: formulas, and a run without the option."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import ElectraForPreTraining

from tests.dataset.electra.test_electra_dataset import write_lines, write_vocab
from tests.trainer.test_train_electra import equal, log_lines, train, weights


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("electra")
    return {"data_path": write_lines(folder / "data.jsonl")[0], "vocab_path": write_vocab(folder / "vocab.txt")}


def test_the_weights_of_the_losses(data, tmp_path):
    """Reference: 3 times the generator's loss and 7 times the discriminator's; then a loss that does not count."""
    train(**data, out_dir=tmp_path / "a", max_steps=2, gen_weight=3, disc_weight=7)
    for line in log_lines(tmp_path / "a"):
        assert line["loss"] == pytest.approx(3 * line["mlm_loss"] + 7 * line["disc_loss"])
    still = {"max_steps": 2, "disc_weight": 0, "weight_decay": 0, "warmup_steps": 0}
    run = train(**data, out_dir=tmp_path / "b", **still)
    fresh = train(**data, out_dir=tmp_path / "c", **{**still, "learning_rate": 1e-12})
    # Without the discriminator's loss its layers stay as they were drawn, and the generator's do not.
    for network, is_trained in ((run.job.model.discriminator, False), (run.job.model.generator, True)):
        name = "generator" if is_trained else "discriminator"
        drawn = getattr(fresh.job.model, name).electra.encoder.state_dict()
        for key, value in network.electra.encoder.state_dict().items():
            if key.endswith("dense.weight"):
                assert torch.allclose(value, drawn[key], atol=1e-7) != is_trained, key


def test_both_weights_at_0_are_refused(data, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train(**data, out_dir=tmp_path, gen_weight=0, disc_weight=0)
    assert "leave nothing to learn" in capsys.readouterr().err


def test_networks_are_kept_every_so_many_updates(data, tmp_path):
    """--save_steps counts updates, however many micro-batches one has. Reference: a run that ends there."""
    folder = tmp_path / "a" / "electra_small"
    train(
        **data, out_dir=tmp_path / "a", save_steps=5, save_percents="50", accumulation_steps=2, lr_schedule="one_cycle"
    )
    assert sorted(path.name for path in folder.glob("*_*") if path.is_dir()) == ["electra_small_resume", "percent_50"]
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-5"]
    at_5 = ElectraForPreTraining.from_pretrained(folder / "checkpoint-5" / "discriminator").state_dict()
    at_6 = ElectraForPreTraining.from_pretrained(folder / "percent_50" / "discriminator").state_dict()
    assert not equal(at_5, at_6)
    assert (folder / "checkpoint-10" / "generator" / "vocab.txt").is_file()
    # A fresh run moves them away with the rest.
    train(**data, out_dir=tmp_path / "a", max_steps=1)
    assert not list(folder.glob("checkpoint-*"))


def test_all_intervals_count_updates(data, tmp_path):
    """Reference: the same run with one micro-batch an update."""
    found = []
    for parts in (1, 2):
        out = tmp_path / str(parts)
        options = {"accumulation_steps": parts, "batch_size": 8 // parts, "log_interval": 3, "save_interval": 5}
        train(**data, out_dir=out, **options, keep_checkpoints=9, save_percents="100")
        folder = out / "electra_small"
        updates = [line["update"] for line in log_lines(out)]
        found.append((updates, sorted(path.name for path in (folder / "electra_small_resume").glob("*.pt"))))
    assert found[0] == found[1]
    assert found[0][0] == [1, 4, 7, 10, 12]
    assert found[0][1] == [f"update_{update:08d}.pt" for update in (5, 10, 12)]


def test_an_example_is_shown_every_so_many_updates_and_changes_nothing(data, tmp_path, capsys):
    """Reference for the weights: a run without it."""
    run = train(**data, out_dir=tmp_path / "a", example_interval=5, accumulation_steps=2)
    out = capsys.readouterr().out
    plain = train(**data, out_dir=tmp_path / "b", accumulation_steps=2)
    assert equal(weights(run), weights(plain))
    lines = (tmp_path / "a/electra_small/electra_small.metrics.jsonl").read_text().splitlines()
    shown = [line for line in map(json.loads, lines) if "text" in line]
    assert [line["update"] for line in shown] == [5, 10, 12]
    assert len({line["prompt"] for line in shown}) == 1
    # A signal at a look is heeded with the next update, where all ranks learn of it.
    assert run.job.samples(run.engine, SimpleNamespace(signum=15), is_last=False)[1] == 0
    assert out.count("position  original") == 3 and out.count("--- sample from ") == 3
    assert shown[0]["text"].startswith(shown[0]["prompt"])
