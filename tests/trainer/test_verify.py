"""--verify_every: random bits flip during a run. Reference: the undisturbed run, without the flag."""

import contextlib
import io
import itertools
import os
import random
import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common.errors import UserError
from tests import chats, helpers
from tests.helpers import assert_same_weights, complaint, flags, losses, new_port, records, train, write_corpus
from trainer import train_pretrain
from trainer.loop import Trainer
from trainer.pretrain import job as pretrain_job
from trainer.sharding import own_part
from trainer.verify import Verifier

N_UPDATES = 14
KINDS = {
    "adamw": {},
    "muon, experts, validation": {"optimizer": "muon", "use_moe": 1, "val_fraction": 0.2, "eval_interval": 6},
    "dropout, float16": {"dropout": 0.1, "dtype": "float16", "num_workers": 1},
    "fine-tuning": {"command": chats.train},
}


def flip(tensor, chance):
    tensor.detach().reshape(-1).view(torch.uint8)[chance.randrange(tensor.nbytes)] ^= 1 << chance.randrange(8)


@contextlib.contextmanager
def flipped_bits(seed=0, at_rest=lambda update: False, computed=lambda check: False, rank=0):
    """Yields the list of what is flipped on this rank: at rest after updates, and within checks in a gradient or an output."""
    chance, flipped = random.Random(seed), []
    checks, updates, tries = itertools.count(1), itertools.count(), itertools.count()
    faulty = None
    compute, attempt, remember = Verifier._until_two_agree, Verifier._attempt, Verifier.remember
    is_here = int(os.environ.get("RANK", 0)) == rank

    def computing(verifier, *given):
        nonlocal tries, faulty
        tries = itertools.count()
        faulty = chance.randrange(2) if is_here and computed(next(checks)) else None
        return compute(verifier, *given)

    def attempting(verifier, *given):
        if next(tries) != faulty:
            return attempt(verifier, *given)
        left = [None]

        def spoil(*given):
            if not left:
                return None
            flipped.append("computed")
            left.clear()
            spoilt = given[-1].clone()
            flip(spoilt, chance)
            return spoilt

        if chance.randrange(2):
            handle = chance.choice(verifier.engine.parameters).register_hook(spoil)
        else:
            kinds = torch.nn.Linear | torch.nn.Embedding
            modules = [module for module in verifier.engine.model.modules() if isinstance(module, kinds)]
            handle = chance.choice(modules).register_forward_hook(spoil)
        try:
            return attempt(verifier, *given)
        finally:
            handle.remove()

    def remembering(verifier):
        remember(verifier)
        if is_here and at_rest(next(updates)):
            flip(chance.choice([*verifier.engine.weights_and_moments().values()]), chance)
            flipped.append("at rest")

    with mock.patch.multiple(Verifier, _until_two_agree=computing, _attempt=attempting, remember=remembering):
        yield flipped


def assert_same_run(one, other):
    """Weights, moments, the scale and the log have the same bits."""
    assert_same_weights(one, other)
    for ours, theirs in zip(one.engine.optimizers, other.engine.optimizers, strict=True):
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert losses(one) == losses(other)


def run_of(folder, name, command=train, **options):
    """A run on data.jsonl of the folder, in its subfolder `name`."""
    return command(data_path=folder / "data.jsonl", out_dir=folder / name, max_updates=N_UPDATES, **options)


@pytest.mark.parametrize("kind, seed", [
    *((kind, 0) for kind in KINDS),
    *(pytest.param(kind, seed, marks=pytest.mark.slow) for kind in KINDS for seed in range(1, 4)),
    pytest.param("compiled", 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_with_flipped_bits_ends_as_the_undisturbed_one(kind, seed, tmp_path, capsys):
    """Every update is computed twice, and every other one is disturbed: two in a row would end the run."""
    options = KINDS.get(kind, {"use_compile": 1})
    write = chats.write_chats if kind == "fine-tuning" else write_corpus
    write(tmp_path / "data.jsonl", 60)
    whole = run_of(tmp_path, "whole", **options)
    with flipped_bits(seed, lambda update: update % 2 == 0, lambda check: check % 2 == 1) as flipped:
        run = run_of(tmp_path, "run", verify_every=1, save_interval=2, **options)
    assert_same_run(run, whole)
    said = capsys.readouterr().out
    at_rest = flipped.count("at rest")
    assert said.count("put back from a copy") == at_rest == N_UPDATES // 2 + 1
    # Some have no effect on the weights.
    assert len(flipped) - at_rest >= said.count("which is kept") > 1
    ours, theirs = (torch.load(tmp_path / name / f"{run.job.files.stem.name}.pth") for name in ("run", "whole"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("faults, said", [
    ({"at_rest": lambda update: update > 4}, "between two updates"),
    ({"computed": lambda check: check > 2}, "computed again from the same state"),
])  # fmt: skip
def test_faults_in_two_checks_in_a_row_end_the_run(faults, said, tmp_path, capsys):
    options = {"data_path": write_corpus(tmp_path / "data.jsonl", 60), "out_dir": tmp_path / "run", "save_interval": 2}
    with flipped_bits(1, **faults):
        error = complaint(capsys, train_pretrain.main, flags(**options, max_updates=N_UPDATES, verify_every=2))
    assert said in error and "rank 0 on" in error and "in a row" in error
    resumed = run_of(tmp_path, "run", from_resume=1)
    assert resumed.progress.update == N_UPDATES
    assert_same_weights(resumed, run_of(tmp_path, "whole"))


@pytest.mark.parametrize("bytes_of, byte", [
    (lambda run: run.engine.model.model.layers[0].mlp.up_proj.weight, 3),
    (lambda run: torch.from_numpy(run.job.parts.validation.plan._lengths), 0),
    (lambda run: run.saver.best_weights.get("model.norm.weight"), 1),
])  # fmt: skip
def test_a_bit_that_flips_during_an_evaluation_changes_no_line_and_no_best_weights(bytes_of, byte, tmp_path, capsys):
    write_corpus(tmp_path / "data.jsonl", 60)
    options = {"val_fraction": 0.2, "eval_interval": 4, "learning_rate": 0.5, "sample_prompts": "a"}
    whole = run_of(tmp_path, "whole", **options)
    capsys.readouterr()
    runs, calls = [], itertools.count()

    def disturb(*_):
        # not when it is made again
        if next(calls) % 2 == 0 and (found := bytes_of(runs[0])) is not None:
            found.detach().reshape(-1).view(torch.uint8)[byte] ^= 1

    with helpers.before_calls(Trainer, "fit", runs.append), helpers.before_calls(pretrain_job, "evaluate", disturb):
        run = run_of(tmp_path, "run", verify_every=3, **options)
    assert capsys.readouterr().out.count("put back from a copy") >= 3
    assert_same_run(run, whole)
    for field in ("val_loss", "text"):
        assert [line[field] for line in records(run, field)] == [line[field] for line in records(whole, field)]
    torch.testing.assert_close(run.saver.best_weights, whole.saver.best_weights, rtol=0, atol=0)


def faulty_rank(folder, **options):
    """Of runs without faults, with some on rank 1 (stopped before an evaluation, and resumed), and with some in each of its checks:
    whether the first two end alike, the ranks that the second names, and the error of the third."""
    options |= {"val_fraction": 0.2, "eval_interval": 7}
    runs, error, said = [], "", io.StringIO()
    some = {"at_rest": lambda update: update % 2 == 0, "computed": lambda check: check % 2 == 1}
    for name, faults in {"none": {}, "some": some, "all": {"computed": lambda check: True}}.items():
        new_port(f"faults {name} {options}")
        with contextlib.redirect_stdout(said), flipped_bits(rank=1, **faults):
            run = partial(run_of, folder, name, verify_every=int(name != "none"), **options)
            if name == "some":
                with helpers.stopped_after(options["eval_interval"]), pytest.raises(AssertionError):
                    run()
                new_port(f"resume {options}")
                run = partial(run, from_resume=1)
            try:
                runs.append(run())
            except UserError as failure:
                error = str(failure)
                dist.destroy_process_group()
    parameters = ([own_part(p) for p in run.engine.parameters] for run in runs)
    same = all(torch.equal(p, q) for p, q in zip(*parameters, strict=True))
    return {"same": same, "named": sorted({*re.findall(r"rank (\d) on", said.getvalue())}), "error": error}
