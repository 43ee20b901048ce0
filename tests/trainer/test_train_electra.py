"""train_electra.py as a user runs it: what it prints, leaves and goes on with. References: scikit-learn, plain formulas,
an uninterrupted run."""

import copy
import json
import math
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, precision_score, recall_score, roc_auc_score
from transformers import AutoModelForPreTraining, AutoTokenizer, ElectraForMaskedLM

from common.errors import UserError
from dataset.electra.electra_dataset import Batch
from model.electra.model_electra import ElectraPretrainer
from model.electra.sizes import NETWORK_SIZES
from tests.dataset.electra.test_electra_dataset import write_lines, write_vocab
from tests.helpers import ROOT, command_line, trainers_that_fit
from tests.model.electra.test_model_electra import batch, random_examples, tiny
from trainer import train_electra
from trainer.electra.loss import N_SUMS, electra_loss, metrics
from trainer.engine import Engine
from trainer.machine.command_line import run_cli
from trainer.machine.ranks import Ranks
from trainer.optim.build import build_adamw, parameter_groups, without_bias_correction
from trainer.optim.schedules import ENCODER_SCHEDULES
from trainer.reducer import DistributedReducer

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "embedding_size": 16,
    "max_seq_len": 24, "batch_size": 4, "max_steps": 12, "warmup_steps": 2, "learning_rate": 1e-3, "log_interval": 1,
    "save_interval": 5, "num_workers": 0, "device": "cpu", "dtype": "float32", "use_compile": 0, "dist_timeout": 60,
    "report": 0,
}  # fmt: skip


def flags(**changes):
    settings = {name: value for name, value in {**SMALL, **changes}.items() if value is not None}
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """{data_path, vocab_path} of a small corpus."""
    folder = tmp_path_factory.mktemp("electra")
    return {"data_path": write_lines(folder / "data.jsonl")[0], "vocab_path": write_vocab(folder / "vocab.txt")}


def train(**changes):
    """Call the trainer's main in this process; returns its Trainer."""
    with trainers_that_fit() as trainers:
        assert train_electra.main(flags(**changes)) == 0
    return trainers[0]


def weights(run):
    return copy.deepcopy(run.engine.model.state_dict())


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


TIMES = ("tokens_per_second", "updates_per_second", "epoch_Time", "eta", "memory", "started", "command", "settings")


def log_lines(folder):
    text = (folder / "electra_small" / "electra_small.metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines if "loss" in line]


# --------------------------------------------------------------------------------------------- whole runs


def test_what_a_run_leaves(data, tmp_path, capsys):
    """Both networks at the end and at --save_percents, loadable by transformers with the tokenizer; the metrics."""
    run = train(**data, out_dir=tmp_path, save_percents="25,50", report=1)
    folder = tmp_path / "electra_small"
    assert {p.name for p in folder.iterdir()} == {
        "discriminator", "generator", "percent_25", "percent_50", "electra_small_resume", "electra_small.metrics.jsonl",
        "electra_small.report.html", "electra_small.loss.png", ".electra_small.lock", "electra_small.settings.yaml",
    }  # fmt: skip
    for place in (folder, folder / "percent_25", folder / "percent_50"):
        model = AutoModelForPreTraining.from_pretrained(place / "discriminator")
        generator = ElectraForMaskedLM.from_pretrained(place / "generator")
        assert AutoTokenizer.from_pretrained(place / "discriminator").mask_token_id == 4
        assert (place / "generator" / "vocab.txt").read_text() == data["vocab_path"].read_text()
        ended = place == folder
        assert (
            torch.equal(
                model.discriminator_predictions.dense.weight,
                run.engine.model.discriminator.discriminator_predictions.dense.weight,
            )
            == ended
        )
        assert generator.generator_lm_head.weight is generator.electra.embeddings.word_embeddings.weight
    last = log_lines(tmp_path)[-1]
    assert last["update"] == 12 and {
        "loss", "mlm_loss", "disc_loss", "gen_acc", "disc_acc", "disc_precision", "disc_recall", "disc_auc", "lr"
    } <= set(last)  # fmt: skip
    assert last["loss"] == pytest.approx(last["mlm_loss"] + 50 * last["disc_loss"])
    page = (folder / "electra_small.report.html").read_text()
    assert "Discriminator: precision, recall, AUC" in page and "generate.py" not in page
    out = capsys.readouterr().out
    assert "examples of 24" in out and "discriminator:" in out and "Writing model" not in out


def test_it_learns(data, tmp_path):
    """The generator learns fifteen words; the discriminator beats calling everything an original."""
    train(
        **data,
        out_dir=tmp_path,
        max_steps=150,
        batch_size=16,
        learning_rate=3e-3,
        dropout=0,
        log_interval=30,
        save_interval=1000,
    )
    first, *_, last = log_lines(tmp_path)
    assert last["mlm_loss"] < first["mlm_loss"] - 0.8 and last["disc_loss"] < first["disc_loss"]


def test_it_goes_on_from_the_networks_of_a_folder(data, tmp_path, capsys):
    """--model_path: both networks as they were left, tied, with other examples; sizes are the folder's."""
    first = train(**data, out_dir=tmp_path / "a")
    place = {"model_path": tmp_path / "a" / "electra_small", "out_dir": tmp_path / "b", "max_seq_len": 40}
    sizes = dict.fromkeys(NETWORK_SIZES)
    still = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-12}
    second = train(**{**data, **sizes, **place}, **still, init_std=0.1, position_init="sinusoidal")
    assert all(
        torch.allclose(p, q, atol=1e-6) for p, q in zip(first.engine.parameters, second.engine.parameters, strict=True)
    )
    out = capsys.readouterr().out
    assert "--init_std 0.1 has no effect" in out and "--position_init sinusoidal has no effect" in out
    with pytest.raises(SystemExit):
        train(**{**data, **place})
    with pytest.raises(UserError, match="train_electra.py leaves a folder with generator and discriminator"):
        train(**{**data, **sizes, **place, "model_path": tmp_path})


class Stopped(Exception):
    pass


def interrupted(after, **changes):
    """A run that ends without a word after some updates."""
    update, count = Engine.update, 0

    def stopping(self, *arguments, **named):
        nonlocal count
        if count == after:
            raise Stopped
        count += 1
        return update(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Engine, "update", stopping)
        train_electra.main(flags(**changes))


@pytest.mark.parametrize("after, batch_size, dtype", [(8, 4, "float32"), (11, 16, "bfloat16"), (8, 24, "float32")])
def test_a_killed_run_goes_on_bitwise(data, tmp_path, after, batch_size, dtype):
    """Dropout, masks, draws and order included, also behind the end of an epoch (of 162 examples): the same weights and
    log lines as without the interruption. A worker loads for the resumed run."""
    same = {**data, "dtype": dtype, "accumulation_steps": 2, "batch_size": batch_size}
    whole = train(**same, out_dir=tmp_path / "whole")
    interrupted(after, **same, out_dir=tmp_path / "cut")
    resumed = train(**same, out_dir=tmp_path / "cut", from_resume=1, num_workers=1)
    assert (whole.progress.epoch > 0) == (batch_size > 4)
    assert equal(weights(whole), weights(resumed))
    assert log_lines(tmp_path / "whole") == log_lines(tmp_path / "cut")
    ends = [torch.load(f / "electra_small/electra_small_resume/update_00000012.pt", weights_only=True)["engine"]["optimizer"]["state"]
            for f in (tmp_path / "whole", tmp_path / "cut")]  # fmt: skip
    assert all(equal(ends[0][i], ends[1][i]) for i in ends[0])


def test_a_longer_run_goes_on_and_another_one_is_refused(data, tmp_path, capsys):
    train(**data, out_dir=tmp_path, max_steps=6)
    assert train(**data, out_dir=tmp_path, max_steps=8, from_resume=1).progress.update == 8
    assert "--max_steps is 8, was 6" in capsys.readouterr().out
    assert train_electra.main(flags(**data, out_dir=tmp_path, max_steps=8, from_resume=1)) == 0
    assert "already done its 8 updates: nothing to do (a higher --max_steps goes on)" in capsys.readouterr().out
    with pytest.raises(UserError, match="mask_share"):
        train(**data, out_dir=tmp_path, max_steps=9, from_resume=1, mask_share=0.2)
    with pytest.raises(UserError, match="another architecture: hidden_dropout_prob"):
        train(**data, out_dir=tmp_path, max_steps=9, from_resume=1, dropout=0.2)
    with pytest.raises(UserError, match="another architecture: position_init"):
        train(**data, out_dir=tmp_path, max_steps=9, from_resume=1, position_init="sinusoidal")
    data_flags = r"\(--data_path, --text_field, --skip_bad_lines, --deduplicate\)"
    with pytest.raises(UserError, match=f"another data {data_flags}: .*; use the same one, or start without"):
        train(**{**data, "data_path": other_data(tmp_path / "other.jsonl")}, out_dir=tmp_path, from_resume=1)
    with pytest.raises(UserError, match=r"another tokenizer \(--vocab_path or --model_path\): "):
        vocabulary = write_vocab(tmp_path / "more.txt", (*data["vocab_path"].read_text().split(), "zebra"))
        train(**{**data, "vocab_path": vocabulary}, out_dir=tmp_path, from_resume=1)


def test_a_fresh_run_keeps_the_one_before(data, tmp_path):
    train(**data, out_dir=tmp_path, max_steps=4)
    folder = tmp_path / "electra_small"
    before = (folder / "discriminator" / "model.safetensors").read_bytes()
    train(**data, out_dir=tmp_path, max_steps=4, seed=3)
    aside = folder / "electra_small_resume_old1"
    assert (aside / "discriminator" / "model.safetensors").read_bytes() == before
    assert (folder / "discriminator" / "model.safetensors").read_bytes() != before
    assert (aside / "percent_50").is_dir()  # moved away: it is not of the run that is there now
    shutil.rmtree(folder / "electra_small_resume")
    aside.rename(folder / "electra_small_resume")
    train(**data, out_dir=tmp_path, max_steps=5, from_resume=1)
    assert len(log_lines(tmp_path)) == 5 and (folder / "percent_50").is_dir()


def other_data(path):
    """A corpus with words that those of `data` do not have."""
    write_lines(path, n_documents=3, seed=9)
    with open(path, "a") as file:
        file.write(json.dumps({"text": "zebra quux " * 30}) + "\n")
    return path


def test_without_a_vocabulary_one_is_trained_and_stays_with_its_run(data, tmp_path):
    """A run whose folder is renamed back reads with its own, not with that of the later run, which stands beside its checkpoints."""
    own = {"data_path": data["data_path"], "out_dir": tmp_path, "max_steps": 2}
    train(**own)
    folder = tmp_path / "electra_small"
    before = (folder / "vocabulary" / "vocab.txt").read_text()
    assert before.split("\n")[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] and "\ncat\n" in before
    train(**{**own, "data_path": other_data(tmp_path / "other.jsonl")})
    assert (folder / "vocabulary" / "vocab.txt").read_text() != before
    assert (folder / "electra_small_resume_old1" / "vocabulary" / "vocab.txt").read_text() == before
    shutil.rmtree(folder / "electra_small_resume")
    (folder / "electra_small_resume_old1").rename(folder / "electra_small_resume")
    assert train(**{**own, "max_steps": 3}, from_resume=1).progress.update == 3
    assert (folder / "vocabulary" / "vocab.txt").read_text() == before


def test_a_vocabulary_without_a_checkpoint_is_not_taken(data, tmp_path):
    """A run that ended before its first save leaves one, and a resume starts afresh, with its own data."""
    interrupted(0, data_path=data["data_path"], out_dir=tmp_path)
    vocabulary = tmp_path / "electra_small" / "vocabulary" / "vocab.txt"
    assert vocabulary.exists()
    train(data_path=other_data(tmp_path / "other.jsonl"), out_dir=tmp_path, max_steps=2, from_resume=1)
    assert "zebra" in vocabulary.read_text().split("\n")


def test_an_update_that_is_not_finite_is_skipped(data, tmp_path, capsys):
    """NaN in the discriminator: counted and named, not applied; nothing else ends the run."""
    forward = ElectraPretrainer.forward
    calls = 0

    def poisoned(self, *batch, **named):
        nonlocal calls
        calls += 1
        found = forward(self, *batch, **named)
        nan = torch.tensor(math.nan) if calls == 3 else 0.0
        return found._replace(disc=found.disc + nan, disc_logits=found.disc_logits + nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ElectraPretrainer, "forward", poisoned)
        run = train(**data, out_dir=tmp_path, max_steps=5)
    assert run.progress.skipped == 1 and "update 3 is not applied" in capsys.readouterr().out
    assert all(p.isfinite().all() for p in run.engine.parameters)


def test_notices(data, tmp_path, capsys):
    train(**data, out_dir=tmp_path, max_steps=2, warmup_steps=50)
    assert "the rate is never above" in capsys.readouterr().out
    train(**data, out_dir=tmp_path, max_steps=2, lr_schedule="one_cycle", muon_lr=0.1)
    out = capsys.readouterr().out
    assert "--warmup_steps 2 has no effect" in out and "--muon_lr 0.1 has no effect" in out


def test_copies_are_left_out_and_counted(data, tmp_path, capsys):
    """Reference: a run on the file without them, bit for bit."""
    lines = data["data_path"].read_text().splitlines(keepends=True)
    twice = tmp_path / "twice.jsonl"
    twice.write_text("".join([*lines, *lines[:4]]))
    options = {"vocab_path": data["vocab_path"], "max_steps": 3}
    run = train(**options, data_path=twice, out_dir=tmp_path / "twice", deduplicate="exact")
    assert f"4 of {len(lines) + 4} documents" in capsys.readouterr().out
    reference = train(**options, data_path=data["data_path"], out_dir=tmp_path / "once")
    assert equal(weights(run), weights(reference))


# ------------------------------------------------------------------------------------------- one update


def one_update(parts, ranks=None, seed=0):
    """Parameters after one update of a fixed batch that is cut into `parts` micro-batches (no dropout, tokens drawn by
    the greedy generator so that the cut does not matter)."""
    from dataset.electra.electra_dataset import Totals
    from model.electra.masking import IGNORE

    ids, lengths, masked = random_examples(R=8, seed=1)
    model = tiny(seed)
    optimizer = build_adamw(parameter_groups(model, 0.01), 1e-3, eps=1e-6)
    engine = Engine(model, optimizer, partial(electra_loss, model), device=torch.device("cpu"), dtype=torch.float32,
                    ranks=ranks or Ranks(), n_sums=N_SUMS)  # fmt: skip
    if engine.reducer is not None:
        engine.reducer = DistributedReducer(model, bucket_bytes=5000)
    totals = Totals(int(lengths.sum()), int((masked.labels != IGNORE).sum()))
    whole = Batch(*batch(ids, lengths, masked))
    share = 8 // parts // engine.ranks.world_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.electra.model_electra.sample", lambda logits, *how: logits.argmax(-1))
        for i in range(parts):
            at = (i * engine.ranks.world_size + engine.ranks.rank) * share
            engine.micro_batch(Batch(*(x[at : at + share] for x in whole)), totals, last=i == parts - 1)
    engine.update(1e-3)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), engine.collect()


def test_an_update_does_not_depend_on_micro_batches():
    """Example rows differ in length and in masked positions: 1x8, 2x4 and 4x2 train alike."""
    whole, _ = one_update(1)
    for parts in (2, 4):
        cut, _ = one_update(parts)
        assert torch.allclose(whole, cut, atol=2e-6)


def test_two_processes_train_what_one_does(data, tmp_path, monkeypatch):
    """With the greedy generator, since each process draws other numbers: rows, steps and losses of every update."""
    monkeypatch.setattr("model.electra.model_electra.sample", lambda logits, *how: logits.argmax(-1))
    n_threads = torch.get_num_threads()
    lines = []
    for processes in (1, 2):
        train(**data, out_dir=tmp_path / str(processes), dropout=0.0, cpu_processes=processes)
        lines.append(log_lines(tmp_path / str(processes)))
    torch.set_num_threads(n_threads)
    assert len(lines[0]) == len(lines[1]) == SMALL["max_steps"]
    for one, two in zip(*lines, strict=True):
        assert (one["step"], one["tokens"], one["lr"]) == (two["step"], two["tokens"], two["lr"])
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_every_parameter_is_trained_and_norms_and_biases_are_not_decayed():
    model = tiny()
    groups = parameter_groups(model, 0.01)
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters()) and len(set(listed)) == len(listed)
    names = {id(p): name for name, p in model.named_parameters()}
    undecayed = {names[id(p)].rsplit(".", 1)[1] for p in groups[1]["params"]}
    assert undecayed == {"weight", "bias"} and all(
        "LayerNorm" in names[id(p)] for p in groups[1]["params"] if names[id(p)].endswith("weight")
    )
    assert all(not names[id(p)].endswith("bias") and "LayerNorm" not in names[id(p)] for p in groups[0]["params"])
    ids, lengths, masked = random_examples()
    found = model(*batch(ids, lengths, masked))
    (found.mlm + 50 * found.disc).backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "key.bias" not in name
    )


@pytest.mark.parametrize("fused", [True, False])
def test_adam_without_bias_correction(fused):
    """Reference: the original code's update by hand: m/(sqrt(v) + eps) + decay · p, ten times."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4, 3))
    by_hand, m, v = p.detach().double().clone(), 0.0, 0.0
    optimizer = without_bias_correction(torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1, eps=1e-6, fused=fused))
    for _ in range(10):
        p.grad = torch.randn(4, 3)
        g = p.grad.double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        by_hand = by_hand - 1e-2 * (m / (v.sqrt() + 1e-6) + 0.1 * by_hand)
        optimizer.step()
    assert torch.allclose(p.double(), by_hand, atol=1e-6)


@pytest.mark.parametrize(
    "name, factors",
    [
        ("original_linear", {0: 0.0, 50: 0.5 * 0.95, 100: 0.9, 500: 0.5, 1000: 0.0}),
        ("separate_linear", {0: 0.0, 50: 0.5, 100: 1.0, 550: 0.5, 1000: 0.0}),
        ("one_cycle", {0: 1 / 25, 125: 0.52, 250: 1.0, 625: 0.500005, 1000: 1e-5}),
        ("adjusted_one_cycle", {0: 1e-5, 50: 0.500005, 100: 1.0, 550: 0.500005, 1000: 1e-5}),
    ],
)
def test_schedules(name, factors):
    """Reference: the formulas by hand, 1,000 updates of which 100 are warm-up."""
    for t, factor in factors.items():
        assert ENCODER_SCHEDULES[name](t, 1000, 100) == pytest.approx(factor, abs=1e-9)
    assert ENCODER_SCHEDULES[name](1, 1000, 0) > 0.03  # no warm-up


def test_metrics_are_those_of_scikit_learn():
    generator = np.random.default_rng(0)
    labels = generator.random(5000) < 0.1
    scores = np.clip(1 / (1 + np.exp(-generator.normal(labels * 1.5 - 1, 1.0))), 0, 1 - 1e-9)
    histogram = [
        np.bincount((scores[labels == which] * 200).astype(int), minlength=200).tolist() for which in (False, True)
    ]
    values, positions = metrics([70.0, 1000.0, 20.0, 5.0, *histogram[0], *histogram[1]])
    assert positions == 5000 and values["mlm_loss"] == 3.5 and values["gen_acc"] == 0.25 and values["disc_loss"] == 0.2
    assert values["loss"] == pytest.approx(3.5 + 50 * 0.2)
    called = scores >= 0.5
    assert values["disc_acc"] == pytest.approx(accuracy_score(labels, called))
    assert values["disc_precision"] == pytest.approx(precision_score(labels, called))
    assert values["disc_recall"] == pytest.approx(recall_score(labels, called))
    assert values["disc_auc"] == pytest.approx(roc_auc_score(labels, scores), abs=2e-3)


# -------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"vocab_path": "none.txt"}, "--vocab_path none.txt: no such vocab.txt"),
        ({"data_path": "none.jsonl"}, "none.jsonl: no such file"),
        ({"hidden_size": 30}, "--hidden_size 30 is no multiple of --generator_divisor 4"),
        ({"num_attention_heads": 6}, "--num_attention_heads 6 is no multiple of --generator_divisor 4"),
        ({"hidden_size": 36, "num_attention_heads": 8}, "--hidden_size 36 is no multiple of --num_attention_heads 8"),
        ({"max_seq_len": 4}, "--max_seq_len: 4 must be at least 5"),
        ({"mask_share": 1.5}, "--mask_share: 1.5"),
        ({"save_percents": "0,50"}, "--save_percents: 0,50"),
        ({"lr_schedule": "cubic"}, "--lr_schedule"),
        ({"size": "huge"}, "--size"),
        ({"device": "cuda:7"}, "--device cuda:7"),
    ],
)
def test_a_user_error_is_one_line(data, tmp_path, changes, words, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_cli(lambda: train_electra.main(flags(**{**data, "out_dir": tmp_path, **changes})))
    line, rest = capsys.readouterr().err.split("\n", 1)
    assert ended.value.code == 2 and line.startswith("error: ") and words in line and not rest


@pytest.mark.slow
def test_the_command_line(data, tmp_path):
    """By path, in a process of its own: exit codes, one line for an error, two ranks under torchrun."""
    script = ROOT / "trainer" / "train_electra.py"
    ended = command_line(flags(**{**data, "vocab_path": "none.txt"}, out_dir=tmp_path), script=script)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and ended.stderr.startswith("error: --vocab_path")
    two = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
    ended = command_line(flags(**data, out_dir=tmp_path), launcher=two, script=script)
    assert ended.returncode == 0, ended.stderr
    last = log_lines(tmp_path)[-1]
    assert last["update"] == 12 and math.isfinite(last["loss"])
    ended = command_line(flags(**data, out_dir=tmp_path, max_steps=14, from_resume=1), script=script)  # on one again
    assert ended.returncode == 0 and log_lines(tmp_path)[-1]["update"] == 14, ended.stderr
