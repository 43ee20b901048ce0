"""--budget and its relatives as a user meets them. References: the same run by the flags that the plan prints; the clock."""

import json
import shlex
import time
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import yaml

from common.errors import UserError
from common.settings import write_settings
from tests.helpers import assert_same_weights, command_line, flags, losses, records, train, trainer_of, write_corpus
from trainer import command, train_pretrain
from trainer.batching import Batching
from trainer.budget import clock, costs, laws, planner
from trainer.budget.timing import Timing
from trainer.job import RunContext
from trainer.machine.command_line import StopSignals
from trainer.machine.ranks import Ranks
from trainer.pretrain.settings import PretrainSettings
from trainer.saving.saver import Saver

# What decides the size of a run of helpers.SMALL is left to the plan, but for the width, which keeps it small.
FREE = {"batch_size": None, "accumulation_steps": None, "num_attention_heads": None, "num_hidden_layers": None}
SMALL_MODEL = {**FREE, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "log_interval": 1}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Enough documents that a plan holds some of them out."""
    return write_corpus(tmp_path_factory.mktemp("text") / "text.jsonl", n_documents=300)


@pytest.fixture(autouse=True)
def known_speed(monkeypatch, tmp_path):
    """Of products, and of compiling: nothing is remembered of this machine."""
    monkeypatch.setattr(planner, "product_rate", lambda *_, **__: 1e11)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))


def planned(out_dir, text, **changes):
    return train(**{**SMALL_MODEL, "data_path": text, "out_dir": out_dir, "budget_tokens": 3000, **changes})


def repeated_command(printed):
    """The flags of the line that repeats a plan."""
    lines = printed.splitlines()
    return shlex.split(lines[lines.index("the same run by flags:") + 1])[2:]


def test_the_plan_is_shown_and_kept_to(text, tmp_path, capfd):
    """References: the flags that are printed, and a run with them, bit for bit."""
    run = planned(tmp_path / "a", text)
    printed = capfd.readouterr().out
    for name in ("model", "tokens", "updates", "rates", "expected validation loss", "memory", "time"):
        assert f"\n  {name}" in printed
    assert "plan for 3 K tokens:" in printed
    assert run.progress.update == run.settings.max_updates
    assert run.progress.tokens == pytest.approx(3000, rel=0.1)
    assert run.settings.optimizer == "muon" and run.settings.lr_schedule == "wsd" and run.settings.val_fraction > 0
    rates = (run.settings.muon_lr, run.settings.learning_rate, run.settings.embed_lr)
    assert rates == (laws.MUON_RATE, laws.SIDE_RATE, laws.EMBED_RATE)
    command = repeated_command(printed)
    again = trainer_of(train_pretrain.main, [*command, "--out_dir", str(tmp_path / "b")])
    # So does the file that is kept: its updates are trained, without a clock.
    settings_file = f"{run.job.files.stem}.settings.yaml"
    kept = trainer_of(train_pretrain.main, ["--config", settings_file, "--out_dir", str(tmp_path / "c")])
    assert "has a plan for --budget_tokens 3000" in capfd.readouterr().out and not kept.settings.has_budget
    for other in (again, kept):
        assert losses(other) == losses(run)
        assert_same_weights(other, run)


@pytest.mark.parametrize("n_books", [1, 3])
def test_of_few_long_texts_a_plan_holds_out_the_last_part(tmp_path, n_books):
    lines = [f"{number}. The cat sat on mat {number % 97}.\n" for number in range(8000)]
    (tmp_path / "novels").mkdir()
    for book in range(n_books):
        (tmp_path / "novels" / f"{book}.txt").write_text("".join(lines[book::n_books]))
    run = planned(tmp_path / "out", tmp_path / "novels")
    assert 0 < run.settings.val_fraction <= 0.02 and run.progress.update > 0
    assert len(run.job.corpus.val_documents) == 1 and len(run.job.corpus.documents) == n_books


def test_dry_run_writes_nothing_and_says_what_a_run_says_of_the_text(text, tmp_path, capfd):
    out = tmp_path / "out"
    words = flags(**SMALL_MODEL, data_path=text, out_dir=out, budget_flops=3e9, dry_run=1, split_text="lines")
    assert train_pretrain.main(words) == 0
    said = capfd.readouterr().out
    assert "plan for 3e+09 FLOP:" in said and said.count("--split_text lines has no effect") == 1
    assert not out.exists()


def test_what_the_user_says_is_kept(text, tmp_path):
    said = {"batch_size": 2, "learning_rate": 3e-3, "optimizer": "adamw", "val_fraction": 0.1, "lr_schedule": "cosine"}
    said["accumulation_steps"] = 2
    run = planned(tmp_path / "a", text, **said)
    for name, value in said.items():
        assert getattr(run.settings, name) == value
    # A half of the batch, and what follows from it; and a rate, which holds for the embeddings too
    run = planned(tmp_path / "b", text, accumulation_steps=3, learning_rate=1e-3)
    settings = run.settings
    assert settings.accumulation_steps == 3 and run.progress.tokens == pytest.approx(3000, rel=0.15)
    assert (settings.muon_lr, settings.learning_rate, settings.embed_lr) == (laws.MUON_RATE, 1e-3, 0.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": "1m", "lr_schedule": "cosine"}, "--lr_schedule cosine"),
        ({"budget_tokens": 3000, "from_weight": "pretrain"}, "add --learning_rate"),
        ({"budget_tokens": 3000, "epochs": 2}, "--epochs and a budget"),
        ({"budget_tokens": 3000, "max_updates": 2}, "--max_updates and a budget"),
        ({"budget_tokens": 3000, "max_seq_len": 100000}, "--max_seq_len 100000 is beyond the position table"),
        ({"budget_tokens": 10}, "this budget is too small"),
        ({"budget": "20s", "hidden_size": 1_000_000}, "billion parameters need .* choose a smaller model"),
    ],
)
def test_what_a_budget_cannot_keep_to_is_one_line(text, tmp_path, changes, said):
    with pytest.raises(UserError, match=said) as caught:
        planned(tmp_path, text, **{"budget_tokens": None, **changes})
    assert "\n" not in str(caught.value)


def test_the_plan_of_a_run_is_kept(text, tmp_path, capfd):
    """As settings that --config reads, for the runs of its weight name. A resume with another budget would need another model."""
    planned(tmp_path, text)
    # A prefix that begins alike.
    planned(tmp_path, text, save_weight="pretrain_16", budget_tokens=2000)
    kept = yaml.safe_load((tmp_path / "pretrain_16.settings.yaml").read_text())
    assert kept["optimizer"] == "muon" and kept["budget_tokens"] == 3000
    line = "pretrain_16.settings.yaml is the plan of a run that was started with --budget_tokens 3000: give"
    with pytest.raises(UserError, match=line):
        planned(tmp_path, text, budget_tokens=4000, from_resume=1)
    # Without the budget a run of the default width would begin beside it, and one of its own width would end elsewhere.
    without_budget = ["--data_path", str(text), "--out_dir", str(tmp_path), "--from_resume", "1"]
    for said in ([], ["--hidden_size", "16"], ["--max_updates", "3"]):
        with pytest.raises(UserError, match=line):
            train_pretrain.main([*without_budget, *said])
    # A plan holds documents out, and what is held out is not trained.
    with pytest.raises(UserError, match="--val_path and --val_fraction exclude each other"):
        planned(tmp_path, text, from_resume=1, val_path=text)
    # Another width of the same budget is a run of its own; where none is said, the newer one is meant.
    planned(tmp_path, text, from_resume=1, hidden_size=32)
    options = {**SMALL_MODEL, "data_path": text, "out_dir": tmp_path, "budget_tokens": 3000, "from_resume": 1}
    for name, width in (("pretrain_16", 16), ("pretrain_32", None)):
        assert train_pretrain.main(flags(**{**options, "hidden_size": width})) == 0
        assert f"using the plan of the first start: {tmp_path / name}.settings.yaml" in capfd.readouterr().out


@pytest.mark.parametrize("kind", ["settings", "plan"])
@pytest.mark.parametrize("rows", [{"accumulation_steps": 6}, {"accumulation_steps": 1, "rows_per_update": 24}])
def test_a_resumed_plan_keeps_the_paths_of_each_machine_and_its_updates(tmp_path, monkeypatch, kind, rows):
    """Of one process or of ranks, also that of version 1.0. Rank 0 would tell all ranks its paths with whole settings."""
    settings = PretrainSettings.parse(["--budget_tokens", "3000", "--from_resume", "1", "--out_dir", str(tmp_path)])
    planned = replace(settings, out_dir="of rank 0", hidden_size=16, batch_size=4, max_updates=50, **rows)
    write_settings(planned, tmp_path / f"pretrain_16.{kind}.yaml")
    (tmp_path / "pretrain_16_resume").mkdir()
    (tmp_path / "pretrain_16_resume" / "update_00000001.pt").touch()
    monkeypatch.setattr(planner, "on_main", lambda ranks, work: work())
    monkeypatch.setattr(planner, "wait_for_all_ranks", lambda ranks: nullcontext())
    for n in (1, 2, 3, 4):
        ranks = Ranks(world_size=n)
        resumed = planner.plan_run(settings, RunContext(ranks, torch.device("cpu"), StopSignals()), None)
        assert (resumed.out_dir, Batching.of(resumed, ranks).rows) == (str(tmp_path), 24)


def test_a_run_that_began_without_a_budget_does_not_go_on_with_one(text, tmp_path):
    said = {**SMALL_MODEL, "num_key_value_heads": 1, "batch_size": 2, "accumulation_steps": 1, "optimizer": "adamw"}
    said["val_fraction"] = 0
    train(**{**said, "data_path": text, "out_dir": tmp_path, "max_updates": 2})
    with pytest.raises(UserError, match="this run was started without --budget: continue"):
        planned(tmp_path, text, **said, budget_tokens=None, budget="2m", from_resume=1)


def test_a_resume_by_the_flags_of_a_plan_keeps_its_budget(text, tmp_path, capfd):
    """The first command continues the run afterwards, and plans no other."""
    made = planned(tmp_path, text).settings.max_updates
    by_flags = ["--config", str(tmp_path / "pretrain_16.settings.yaml"), "--max_updates", str(made + 1)]
    assert train_pretrain.main([*by_flags, "--from_resume", "1"]) == 0
    capfd.readouterr()
    options = {**SMALL_MODEL, "data_path": text, "out_dir": tmp_path, "budget_tokens": 3000, "from_resume": 1}
    assert train_pretrain.main(flags(**options)) == 0
    printed = capfd.readouterr().out
    assert "using the plan of the first start" in printed and f"done its {made + 1} updates" in printed


def test_a_run_with_a_plan_is_set_aside_with_it(text, tmp_path):
    planned(tmp_path, text)
    plan = (tmp_path / "pretrain_16.settings.yaml").read_bytes()
    (tmp_path / "pretrain_16.plan.yaml").write_bytes(plan)
    train(**{**SMALL_MODEL, "data_path": text, "out_dir": tmp_path, "batch_size": 2, "max_updates": 1})
    # Version 1.0 had a file of its own.
    assert not (tmp_path / "pretrain_16.plan.yaml").exists()
    assert (tmp_path / "pretrain_16_resume_old1" / "pretrain_16.settings.yaml").read_bytes() == plan
    planned(tmp_path, text, budget_tokens=4000)
    assert "4000" in (tmp_path / "pretrain_16.settings.yaml").read_text()


def test_resume_is_bitwise(text, tmp_path, monkeypatch, capfd):
    """A plan is not made again, and decides on the training alone. Reference: the run that went through."""
    said = {"seed": 7, "grad_clip": 0.1}
    whole = planned(tmp_path / "whole", text, save_interval=5, **said)
    # The run is killed behind its third save.
    saves = []

    def stop_at_third(saver, *arguments, **named):
        saves.append(save(saver, *arguments, **named))
        if len(saves) == 3:
            saver.checkpoints.wait()
            raise KeyboardInterrupt

    save = Saver.save
    monkeypatch.setattr(Saver, "save", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        planned(tmp_path / "again", text, save_interval=5, keep_checkpoints=7, **said)
    monkeypatch.setattr(Saver, "save", save)
    capfd.readouterr()
    resumed = planned(tmp_path / "again", text, save_interval=5, log_interval=2, from_resume=1)
    printed = capfd.readouterr().out
    assert "using the plan of the first start" in printed and "resumed from" in printed
    assert "planning:" not in printed
    assert resumed.settings.keep_checkpoints == 2
    assert (resumed.progress.update, resumed.progress.tokens) == (whole.progress.update, whole.progress.tokens)
    assert_same_weights(resumed, whole)


def test_a_plan_for_weights_is_for_their_shape(tmp_path):
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "a_32.json").write_text(json.dumps(shape))
    (tmp_path / "a_32.pth").touch()
    words = ["--budget_tokens", "3000", "--learning_rate", "1e-3", "--from_weight", str(tmp_path / "a_32.pth")]
    (model,) = planner.sizes(planner.fixed_fields(PretrainSettings.parse(words), 97))
    assert {name: getattr(model, name) for name in shape} == shape


@pytest.mark.slow
def test_processes_that_share_a_run_plan_it_together(text, tmp_path):
    """Reference: what the plan prints, trained in one process: as many updates of as many rows, with the same losses."""
    options = {**SMALL_MODEL, "data_path": text, "out_dir": tmp_path / "two", "optimizer": "adamw"}
    two = command_line(flags(**options, budget_tokens=3000, cpu_processes=2))
    assert two.returncode == 0, two.stderr
    assert "2 processes of 1 thread share each micro-batch" in two.stdout
    command = repeated_command(two.stdout)
    one = trainer_of(train_pretrain.main, [*command, "--cpu_processes", "1", "--out_dir", str(tmp_path / "one")])
    of_two = records(tmp_path / "two" / "pretrain_16.metrics.jsonl")
    assert of_two[-1]["update"] == one.progress.update and of_two[-1]["tokens"] == one.progress.tokens
    assert [line["loss"] for line in of_two] == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.slow
def test_a_time_budget_ends_on_time(text, tmp_path, monkeypatch):
    """The clock of this process begins with the test; 20 s are the shortest that the flag takes."""
    began = time.monotonic()
    for module in (planner, clock, costs):
        monkeypatch.setattr(module, "seconds_since_start", lambda: time.monotonic() - began + 12)
    monkeypatch.setattr(clock, "slowness", lambda: 1.5)
    run = planned(tmp_path, text, budget_tokens=None, budget="20s", log_interval=1000)
    took = time.monotonic() - began + 12
    # The files of so small a run are written at once, and the reserve for them is left over.
    assert 14 < took < 21
    assert run.job.length.clock.seconds_at_end == 1.5 * (2 + 2 * run.settings.report)
    assert run.progress.update == run.job.length.clock.end


# Where compiling fails, the run says so, and trains the plain code.
@pytest.mark.parametrize("failure", [None, "it does not work here"])
@pytest.mark.parametrize("words", ["--budget 5m --hidden_size 128", "--budget 10m"])
def test_what_is_trained_was_timed_and_compiled_once(text, tmp_path, monkeypatch, capfd, words, failure):
    """Although by its true speed, three times what the estimate says, other micro-batches would suit better. A plan that is only shown
    compiles nothing, and once the machine is known it times nothing and is that of the run."""
    timed = []

    def in_place_of_run(timing, ranks, device):
        rows = len(timing.batch.input_ids)
        timed.append((timing.compiled, timing.plan.config.hidden_size, rows))
        return costs.Timed(rows * timing.plan.config.hidden_size / 1e5, 0.0, 30.0)

    monkeypatch.setattr(Timing, "run", in_place_of_run)
    compiles, tried = Mock(return_value=failure), Mock(side_effect=UserError("planned"))
    monkeypatch.setattr(costs, "failure_to_compile", compiles)
    monkeypatch.setattr(command, "open_run", tried)
    arguments = ["--data_path", str(text), "--out_dir", str(tmp_path), "--max_seq_len", "128", "--cpu_processes", "1"]

    def plan_of(*dry_run):
        """(layers, width and rows of a plan; what was timed for it; what it prints)."""
        timed.clear()
        with nullcontext() if dry_run else pytest.raises(UserError, match="planned"):
            train_pretrain.main([*arguments, *words.split(), "--use_compile", "1", *dry_run])
        printed = capfd.readouterr().out
        flags = repeated_command(printed)
        names = ("num_hidden_layers", "hidden_size", "batch_size")
        return [int(flags[flags.index(f"--{name}") + 1]) for name in names], [*timed], printed

    _, of_new_machine, _ = plan_of("--dry_run")
    assert of_new_machine and not any(compiled for compiled, *_ in of_new_machine)
    _, of_second, printed = plan_of("--dry_run")
    assert not of_second and not compiles.called and "by estimate: only the run itself times this" in printed
    chosen, of_run, _ = plan_of()
    _, width, rows = chosen
    assert [compiled for compiled, *_ in of_run].count(True) == (failure is None)
    assert of_run[-1][1] == width and (failure or of_run[-1] == (True, width, rows))
    shown, of_third, printed = plan_of("--dry_run")
    assert shown == chosen and not of_third and "by what was timed here" in printed


@pytest.mark.slow
def test_a_plan_for_shares_that_change_needs_text_to_its_end(text, tmp_path):
    """The line says what would fit, and that fits."""
    other = write_corpus(tmp_path / "other.jsonl", n_documents=300, seed=1)
    options = {name: value for name, value in SMALL_MODEL.items() if name != "data_path"}
    command = flags(**options, out_dir=tmp_path, budget_tokens=40_000)
    line = r"the plan takes 39\.\d K tokens, .*: allow \d+ times as many passes"
    with pytest.raises(UserError, match=line) as caught:
        train_pretrain.main([*command, "--data_path", f"{text}:0.7..0.2", f"{other}:0.3..0.8"])
    times = int(str(caught.value).split("allow ")[1].split(" ")[0])
    paths = [f"{text}:0.7..0.2:x{times}", f"{other}:0.3..0.8:x{times}"]
    run = trainer_of(train_pretrain.main, [*command, "--data_path", *paths])
    assert run.progress.tokens == pytest.approx(40_000, rel=0.1)
    assert all(passes <= times for *_, passes in run.job.corpus.tokens_of_sources(run.progress.epoch, run.progress.row))
