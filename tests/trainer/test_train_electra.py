"""train_electra.py as a user runs it: what it prints, leaves and goes on with. References: scikit-learn, plain formulas,
an uninterrupted run."""

import copy
import json
import math

import pytest
import torch
from transformers import AutoModelForPreTraining, AutoTokenizer, ElectraForMaskedLM

from common.errors import UserError
from tests.dataset.electra.test_electra_dataset import write_lines, write_vocab
from tests.helpers import ROOT, command_line, trainers_that_fit
from trainer import train_electra
from trainer.engine import Engine
from trainer.machine.command_line import run_cli
from trainer.optim.build import without_bias_correction

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


def test_init_std_and_position_init(data, tmp_path):
    still = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-12}
    run = train(**data, **still, out_dir=tmp_path, init_std=0.1, position_init="sinusoidal")
    for network in (run.engine.model.generator, run.engine.model.discriminator):
        matrices = [p.flatten() for name, p in network.named_parameters() if ".layer." in name and p.dim() == 2]
        assert torch.cat(matrices).std().item() == pytest.approx(0.1, rel=0.1)
        positions = network.electra.embeddings.position_embeddings.weight
        assert positions[0, :2].tolist() == pytest.approx([0, 0.1 * 2**0.5], abs=1e-6)


def test_without_a_vocabulary_one_is_trained(data, tmp_path):
    # One of a run that has saved nothing is none of --from_resume 1.
    (tmp_path / "electra_small" / "vocabulary").mkdir(parents=True)
    write_vocab(tmp_path / "electra_small" / "vocabulary" / "vocab.txt")
    train(data_path=data["data_path"], out_dir=tmp_path, max_steps=2, from_resume=1)
    vocabulary = (tmp_path / "electra_small" / "vocabulary" / "vocab.txt").read_text().split("\n")
    assert vocabulary[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] and "cat" in vocabulary
    assert vocabulary != write_vocab(tmp_path / "other.txt").read_text().split("\n")
    train(data_path=data["data_path"], out_dir=tmp_path, max_steps=4, from_resume=1)


def test_it_goes_on_from_the_networks_of_a_folder(data, tmp_path, capsys):
    """--model_path: both networks as they were left, tied, with other examples; sizes are the folder's."""
    first = train(**data, out_dir=tmp_path / "a")
    place = {"model_path": tmp_path / "a" / "electra_small", "out_dir": tmp_path / "b", "max_seq_len": 40}
    sizes = dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "embedding_size")
    )
    second = train(**{**data, **sizes, **place}, max_steps=1, warmup_steps=0, learning_rate=1e-12)
    assert all(
        torch.allclose(p, q, atol=1e-6)
        for p, q in zip(first.engine.model.parameters(), second.engine.model.parameters(), strict=True)
    )
    assert "has no effect" not in capsys.readouterr().out
    still = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-12}
    third = train(**{**data, **sizes, **place}, **still, init_std=0.1, position_init="sinusoidal")
    assert all(torch.allclose(p, q) for p, q in zip(second.engine.parameters, third.engine.parameters, strict=True))
    out = capsys.readouterr().out
    assert "--init_std 0.1 has no effect" in out and "--position_init sinusoidal has no effect" in out
    with pytest.raises(SystemExit):
        train(**{**data, **place})
    with pytest.raises(UserError, match="generator: no config can be loaded"):
        train(**{**data, **sizes, **place, "model_path": tmp_path})
    config = tmp_path / "a" / "electra_small" / "generator" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attn_implementation": "evil/attention"}))
    with pytest.raises(UserError, match="^--model_path .*/generator: its config asks for the attention of evil"):
        train(**{**data, **sizes, **place})


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


@pytest.mark.parametrize("after, batch_size, dtype", [(5, 4, "float32"), (11, 16, "bfloat16")])
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
    with pytest.raises(UserError, match="another architecture: .*hidden_dropout_prob"):
        train(**data, out_dir=tmp_path, max_steps=9, from_resume=1, dropout=0.2)
    with pytest.raises(UserError, match="another architecture: .*position_init"):
        train(**data, out_dir=tmp_path, max_steps=9, from_resume=1, position_init="sinusoidal")
    data_flags = r"\(--data_path, --text_field, --skip_bad_lines, --deduplicate\)"
    with pytest.raises(UserError, match=f"another data {data_flags}: .*; use the same one, or start without"):
        train(**{**data, "data_path": other_data(tmp_path / "other.jsonl")}, out_dir=tmp_path, from_resume=1)
    with pytest.raises(UserError, match=r"another tokenizer \(--vocab_path or --model_path\): "):
        vocabulary = write_vocab(tmp_path / "more.txt", (*data["vocab_path"].read_text().split(), "zebra"))
        train(**{**data, "vocab_path": vocabulary}, out_dir=tmp_path, from_resume=1)


def other_data(path):
    """A corpus with words that those of `data` do not have."""
    write_lines(path, n_documents=3, seed=9)
    with open(path, "a") as file:
        file.write(json.dumps({"text": "zebra quux " * 30}) + "\n")
    return path


# ------------------------------------------------------------------------------------------- one update


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


# -------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"vocab_path": "none.txt"}, "--vocab_path none.txt: no such vocab.txt"),
        ({"data_path": "none.jsonl"}, "none.jsonl: no such file"),
        ({"hidden_size": 30}, "--hidden_size 30 is no multiple of --generator_divisor 4"),
        ({"num_attention_heads": 6}, "--num_attention_heads 6 is no multiple of --generator_divisor 4"),
        ({"hidden_size": 36, "num_attention_heads": 8}, "generator: hidden_size 9 is no multiple of 2 heads"),
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
