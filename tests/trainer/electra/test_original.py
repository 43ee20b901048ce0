"""--recipe original: whole runs against the published code's formulas, written out here from the files that
trainer/electra/original.py names. Each reference is a plain loop."""

import argparse
import json
import re

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from dataset.glue.glue_tasks import TASKS
from tests.dataset.electra.test_electra_dataset import write_lines, write_vocab
from tests.helpers import ROOT, trainers_that_fit
from tests.trainer.glue.glue_helpers import arguments, complaint, make_place
from tests.trainer.glue.test_runs import same, stopped, weights_of
from tests.trainer.test_train_electra import flags as electra_flags
from tests.trainer.test_train_electra import log_lines
from trainer import train_electra, train_glue
from trainer.electra import settings as electra
from trainer.electra.job import notices
from trainer.electra.original import (
    FINE_TUNING,
    PRETRAINING,
    RECIPES,
    fine_tuning,
    is_as_published,
    original_lines,
    take_rates,
)
from trainer.engine import Engine
from trainer.glue import settings as glue
from trainer.glue.notices import notices as glue_notices
from trainer.machine.ranks import Ranks

GLUE = ["--task", "stsb", "--data_dir", "glue"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("electra")
    return {"data_path": write_lines(folder / "data.jsonl")[0], "vocab_path": write_vocab(folder / "vocab.txt")}


# ------------------------------------------------------------------------------- the published code's formulas


def published_rate(step, rate, n_steps, warmup_steps):
    """create_optimizer: a polynomial decay of power 1 over the whole run, times the warm-up."""
    decayed = rate * (1 - min(step, n_steps) / n_steps)
    return decayed * min(1.0, step / warmup_steps)


def published_layer_rates(rate, decay, n_layers):
    """_get_layer_lrs: {part of a name: rate}."""
    depths = {"embeddings": 0, "embeddings_project": 0, "classifier": n_layers + 2}
    for layer in range(n_layers):
        depths[f"encoder.layer.{layer}."] = layer + 1
    return {key: rate * decay ** (n_layers + 2 - depth) for key, depth in depths.items()}


class PublishedAdam:
    """AdamWeightDecayOptimizer behind clip_by_global_norm, in float64."""

    def __init__(self, model, weight_decay=0.01):
        self.model = model
        self.weight_decay = weight_decay
        self.m = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
        self.v = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}

    def step(self, gradients, weights, rate_of):
        """The weights after an update: {name: float64}."""
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        after = {}
        for name, weight in weights.items():
            gradient = gradients[name] / max(1.0, norm)
            self.m[name] = 0.9 * self.m[name] + 0.1 * gradient
            self.v[name] = 0.999 * self.v[name] + 0.001 * gradient * gradient
            update = self.m[name] / (self.v[name].sqrt() + 1e-6)
            if not re.search("LayerNorm|layer_norm|bias", name):
                update = update + self.weight_decay * weight
            after[name] = weight - rate_of(name) * update
        return after


def double(tensors):
    return {name: tensor.detach().double().clone() for name, tensor in tensors}


def checked_updates(monkeypatch, rate_of):
    """Compare each update of an Engine with the published one; the list of updates that were compared.

    rate_of(update, name): the published rate of a parameter.
    """
    compared = []
    update = Engine.update

    def checked(engine, *options):
        if not compared:
            compared.append(PublishedAdam(engine.model))
        number = len(compared) - 1
        gradients = {}
        for name, p in engine.model.named_parameters():
            gradients[name] = torch.zeros_like(p).double() if p.grad is None else p.grad.double().clone()
        before = double(engine.model.named_parameters())
        wanted = compared[0].step(gradients, before, lambda name: rate_of(number, name))
        found = update(engine, *options)
        for name, p in engine.model.named_parameters():
            step = (wanted[name] - before[name]).abs().max()
            # Of the largest step; the weights are in float32, which has 7 digits.
            tolerance = 2e-4 * step + 3e-7 * before[name].abs().max()
            assert (p.detach().double() - wanted[name]).abs().max() <= tolerance, (number, name)
        compared.append(number)
        return found

    monkeypatch.setattr(Engine, "update", checked)
    return compared


# ------------------------------------------------------------------------------------------------ whole runs


def test_pretraining_updates_are_the_published_ones(data, tmp_path, monkeypatch, capsys):
    """Adam, clipping, weight decay, and the rate whose warm-up goes on while it decays. Reference: float64 loops."""
    compared = checked_updates(monkeypatch, lambda update, _: published_rate(update, 1e-3, 12, 2))
    assert train_electra.main(electra_flags(**data, out_dir=tmp_path, recipe="original")) == 0
    assert len(compared) == 1 + 12
    rates = [line["lr"] for line in log_lines(tmp_path)]
    assert rates == pytest.approx([published_rate(step, 1e-3, 12, 2) for step in range(12)], rel=1e-12)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("recipe original: "))
    # The tiny networks, and all else that the flags of this run change.
    assert line == (
        "recipe original: all settings as in the published code, but --warmup_steps 2 (published: 10000), "
        "--learning_rate 0.001 (published: 0.0005), --max_steps 12 (published: 1000000), "
        "--max_seq_len 24 (published: 128), --hidden_size 32 (published: 256), --num_hidden_layers 1 (published: 12), "
        "--intermediate_size 64 (published: 1024), --embedding_size 16 (published: 128), 4 examples an update (published: 128)"
    )


def test_without_the_recipe_the_updates_are_others(data, tmp_path, monkeypatch):
    """The check above fails for the default, so it can fail."""
    checked_updates(monkeypatch, lambda update, _: published_rate(update, 1e-3, 12, 2))
    with pytest.raises(AssertionError):
        train_electra.main(electra_flags(**data, out_dir=tmp_path))


@pytest.mark.parametrize("task", ["stsb", "cola"])
def test_fine_tuning_updates_are_the_published_ones(place, tmp_path, monkeypatch, task):
    """The same with the rates of the layers, from the head down 0, 2, 3 ...; both orders of STS-B's pairs double its
    updates. Reference: float64 loops."""
    # Of batches of 4, in two epochs; the files have 20 examples.
    n_updates = {"stsb": 2 * 10, "cola": 2 * 5}[task]

    def rate_of(update, name):
        rate = published_rate(update, 3e-3, n_updates, 0.1 * n_updates)
        rates = published_layer_rates(rate, 0.8, n_layers=2)
        (found,) = {value for key, value in rates.items() if key in name}
        return found

    compared = checked_updates(monkeypatch, rate_of)
    command = arguments(place, tmp_path, task=task, recipe="original", max_seq_len=16, dtype="float32")
    assert train_glue.main(command) == 0
    assert len(compared) == 1 + n_updates


def test_the_fine_tuning_loss_is_the_published_one(place, tmp_path, monkeypatch):
    """The sum over a batch of (w · h + b - score / 5)², h the first position. Reference: that, with Hugging Face's
    encoder."""
    with trainers_that_fit() as trainers:
        command = arguments(place, tmp_path, task="stsb", recipe="original", dropout=0.0, max_steps=1)
        assert train_glue.main(command) == 0
    (run,) = trainers
    model = run.job.model.eval()
    plan = run.job.plan(0)
    batch = run.job.assembler[plan.recipe(range(4))]
    hidden = model.electra(batch.ids, attention_mask=batch.mask, token_type_ids=batch.types).last_hidden_state
    head = model.classifier.out_proj
    predicted = (hidden[:, 0] @ head.weight[0] + head.bias[0]).double()
    wanted = (predicted - batch.labels.double() / 5).square().sum()
    loss, _ = run.job.loss(batch, plan.totals(0, 4))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert set(batch.labels.tolist()) <= {0.0, 2.5, 5.0}


def test_without_the_recipe_the_loss_is_the_mean_over_scores_from_0_to_5(place, tmp_path):
    """Reference: torch's mse_loss."""
    with trainers_that_fit() as trainers:
        assert train_glue.main(arguments(place, tmp_path, task="stsb", dropout=0.0, max_steps=1)) == 0
    (run,) = trainers
    run.job.model.eval()
    plan = run.job.plan(0)
    batch = run.job.assembler[plan.recipe(range(4))]
    logits = run.job.model(batch.ids, attention_mask=batch.mask, token_type_ids=batch.types).logits[:, 0]
    loss, _ = run.job.loss(batch, plan.totals(0, 4))
    assert loss.item() == pytest.approx(torch.nn.functional.mse_loss(logits, batch.labels).item(), rel=1e-5)


def test_a_recipes_run_goes_on_bitwise(place, tmp_path):
    """Reference: the run that nobody stopped."""
    options = {"recipe": "original"}
    assert train_glue.main(arguments(place, tmp_path / "whole", **options)) == 0
    stopped(place, tmp_path / "cut", 7, **options)
    assert train_glue.main(arguments(place, tmp_path / "cut", **options, from_resume=1)) == 0
    assert same(weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut"))


# --------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("module, given, published", [(electra, [], PRETRAINING), (glue, GLUE, FINE_TUNING)])
def test_a_recipe_sets_all_that_it_lists_and_nothing_else(module, given, published):
    plain = vars(module.parse_args(given))
    with_recipe = vars(module.parse_args([*given, "--recipe", "original"]))
    for name, value in with_recipe.items():
        if name in published:
            assert value == published[name].value, name
        elif name != "recipe":
            assert value == plain[name], name
    assert plain["recipe"] == "default"


@pytest.mark.parametrize("module, given, published", [(electra, [], PRETRAINING), (glue, GLUE, FINE_TUNING)])
def test_flags_and_files_win_over_the_recipe(module, given, published, tmp_path):
    command = [*given, "--recipe", "original", "--weight_decay", "0.05", "--adam_bias_correction", "1"]
    settings = module.parse_args(command)
    assert (settings.weight_decay, settings.adam_bias_correction) == (0.05, True)
    assert settings.lr_schedule == "original_linear"
    path = tmp_path / "run.yaml"
    path.write_text("recipe: original\nweight_decay: 0.05\n")
    settings = module.parse_args([*given, "--config", str(path)])
    assert (settings.weight_decay, settings.adam_bias_correction) == (0.05, False)
    (line,) = original_lines(settings, published)
    assert line.endswith("but --weight_decay 0.05 (published: 0.01)")
    assert is_as_published(settings, "lr_schedule", published) and not is_as_published(
        settings, "weight_decay", published
    )


def said_of_pretraining(*flags):
    settings = electra.parse_args(["--recipe", "original", *flags])
    settings.batch_size = settings.batch_size or 128
    (line,) = [line for line in notices(settings, Ranks()) if line.startswith("recipe original")]
    return line


ALL = "recipe original: all settings as in the published code"


@pytest.mark.parametrize(
    "flags, difference",
    [
        ([], ""),
        (["--batch_size", "32", "--accumulation_steps", "4"], ""),
        (["--learning_rate", "5e-4", "--num_hidden_layers", "12"], ""),
        (["--size", "base", "--batch_size", "256"], ""),
        (["--size", "base"], ", but 128 examples an update (published: 256)"),
        (
            ["--size", "large", "--batch_size", "2048", "--mask_share", "0.15"],
            ", but --mask_share 0.15 (published: 0.25)",
        ),
        (["--gen_weight", "2"], ", but --gen_weight 2.0 (published: 1.0)"),
        (["--disc_weight", "0"], ", but --disc_weight 0.0 (published: 50.0)"),
        (["--temperature", "2"], ", but --temperature 2.0 (published: 1.0)"),
        (["--disallow_correct", "1"], ", but --disallow_correct True (published: False)"),
        (["--untied_embeddings", "1"], ", but --untied_embeddings True (published: False)"),
        (["--generator_divisor", "2"], ", but --generator_divisor 2 (published: 4)"),
        (["--generator_layers", "6"], ", but --generator_layers 6 (published: 12)"),
        (["--model_path", "out/a"], ", but --model_path out/a (published: random weights)"),
        (["--max_steps", "10000000"], ", but --max_steps 10000000 (published: 1000000)"),
    ],
)
def test_the_line_of_a_pretraining_names_what_differs_from_the_published_run(flags, difference):
    """By hand, from the paper's table of sizes and configure_pretraining.py."""
    assert said_of_pretraining(*flags) == ALL + difference


def test_the_line_of_a_budget_and_of_networks_from_files():
    settings = electra.parse_args(["--recipe", "original", "--budget", "30m"])
    settings.batch_size, settings.max_steps = 128, 5000
    assert ALL + ", but --budget 30m (published: 1000000 updates)" in notices(settings, Ranks())
    line = said_of_pretraining("--generator_config", "g.json", "--discriminator_config", "d.json")
    assert "--generator_config g.json (published: the network of --size small)" in line
    assert "--discriminator_config d.json (published: the network of --size small)" in line


def test_the_recipe_is_refused_for_masked_language_modelling(capsys):
    with pytest.raises(SystemExit) as end:
        electra.parse_args(["--recipe", "original", "--objective", "mlm"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and "--recipe original and --objective mlm exclude each other" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "flags, width, difference",
    [
        ([], 256, ""),
        (["--epochs", "10"], 256, ""),
        (["--epochs", "2.5"], 256, ", but --epochs 2.5 (published: 10)"),
        (["--epochs", "10", "--max_steps", "50"], 256, ", but --max_steps 50 (published: --epochs 10)"),
        (["--warmup_steps", "9"], 256, ", but --warmup_steps 9 (published: --warmup_share 0.1)"),
        (["--learning_rate", "1e-4"], 1024, ", but --learning_rate 0.0001 (published: 5e-05)"),
        (["--layer_decay", "0.8"], 768, ""),
        (["--batch_size", "16", "--accumulation_steps", "2"], 256, ""),
        (["--batch_size", "16"], 256, ", but 16 examples an update (published: 32)"),
    ],
)
def test_the_line_of_a_fine_tuning_names_what_differs(flags, width, difference):
    """By hand, from configure_finetuning.py; STS-B has 10 epochs there."""
    settings = glue.parse_args([*GLUE, "--recipe", "original", *flags])
    rates = take_rates(settings, width)
    assert glue_notices(settings, Ranks(), [TASKS["stsb"]], rates)[0] == ALL + difference


def test_the_epochs_of_several_tasks_are_named_together():
    settings = glue.parse_args([*GLUE, "--recipe", "original", "--epochs", "10"])
    rates = take_rates(settings, 256)
    line = glue_notices(settings, Ranks(), [TASKS["stsb"], TASKS["cola"]], rates)[0]
    assert line == f"{ALL}, but --epochs 10 (published: 3 or 10)"


@pytest.mark.parametrize(
    "width, rate, decay", [(128, 1e-4, 0.8), (256, 1e-4, 0.8), (768, 1e-4, 0.8), (1024, 5e-5, 0.9)]
)
def test_rates_by_size(width, rate, decay):
    """Reference: configure_finetuning.py, where large has 5e-5 and 0.9."""
    settings = argparse.Namespace(learning_rate=None, layer_decay=None)
    take_rates(settings, width)
    assert (settings.learning_rate, settings.layer_decay) == (rate, decay)
    given = argparse.Namespace(learning_rate=1.0, layer_decay=None)
    take_rates(given, width)
    assert (given.learning_rate, given.layer_decay) == (1.0, decay)


@pytest.mark.parametrize("width", [None, [1024, 2048], "wide"])
def test_an_encoder_without_one_width_has_the_rates_of_the_small_size(width):
    settings = argparse.Namespace(learning_rate=None, layer_decay=None)
    take_rates(settings, width)
    assert (settings.learning_rate, settings.layer_decay) == (1e-4, 0.8)


OWN = ["--task", "mine", "--train_file", "a.csv", "--dev_file", "a.csv", "--recipe", "original"]


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_recipe_of_ones_own_task_divides_no_scores_and_turns_no_pairs(kind):
    """Both belong to tasks of the benchmark: STS-B's scores go up to 5, others do not. All else is as for these."""
    settings = glue.parse_args([*OWN, "--kind", kind])
    assert (settings.score_divisor, settings.double_unordered) == (1.0, False)
    assert original_lines(settings, fine_tuning(kind)) == ["recipe original: all settings as in the published code"]
    of_benchmark = glue.parse_args([*GLUE, "--recipe", "original"])
    for name in FINE_TUNING.keys() - {"score_divisor", "double_unordered"}:
        assert getattr(settings, name) == getattr(of_benchmark, name), name
    assert glue.parse_args([*OWN, "--kind", kind, "--score_divisor", "7"]).score_divisor == 7


@pytest.mark.parametrize("kind", ["tags", "questions"])
def test_the_recipe_is_refused_where_it_would_not_be_the_published_code(kind, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(f"kind: {kind}\n")
    for command in ([*OWN, "--kind", kind], ["--task", str(tmp_path / "mine.yaml"), "--recipe", "original"]):
        with pytest.raises(SystemExit) as end:
            glue.parse_args(command)
        error = capsys.readouterr().err
        assert end.value.code == 2 and f"{kind} are trained in another way here" in error and error.count("\n") == 1


def test_the_rates_of_the_size_are_kept_with_the_results(place, tmp_path):
    command = arguments(place, tmp_path, recipe="original", learning_rate=None, epochs=None, max_steps=2)
    assert train_glue.main(command) == 0
    result = json.loads((tmp_path / "cola" / "seed_42" / "eval_results.json").read_text())
    kept = result["settings"]
    assert (kept["learning_rate"], kept["layer_decay"], kept["head"]) == (1e-4, 0.8, "plain")


def test_a_wrong_recipe_is_one_line(capsys):
    for module, given in ((electra, []), (glue, GLUE)):
        with pytest.raises(SystemExit) as stop:
            module.parse_args([*given, "--recipe", "published"])
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2
        assert "--recipe" in line and all(name in line for name in RECIPES)


def test_a_switch_of_the_recipe_that_does_nothing_for_a_task_is_said_where_the_user_gave_it(place, tmp_path, capsys):
    assert train_glue.main(arguments(place, tmp_path / "a", double_unordered=1, score_divisor=5, max_steps=1)) == 0
    out = capsys.readouterr().out
    assert "--double_unordered True has no effect: it is for mrpc, stsb" in out
    assert "--score_divisor 5.0 has no effect: it is for stsb" in out
    assert train_glue.main(arguments(place, tmp_path / "b", recipe="original", epochs=1)) == 0
    assert "no effect" not in capsys.readouterr().out


def test_a_foreign_encoder_keeps_its_own_head(place, tmp_path, capsys):
    """The recipe's head is ELECTRA's."""
    config = json.loads((place / "tiny" / "config.json").read_text())
    sizes = {name: config[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")}
    folder = tmp_path / "bert"
    BertForMaskedLM(BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=32)).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        if (place / "tiny" / file).exists():
            (folder / file).write_bytes((place / "tiny" / file).read_bytes())
    line = complaint(capsys, place, tmp_path / "out", recipe="original", model_path=folder)
    assert "--head plain: it is ELECTRA's" in line and "--head huggingface" in line
    command = arguments(place, tmp_path / "out", recipe="original", model_path=folder, head="huggingface", max_steps=1)
    assert train_glue.main(command) == 0


def test_the_documents_table_lists_every_point_of_the_recipes():
    """docs/electra.md has a row with `--name value` for each setting whose published value is not our default."""
    text = (ROOT / "docs" / "electra.md").read_text(encoding="utf-8")
    table = text[text.index("\n## As the published code") :]
    for module, given, published in ((electra, [], PRETRAINING), (glue, GLUE, FINE_TUNING)):
        default = module.parse_args(given)
        for name, choice in published.items():
            if choice.value is None or choice.value == getattr(default, name):
                continue
            value = int(choice.value) if isinstance(choice.value, (bool, float)) else choice.value
            if name == "dropout":
                value = choice.value
            assert f"`--{name} {value}`" in table, name
