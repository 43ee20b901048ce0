"""Options of train_electra.py in whole runs. References: formulas, and a run without the option."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import ElectraForPreTraining

from common.errors import UserError
from model.electra.masking import IGNORE
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


def test_flags_of_the_generator_reach_it(data, tmp_path):
    changes = {"temperature": 1.5, "disallow_correct": 1, "generator_layers": 2, "untied_embeddings": 1}
    run = train(**data, out_dir=tmp_path, max_steps=2, num_hidden_layers=3, **changes)
    model = run.job.model
    assert (model.temperature, model.disallow_correct) == (1.5, True)
    assert (model.generator.config.num_hidden_layers, model.discriminator.config.num_hidden_layers) == (2, 3)
    config = json.loads((tmp_path / "electra_small" / "generator" / "config.json").read_text())
    assert config["untied_embeddings"] is True and config["embedding_size"] == 8
    # A resume cannot turn one kind of networks into the other.
    with pytest.raises(Exception, match="another architecture"):
        train(**data, out_dir=tmp_path, max_steps=3, num_hidden_layers=3, generator_layers=2, from_resume=1)


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


def published_count(length, share, T):
    """`mask` of google-research/electra: the share rounded in float32, at most `max_predictions_per_seq`."""
    cap = int((share + 0.005) * T)
    return max(1, min(cap, int(np.rint(np.float32(length) * np.float32(share)))))


def test_masks_are_chosen_as_the_flag_says(data, tmp_path):
    """References: the published formula, whose draws may repeat; and the rounded share of different positions."""
    found = {}
    for choice in ("original", "exact"):
        run = train(**data, out_dir=tmp_path / choice, max_steps=1, mask_share=0.3, mask_choice=choice)
        plan = run.job.plan(0)
        batch = run.job.assembler[plan.recipe(range(plan.n_rows))]
        n_repeated = 0
        for length, positions, labels in zip(batch.lengths.tolist(), batch.positions, batch.labels, strict=True):
            drawn = positions[labels != IGNORE].tolist()
            wanted = published_count(length, 0.3, 24) if choice == "original" else max(1, round(0.3 * length))
            assert len(drawn) == wanted
            n_repeated += len(drawn) - len(set(drawn))
        found[choice] = n_repeated
        # What the loss is divided by counts them as they are.
        assert plan.totals(0, plan.n_rows).masked == int((batch.labels != IGNORE).sum())
    assert found["original"] > 0 and found["exact"] == 0
    # A run cannot go over to other masks.
    with pytest.raises(UserError, match="mask_choice"):
        train(**data, out_dir=tmp_path / "original", max_steps=2, mask_share=0.3, mask_choice="exact", from_resume=1)


def test_random_weights_are_drawn_as_the_flag_says(data, tmp_path):
    """The rate of the first update is 0, so that the weights are those that were drawn. References: a normal distribution
    cut off at two of its deviations, which leaves 0.88 of the deviation, and Glorot's uniform one."""
    options = {"max_steps": 1, "warmup_steps": 2, "init_std": 0.1}
    drawn = weights(train(**data, out_dir=tmp_path / "a", weight_init="original", **options))
    usual = weights(train(**data, out_dir=tmp_path / "b", **options))
    glorot = {"embeddings_project.weight": (6 / (16 + 32)) ** 0.5, "dense_prediction.weight": (6 / (32 + 1)) ** 0.5}
    n_matrices = 0
    for name, weight in drawn.items():
        if weight.dim() < 2 or not name.startswith("discriminator"):
            continue
        n_matrices += 1
        (bound,) = [bound for ending, bound in glorot.items() if name.endswith(ending)] or [0.2]
        assert 0.9 * bound < weight.abs().max() <= bound, name
        if weight.numel() > 500:
            deviation = bound / 3**0.5 if bound != 0.2 else 0.088
            assert weight.std() == pytest.approx(deviation, rel=0.08), name
            assert usual[name].abs().max() > 0.2 and usual[name].std() == pytest.approx(0.1, rel=0.08), name
    assert n_matrices == 12
