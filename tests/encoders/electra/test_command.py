"""train_electra.py as a user runs it. References: plain formulas, the fields of files, an uninterrupted run."""

import json
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import AutoModelForPreTraining, AutoTokenizer, ElectraConfig, ElectraForMaskedLM

from common.errors import UserError
from encoders.electra.job import VAL_SEED, ElectraJob
from encoders.electra.settings import NETWORK_SIZES, ElectraSettings
from tests import helpers
from tests.encoders.electra.test_examples import write_lines, write_vocab
from tests.helpers import ROOT, argument_list, before_update, command_line, complaint, stopped_after, trainer_of
from tests.trainer.machine.simulated_cuda import simulated_cuda
from trainer import train_electra
from trainer.job import Progress
from trainer.optim.build import build_adamw

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "embedding_size": 16,
    "max_seq_len": 24, "batch_size": 4, "max_steps": 12, "warmup_steps": 2, "learning_rate": 1e-3, "log_interval": 1,
    "save_interval": 5, "num_workers": 0, "device": "cpu", "dtype": "float32", "use_compile": 0, "dist_timeout": 60,
    "report": 0,
}  # fmt: skip
TIMES = ("tokens_per_second", "updates_per_second", "epoch_Time", "eta", "memory", "started", "command", "settings")
DISCRIMINATOR = {
    "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "hidden_dropout_prob": 0.25, "initializer_range": 0.2,
}  # fmt: skip
GENERATOR = {**DISCRIMINATOR, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}


def flags(**changes):
    return argument_list({**SMALL, **changes})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """{data_path, vocab_path} of a small corpus."""
    folder = tmp_path_factory.mktemp("electra")
    return {"data_path": write_lines(folder / "data.jsonl")[0], "vocab_path": write_vocab(folder / "vocab.txt")}


def train(**changes):
    return trainer_of(train_electra.main, flags(**changes))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def log_lines(folder, field="loss"):
    lines = helpers.records(folder / "electra_small" / "electra_small.metrics.jsonl", field)
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def test_what_a_run_leaves(data, tmp_path, capsys):
    """Both networks at the end and at --save_percents, loadable by transformers with the tokenizer; the metrics."""
    run = train(**data, out_dir=tmp_path, save_percents="25,50", report=1)
    folder = tmp_path / "electra_small"
    assert {p.name for p in folder.iterdir()} == {
        "discriminator", "generator", "percent_25", "percent_50", "electra_small_resume", "electra_small.metrics.jsonl",
        "electra_small.report.html", "electra_small.loss.png", ".electra_small.lock", "electra_small.settings.yaml",
    }  # fmt: skip
    own = run.engine.model.discriminator.state_dict()
    for place in (folder, folder / "percent_25", folder / "percent_50"):
        model = AutoModelForPreTraining.from_pretrained(place / "discriminator")
        generator = ElectraForMaskedLM.from_pretrained(place / "generator")
        assert AutoTokenizer.from_pretrained(place / "discriminator").mask_token_id == 4
        assert (place / "generator" / "vocab.txt").read_text() == data["vocab_path"].read_text()
        assert equal(model.state_dict(), own) == (place == folder)
        assert generator.generator_lm_head.weight is generator.electra.embeddings.word_embeddings.weight
    last = log_lines(tmp_path)[-1]
    assert last["update"] == 12 and {
        "loss", "mlm_loss", "disc_loss", "gen_acc", "disc_acc", "disc_precision", "disc_recall", "disc_auc", "lr"
    } <= set(last)  # fmt: skip
    assert last["loss"] == pytest.approx(last["mlm_loss"] + 50 * last["disc_loss"])
    assert "Discriminator: precision, recall, AUC" in (folder / "electra_small.report.html").read_text()
    out = capsys.readouterr().out
    assert "examples of 24" in out and "discriminator:" in out and "Writing model" not in out


def test_the_flags_of_weights_masking_sampling_and_adam_reach_them(data, tmp_path):
    sampling = {"sampling": "fp32_gumbel", "gen_smooth": 0.1, "disc_smooth": 0.2}
    others = {"mask_share": 0.5, "mask_style": "bert", "adam_epsilon": 1e-3, "adam_bias_correction": 0}
    others |= {"init_std": 0.1, "position_init": "sinusoidal"}
    # Leaves the networks as they were
    others |= {"max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-12}
    run = train(**data, **sampling, **others, out_dir=tmp_path)
    for network in (run.engine.model.generator, run.engine.model.discriminator):
        matrices = [p.flatten() for name, p in network.named_parameters() if ".layer." in name and p.dim() == 2]
        assert torch.cat(matrices).std().item() == pytest.approx(0.1, rel=0.1)
        positions = network.electra.embeddings.position_embeddings.weight
        assert positions[0, :2].tolist() == pytest.approx([0, 0.1 * 2**0.5], abs=1e-6)
    assert {name: getattr(run.engine.model, name) for name in sampling} == sampling
    plan, assembler, group = run.job.plan(0), run.job.assembler, run.engine.groups[0]
    totals = plan.totals(0, plan.n_rows)
    assert (assembler.mask_share, assembler.style) == (0.5, "bert") and totals.masked > 0.4 * totals.targets
    # Without the correction the moments count as those of a late update.
    assert group["eps"] == 1e-3 and run.engine.optimizers[0].state[group["params"][0]]["step"] > 1000


def test_it_starts_and_ends_on_a_machine_with_one_gpu(data, tmp_path):
    with simulated_cuda() as cuda:
        run = train(**data, out_dir=tmp_path, device=None, max_steps=2)
    assert run.engine.device == torch.device("cuda", 0) and cuda.chosen[0] == 0
    assert run.progress.update == 2


def test_without_a_vocabulary_one_is_trained(data, tmp_path):
    # One of a run that has saved nothing is none of --from_resume 1.
    (tmp_path / "electra_small" / "vocabulary").mkdir(parents=True)
    other = write_vocab(tmp_path / "electra_small" / "vocabulary" / "vocab.txt").read_text()
    train(data_path=data["data_path"], out_dir=tmp_path, max_steps=2, from_resume=1)
    vocabulary = (tmp_path / "electra_small" / "vocabulary" / "vocab.txt").read_text()
    assert vocabulary.split("\n")[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] and "\ncat\n" in vocabulary
    assert vocabulary != other
    # A resume reads it, and does not write it again.
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "electra_small" / "vocabulary").iterdir()}
    train(data_path=data["data_path"], out_dir=tmp_path, max_steps=4, from_resume=1)
    assert files == {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize("at, batch_size, dtype", [(6, 4, "float32"), (12, 16, "bfloat16")])
def test_a_killed_run_goes_on_bitwise(data, tmp_path, at, batch_size, dtype):
    """Weights and log lines, with dropout, also behind the end of an epoch of 162 examples. A worker loads for the resumed run."""
    same = {**data, "dtype": dtype, "accumulation_steps": 2, "batch_size": batch_size}
    whole = train(**same, out_dir=tmp_path / "whole")
    with before_update(at, mock.Mock(side_effect=ArithmeticError)), pytest.raises(ArithmeticError):
        train_electra.main(flags(**same, out_dir=tmp_path / "cut"))
    resumed = train(**same, out_dir=tmp_path / "cut", from_resume=1, num_workers=1)
    assert (whole.progress.epoch > 0) == (batch_size > 4)
    helpers.assert_same_weights(whole, resumed)
    assert log_lines(tmp_path / "whole") == log_lines(tmp_path / "cut")
    last = "electra_small/electra_small_resume/update_00000012.pt"
    ends = [torch.load(tmp_path / run / last, weights_only=True)["engine"]["optimizer"] for run in ("whole", "cut")]
    assert all(equal(ends[0]["state"][i], ends[1]["state"][i]) for i in ends[0]["state"])


def test_a_longer_run_goes_on_and_another_one_is_refused(data, tmp_path, capsys):
    train(**data, out_dir=tmp_path, max_steps=6)
    assert train(**data, out_dir=tmp_path, max_steps=8, from_resume=1).progress.update == 8
    assert "--max_steps is 8, was 6" in capsys.readouterr().out
    assert train_electra.main(flags(**data, out_dir=tmp_path, max_steps=8, from_resume=1)) == 0
    assert "already done its 8 updates: nothing to do (raise --max_steps to continue)" in capsys.readouterr().out
    # Its networks are written again.
    weights_of_generator = tmp_path / "electra_small" / "generator" / "model.safetensors"
    right = weights_of_generator.read_bytes()
    weights_of_generator.write_bytes(right[:-4] + bytes(4))
    assert train_electra.main(flags(**data, out_dir=tmp_path, max_steps=8, from_resume=1)) == 0
    assert weights_of_generator.read_bytes() == right
    other = write_lines(tmp_path / "other.jsonl", n_documents=3, seed=9)[0]
    vocabulary = write_vocab(tmp_path / "more.txt", (*data["vocab_path"].read_text().split(), "zebra"))
    for changes, words in (
        ({"mask_share": 0.2}, "mask_share"),
        ({"dropout": 0.2}, "another architecture .*hidden_dropout_prob"),
        ({"position_init": "sinusoidal"}, "another architecture .*position_init"),
        ({"data_path": other}, r"another data \(--data_path, .*--deduplicate\): .*; use the same one, or start"),
        ({"vocab_path": vocabulary}, r"another tokenizer \(--vocab_path\): "),
    ):
        with pytest.raises(UserError, match=words):
            train(**{**data, "out_dir": tmp_path, "max_steps": 9, "from_resume": 1, **changes})


def test_all_intervals_count_updates(data, tmp_path):
    """However many micro-batches an update has. Reference: the same run with one micro-batch an update."""
    found = []
    for parts in (1, 2):
        out = tmp_path / str(parts)
        options = {"accumulation_steps": parts, "batch_size": 8 // parts, "log_interval": 3, "save_interval": 5}
        train(**data, out_dir=out, **options, keep_checkpoints=9, save_steps=5, save_percents="50")
        folder = out / "electra_small"
        places = [*folder.glob("electra_small_resume/*.pt"), *folder.glob("checkpoint-*"), *folder.glob("percent_*")]
        found.append(([line["update"] for line in log_lines(out)], sorted(path.name for path in places)))
    saved = [f"update_{update:08d}.pt" for update in (5, 6, 10, 12)]
    assert found == 2 * [([1, 4, 7, 10, 12], ["checkpoint-10", "checkpoint-5", "percent_50", *saved])]
    saved = [folder / name / "discriminator" for name in ("checkpoint-5", "percent_50")]
    at_5, at_6 = (AutoModelForPreTraining.from_pretrained(path).state_dict() for path in saved)
    assert not equal(at_5, at_6) and (folder / "checkpoint-10" / "generator" / "vocab.txt").is_file()
    # A fresh run moves them away with the rest.
    train(**data, out_dir=out, max_steps=1)
    assert not list(folder.glob("checkpoint-*"))


def test_an_example_is_shown_every_so_many_updates_and_changes_nothing(data, tmp_path, capsys):
    """References: for the weights a run without it, for the last look a forward pass."""
    with stopped_after(5):
        train_electra.main(flags(**data, out_dir=tmp_path / "a", example_interval=5, accumulation_steps=2))
    run = train(**data, out_dir=tmp_path / "a", example_interval=5, accumulation_steps=2, from_resume=1)
    assert capsys.readouterr().out.count("--- sample from ") == 3
    helpers.assert_same_weights(run, train(**data, out_dir=tmp_path / "b", accumulation_steps=2))
    shown = log_lines(tmp_path / "a", "text")
    assert [line["update"] for line in shown] == [5, 10, 12]
    job = run.job
    batch = job.assembler[job.plan(0).recipe(range(1))]
    torch.manual_seed(VAL_SEED)
    found = job.model.eval()(*batch)
    length = int(batch.lengths[0])
    first, second, *_, last = shown[-1]["text"].splitlines()
    assert [first, second] == [job.parts.tokenizer.decode(row[0, :length]) for row in (batch.ids, found.corrupted)]
    replaced, called = found.replaced[0, :length], found.disc_logits[0, :length] >= 0
    right = int((replaced == called).sum())
    assert last == f"{int(replaced.sum())} of {length} tokens are replaced; the discriminator is right on {right}"


def test_a_seed_that_is_none_is_random_and_goes_on(data, tmp_path):
    """As published: --seed None. The number stands in the settings of the run, and a resume takes it from there."""
    drawn = train(**data, out_dir=tmp_path, seed="None", max_steps=2).job.settings.seed
    assert f"seed: {drawn}\n" in (tmp_path / "electra_small" / "electra_small.settings.yaml").read_text()
    assert train(**data, out_dir=tmp_path, seed="None", max_steps=4, from_resume=1).job.settings.seed == drawn
    assert train(**data, out_dir=tmp_path / "b", seed="None", max_steps=1).job.settings.seed != drawn
    assert train(**data, out_dir=tmp_path, seed=drawn, max_steps=5, from_resume=1).progress.update == 5
    with pytest.raises(UserError, match="seed"):
        train(**data, out_dir=tmp_path, seed=(drawn + 1) % 2**32, max_steps=6, from_resume=1)


def files(folder, generator=GENERATOR, discriminator=DISCRIMINATOR):
    """The two flags, and none of the sizes."""
    paths = {}
    for name, fields in (("generator_config", generator), ("discriminator_config", discriminator)):
        paths[name] = folder / f"{name}.json"
        paths[name].write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return {**dict.fromkeys(NETWORK_SIZES), **paths}


def test_the_networks_are_those_of_the_files(data, tmp_path, capsys, monkeypatch):
    """Also where a --config file names them with a tilde, which no shell writes out then."""
    monkeypatch.setenv("HOME", str(tmp_path))
    named = files(tmp_path) | {"generator_config": "~/generator_config.json"}
    run = train(**data, **named, out_dir=tmp_path, max_steps=1, init_std=0.05, rows_per_update=4, accumulation_steps=3)
    for network, wanted in ((run.job.model.generator, GENERATOR), (run.job.model.discriminator, DISCRIMINATOR)):
        assert {name: getattr(network.config, name) for name in wanted} == wanted
        assert network.config.vocab_size == len(run.job.parts.tokenizer)
    assert run.job.model.generator.electra.embeddings is run.job.model.discriminator.electra.embeddings
    printed = capsys.readouterr().out
    assert "--init_std 0.05 has no effect: the networks" in printed and "--accumulation_steps 3 has no" in printed


def test_the_file_of_a_saved_model_is_taken_and_compared(data, tmp_path, capsys):
    own = {**DISCRIMINATOR, "hidden_act": "relu", "layer_norm_eps": 1e-5, "classifier_dropout": 0.1}
    # plus fields of the published small network
    fields = {**ElectraConfig(**own).to_dict(), "position_embedding_type": "absolute", "vocab_size": 50}
    run = train(**data, out_dir=tmp_path, max_steps=1, **files(tmp_path, fields, {**fields, "is_decoder": True}))
    config = run.job.model.discriminator.config
    assert {name: getattr(config, name) for name in own} == own and not config.is_decoder
    note = f"note: the networks' files have 50 entries and the vocabulary {len(run.job.parts.tokenizer)}:"
    assert note in capsys.readouterr().out
    changed = files(tmp_path, fields, {**fields, "hidden_act": "gelu"})
    with pytest.raises(UserError, match="another architecture"):
        train(**data, out_dir=tmp_path, max_steps=2, from_resume=1, **changed)


def test_a_faulty_file_is_named_in_one_line(data, tmp_path):
    for generator, wanted in (
        ("[1, 2]", "expected a JSON object of an ElectraConfig's fields"),
        ({**GENERATOR, "hidden_act": "gelo"}, "KeyError: 'gelo'"),
        ({**GENERATOR, "max_position_embeddings": 12}, "max_position_embeddings is 12, expected 24"),
        ({**GENERATOR, "hidden_size": "wide"}, "hidden_size"),
    ):
        with pytest.raises(UserError, match=wanted) as error:
            train(**data, out_dir=tmp_path, **files(tmp_path, generator=generator))
        assert "--generator_config" in str(error.value) and "\n" not in str(error.value)


def test_adam_without_bias_correction():
    """Reference: the original code's update by hand: m/(sqrt(v) + eps) + decay · p, ten times."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4, 3))
    by_hand, m, v = p.detach().double().clone(), 0.0, 0.0
    optimizer = build_adamw([{"params": [p], "weight_decay": 0.1}], 1e-2, bias_correction=False, eps=1e-6)
    for _ in range(10):
        p.grad = torch.randn(4, 3)
        g = p.grad.double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        by_hand = by_hand - 1e-2 * (m / (v.sqrt() + 1e-6) + 0.1 * by_hand)
        optimizer.step()
    assert torch.allclose(p.double(), by_hand, atol=1e-6)


@pytest.mark.parametrize("steps, warmup", [(1_000, 100), (1_000_000, 10_000)])
def test_the_warm_up_when_none_is_given_is_a_tenth_of_the_run_and_10_000_updates_at_most(steps, warmup):
    """Reference: the original schedule, whose decay goes on during the warm-up."""
    line = ["--data_path", "a.txt", "--vocab_path", "b.txt", "--learning_rate", "1", "--max_steps", str(steps)]
    job = SimpleNamespace(settings=ElectraSettings.parse(line))
    for update, factor in ((warmup // 2, 0.5), (warmup, 1), (2 * warmup, 1)):
        rate = ElectraJob.learning_rate(job, None, Progress(update=update))
        assert rate == pytest.approx(factor * (1 - update / steps))


def test_a_user_error_is_one_line(data, tmp_path, monkeypatch, capsys):
    for changes, words in (
        ({"vocab_path": "none.txt"}, "none.txt: No such file"),
        ({"hidden_size": 30}, "--hidden_size 30 is no multiple of --generator_divisor 4"),
        ({"hidden_size": 36, "num_attention_heads": 8}, "generator: hidden_size 9 is no multiple of 2 heads"),
        ({"max_seq_len": 4}, "--max_seq_len: 4 must be at least 5"),
        ({"save_percents": "0,50"}, "--save_percents: 0,50"),
        ({"generator_config": "a", "discriminator_config": "b"}, "_config decides the networks: drop --num_hidden_lay"),
        ({"generator_config": "a.json"}, "--generator_config: give both"),
    ):
        monkeypatch.chdir(tmp_path)
        assert words in complaint(capsys, train_electra.main, flags(**{**data, "out_dir": tmp_path, **changes}))


@pytest.mark.slow
def test_the_command_line(data, tmp_path):
    script = ROOT / "trainer" / "train_electra.py"
    two = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
    ended = command_line(flags(**data, out_dir=tmp_path), launcher=two, script=script)
    assert ended.returncode == 0, ended.stderr
    last = log_lines(tmp_path)[-1]
    assert last["update"] == 12 and math.isfinite(last["loss"])
    ended = command_line(flags(**data, out_dir=tmp_path, max_steps=14, from_resume=1), script=script)  # on one again
    assert ended.returncode == 0 and log_lines(tmp_path)[-1]["update"] == 14, ended.stderr
