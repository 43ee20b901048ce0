"""The main trainer as its users meet it: flags, log lines, files. References: MiniMind's formats, a run with other flags."""

import json
import os
import re
import sys
from unittest import mock

import pytest
import torch

from common.errors import UserError
from model.model_minimind import Block, MiniMindConfig, MiniMindForCausalLM
from tests import helpers
from tests.helpers import ROOT, assert_same_weights, command_line, flags, losses, records, train, write_corpus
from trainer import train_pretrain
from trainer.pretrain.loss import pretrain_loss
from trainer.pretrain.settings import PretrainSettings, find_weight

LOG_LINE = r"(?m)^Epoch:\[(\d+)/(\d+)\]\((\d+)/(\d+)\) loss:(\d+\.\d{3}) lr:(\d\.\d{12}) epoch_Time:(\d+\.\d)min:"


def public_keys(layers, moe=False, qk_norm=False):
    """The public key list, by checkpoints.md."""
    keys = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for i in range(layers):
        block = f"model.layers.{i}."
        keys |= {f"{block}self_attn.{name}_proj.weight" for name in "qkvo"}
        keys |= {f"{block}{name}_layernorm.weight" for name in ("input", "post_attention")}
        keys |= {f"{block}self_attn.{name}_norm.weight" for name in "qk"} if qk_norm else set()
        mlps = ["mlp."] if not moe else [f"mlp.experts.{j}." for j in range(4)]
        if moe:
            keys.add(f"{block}mlp.gate.weight")
            mlps += [] if qk_norm else ["mlp.shared_experts.0."]
        keys |= {f"{block}{mlp}{name}_proj.weight" for mlp in mlps for name in ("gate", "up", "down")}
    return keys


def test_log_lines_and_exit_code(data, tmp_path):
    """Started elsewhere. References: the public trainer's line, with 0-based steps and 1.1·5e-4 first; the run in this process."""
    ended = command_line(flags(data_path=data, out_dir="there", epochs=2, log_interval=3), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    lines = re.findall(LOG_LINE, ended.stdout)
    steps = int(lines[0][3])
    assert lines[0][:4] == ("1", "2", "0", str(steps)) and lines[0][5] == "0.000550000000"
    wanted = [step for step in range(steps) if step % 3 == 0 or step == steps - 1]
    assert [int(line[2]) for line in lines] == wanted * 2
    assert [line[0] for line in lines] == ["1"] * len(wanted) + ["2"] * len(wanted)
    assert "tokens each" in ended.stdout and "parameters" in ended.stdout and "FLOP per token" in ended.stdout
    start, *metrics, trained = records(tmp_path / "there" / "pretrain_16.metrics.jsonl", None)
    assert [f"{record['loss']:.3f}" for record in metrics] == [line[4] for line in lines]
    assert trained["trained"][0]["passes"] == 2
    assert {"step", "update", "loss", "lr", "epoch_Time", "grad_norm", "tokens_per_second", "memory"} <= set(metrics[0])
    assert {"settings", "model", "data", "machine", "versions"} <= set(start)
    script = ROOT / "trainer" / "train_pretrain.py"
    assert start["command"].startswith(f"python {script} --hidden_size 16 ")
    here = losses(train(data_path=data, out_dir=tmp_path / "here", epochs=2, log_interval=3))
    assert lines[-1][4] == f"{here[-1]:.3f}"


@pytest.mark.parametrize("generation", ["minimind2", "minimind3"])
@pytest.mark.parametrize("moe", [0, 1])
def test_weights_and_config(data, tmp_path, generation, moe):
    """The public key list exactly, fp16, the tied head under both names; it loads strictly, with and without the config."""
    shape = {"generation": generation, "use_moe": moe, "num_hidden_layers": 2, "num_key_value_heads": 2}
    run = train(data_path=data, out_dir=tmp_path, **shape)
    path = tmp_path / f"pretrain_16{'_moe' if moe else ''}.pth"
    state = torch.load(path, weights_only=True)
    assert set(state) == public_keys(2, moe, generation == "minimind3")
    assert all(tensor.dtype is torch.float16 and tensor.device.type == "cpu" for tensor in state.values())
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    config = json.loads(path.with_suffix(".json").read_text())
    MiniMindForCausalLM(MiniMindConfig(**config)).load_state_dict(state, strict=True)
    loaded = MiniMindForCausalLM.from_pth(path)
    assert loaded.config.generation == generation and loaded.config.hidden_size == 16
    for name, p in run.engine.model.named_parameters():
        assert torch.equal(p.half(), state[name]) and torch.equal(loaded.get_parameter(name), state[name].float())
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_resume_takes_its_own_rates_and_decay(data, tmp_path, capsys):
    """What a resume announces as changed is changed: the groups' options are the new flags', the moments the old ones."""
    options = {"data_path": data, "out_dir": tmp_path, "optimizer": "muon"}
    run = train(**options, epochs=1)
    before, first_lines = run.engine.groups, len(records(run))
    run = train(**options, epochs=2, from_resume=1, weight_decay=0.3, muon_lr=0.05, learning_rate=1e-3)
    after = run.engine.groups
    assert [group["weight_decay"] for group in before] == [0.01, 0.0, 0.01]
    assert [group["weight_decay"] for group in after] == [0.3, 0.0, 0.3]
    assert after[-1]["lr_scale"] == pytest.approx(0.05 / 1e-3)
    # In the middle of the longer run a cosine is half down, and MiniMind adds a tenth.
    assert records(run)[first_lines]["lr"] == pytest.approx((0.5 + 0.1) * 1e-3)
    told = f"rate was {records(run)[first_lines - 1]['lr']:.2g} at the save, this start makes it 0.0006"
    assert capsys.readouterr().out.count(told) == 1
    train(**options, epochs=3, from_resume=1, learning_rate=1e-4)
    assert "the learning rate was" not in capsys.readouterr().out


def test_what_a_user_can_mend_is_one_line(data, tmp_path, capsys):
    train(data_path=data, out_dir=tmp_path)
    weights = {"from_weight": tmp_path / "pretrain_16.pth", "out_dir": tmp_path / "out"}
    for changes, words in (
        ({"data_path": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"ddp": "true"}, "torchrun --nproc_per_node"),
        ({"device": "cuda:9"}, "--device cuda:9"),
        ({"tokenizer_path": tmp_path}, str(tmp_path)),
        ({**weights, "num_hidden_layers": 2}, "pretrain_16"),
        ({**weights, "use_moe": 1}, "pretrain_16"),
        ({**weights, "generation": "minimind3", "num_key_value_heads": 2}, "pretrain_16"),
    ):
        given = {"data_path": data, "out_dir": tmp_path, **changes}
        assert words in helpers.complaint(capsys, train_pretrain.main, flags(**given))


def test_settings_without_effect_are_named(data, tmp_path, capsys):
    ignored = {"muon_lr": 0.1, "embed_lr": 0.1, "warmup_iters": 1000, "eval_interval": 7, "wandb_project": "mine"}
    ignored |= {"cuda_graphs": 1, "decay_share": 0.3, "shard": "full", "epochs": 3, "accumulation_steps": 4}
    train(data_path=data, out_dir=tmp_path, max_updates=2, rows_per_update=4, **ignored)
    out = capsys.readouterr().out
    assert all(f"warning: --{name} {value}" in out for name, value in ignored.items())


def test_the_interval_mean_is_over_tokens(data, tmp_path, capsys):
    """Reference: the sums of every micro-batch, noted down by a wrapper; auxiliary loss apart."""
    sums = []

    def recorded(*args):
        result = pretrain_loss(*args)
        sums.append(result[1].tolist())
        return result

    with mock.patch("trainer.pretrain.job.pretrain_loss", recorded):
        run = train(data_path=data, out_dir=tmp_path, use_moe=1, log_interval=4, pack=0)
    last = -1
    for record in records(run):
        cross_entropy, aux, targets, documents, *_ = map(sum, zip(*sums[last + 1 : record["step"] + 1], strict=True))
        assert record["loss"] == pytest.approx(cross_entropy / targets, rel=1e-6)
        assert record["aux_loss"] == pytest.approx(aux / documents, rel=1e-6)
        last = record["step"]
    assert last == len(sums) - 1 and capsys.readouterr().out.count(" aux_loss:") == len(records(run))


def test_the_rate_rises_stays_and_falls_as_the_flags_say(data, tmp_path):
    """--warmup_iters counts micro-batches, --decay_share is the last part of the run. A warm-up that is over does not come back."""
    options = {"lr_schedule": "wsd", "decay_share": 0.5, "warmup_iters": 4, "learning_rate": 1e-3}
    run = train(data_path=data, out_dir=tmp_path, accumulation_steps=1, max_updates=10, **options)
    expected = [1e-3 * min(1, (update + 1) / 4) * min(1, (10 - update) / 5) for update in range(10)]
    assert [record["lr"] for record in records(run)] == pytest.approx(expected)
    larger = {**options, "batch_size": 64, "max_updates": 12, "from_resume": 1}
    run = train(data_path=data, out_dir=tmp_path, accumulation_steps=1, **larger)
    assert [record["lr"] for record in records(run)][10:] == pytest.approx([1e-3 * 2 / 6, 1e-3 * 1 / 6])


def test_the_flags_of_the_data_reach_it(tmp_path):
    folder, cache = tmp_path / "data", tmp_path / "cache"
    folder.mkdir()
    helpers.write_records(folder / "a.jsonl", [{"body": "the cat sat " * 40}])
    (folder / "b.log").write_text("a mat")
    options = {"text_field": "body", "text_suffixes": ".log", "long_documents": "truncate", "cache_dir": cache}
    run = train(data_path=folder, out_dir=tmp_path / "out", **options)
    plan = run.job.plan(0)
    # The long document has as many targets as a row.
    assert len(run.job.corpus.store) == 2 and plan.row_targets(0, plan.n_rows) < 2 * 24
    assert cache.is_dir() and not (folder / ".token_store").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains(data, tmp_path, dtype):
    """Within 2 % of the fp32 losses; the engine holds what the flag says (bfloat16 is float32 where the CPU has none)."""
    reference = losses(train(data_path=data, out_dir=tmp_path))
    with mock.patch("trainer.machine.devices.cpu_has_bfloat16", lambda: True):
        run = train(data_path=data, out_dir=tmp_path, dtype=dtype)
    assert run.engine.dtype is getattr(torch, dtype)
    assert run.engine.scaler.is_enabled() == (dtype == "float16")
    assert losses(run) == pytest.approx(reference, rel=0.02)
    assert losses(run) != reference


def test_from_weight_by_name_and_by_path(data, tmp_path, monkeypatch):
    first = train(data_path=data, out_dir=tmp_path, save_weight="base", epochs=2)
    by_name = train(data_path=data, out_dir=tmp_path, from_weight="base")
    by_path = train(config=tmp_path / "pretrain_16.settings.yaml", out_dir=tmp_path / "other")
    assert losses(by_name) == losses(by_path)
    for name in (tmp_path / "base_16", "base_16"):
        assert find_weight(str(name), tmp_path, hidden_size=16, use_moe=False) == tmp_path / "base_16.pth"
    # A folder stays one, though its name is that of a weight too.
    (tmp_path / "base" / "config.json").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert str(PretrainSettings.parse(["--out_dir", ".", "--from_weight", "./base"]).weight_folder()) == "base"
    with pytest.raises(UserError, match="there is neither a folder of a model with that name nor"):
        train(data_path=data, out_dir=tmp_path, from_weight=tmp_path)
    assert losses(by_name)[0] < losses(first)[0] - 0.1


def break_updates(which):
    """A patch of the loss: the micro-batches whose number is in `which` have NaN losses."""
    count = iter(range(10**6))

    def broken(*args):
        loss, sums = pretrain_loss(*args)
        return (loss, sums) if next(count) not in which else (loss * float("nan"), sums * float("nan"))

    return mock.patch("trainer.pretrain.job.pretrain_loss", broken)


def test_a_non_finite_update_is_named_counted_and_not_applied(data, tmp_path, capsys):
    with break_updates({3}):  # the second micro-batch of the second update
        run = train(data_path=data, out_dir=tmp_path)
    out = capsys.readouterr().out
    said = [line for line in out.splitlines() if "non-finite" in line]
    documents = {d for row in range(4, 8) for d, _, _ in run.job.plan(0).pieces_of_row(row)}
    assert len(said) == 1 and said[0].startswith("step 3: ") and "update 2 is not applied (1 so far)" in said[0]
    named = said[0].split("(counted from 0) are ")[1]
    assert {int(n) for n in re.findall(r"\d+", named.split(" and ")[0])} <= documents
    assert records(run)[-1]["skipped_updates"] == 1 and f"1 of {run.progress.update} updates not applied" in out
    assert all(torch.isfinite(p).all() for p in run.engine.parameters)
    text = (tmp_path / "pretrain_16.metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text  # every line is JSON by the standard


def test_max_bad_updates_ends_the_run_and_saves_nothing_bad(data, tmp_path):
    with break_updates(range(6, 10**6)), pytest.raises(UserError, match="3 updates in a row") as error:
        train(data_path=data, out_dir=tmp_path, max_bad_updates=3, save_interval=2)
    assert "\n" not in str(error.value)
    state = torch.load(tmp_path / "pretrain_16.pth", weights_only=True)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_a_resume_has_the_scale_of_float16_and_the_count_of_bad_updates(data, tmp_path):
    """A bad update halves the scale, too. Reference: the run that was not stopped."""
    options = {"data_path": data, "dtype": "float16", "lr_schedule": "constant"}
    with break_updates({3}):
        train(out_dir=tmp_path / "parts", epochs=1, **options)
    with break_updates({3}):
        resumed = train(out_dir=tmp_path / "parts", epochs=2, from_resume=1, **options)
    # An epoch has 22 micro-batches.
    with break_updates({3, 22 + 3}):
        whole = train(out_dir=tmp_path / "whole", epochs=2, **options)
    assert resumed.engine.scaler.state_dict() == whole.engine.scaler.state_dict()
    assert records(resumed)[-1]["skipped_updates"] == records(whole)[-1]["skipped_updates"] == 2
    assert_same_weights(resumed, whole)


@pytest.mark.slow
def test_a_compiled_run_with_dropout_goes_on_to_the_last_bit(data, tmp_path):
    options = {"data_path": data, "use_compile": 1, "dropout": 0.2, "lr_schedule": "constant"}
    whole = train(out_dir=tmp_path / "whole", epochs=2, **options)
    train(out_dir=tmp_path / "parts", epochs=1, **options)
    parts = train(out_dir=tmp_path / "parts", epochs=2, from_resume=1, **options)
    assert_same_weights(whole, parts)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no file names that are not UTF-8")
def test_folders_whose_names_are_not_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    train(data_path=write_corpus(folder / "corpus.jsonl", 4), out_dir=folder / "out", report=1)
    start = records(next((folder / "out").glob("*.metrics.jsonl")), None)[0]
    assert start["settings"]["out_dir"] == str(folder / "out")
    assert list((folder / "out").glob("*.report.html"))


def test_gradient_checkpointing_recomputes(data, tmp_path, recwarn):
    """A block is computed twice a micro-batch, with the same dropout and experts, and losses; nobody is told of a new name."""
    options = {"data_path": data, "epochs": 1, "use_moe": 1, "dropout": 0.1}
    plain = train(**options, out_dir=tmp_path / "plain")
    with mock.patch.object(Block, "compute", autospec=True, side_effect=Block.compute) as compute:
        run = train(**options, out_dir=tmp_path / "recomputed", gradient_checkpointing=1)
    assert losses(run) == losses(plain)
    assert compute.call_count == 2 * (run.progress.step + 1)
    assert not [warning for warning in recwarn if "checkpointing" in str(warning.message)]
