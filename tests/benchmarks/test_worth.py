"""benchmarks/worth.py. References: the figures of train_glue.py's own files by numpy, and by hand."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import BertTokenizer, ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from benchmarks import worth
from benchmarks.arguments import worth_parser
from benchmarks.worth import Figure, Network, Tuning, WorkUnknown, comparisons, networks_of, table, verdict, work_of
from common.errors import UserError
from tests.dataset.electra.test_electra_dataset import write_lines, write_vocab
from tests.dataset.glue.test_glue_dataset import WORDS
from tests.helpers import ROOT
from tests.trainer.glue.glue_helpers import write_task
from tests.trainer.test_train_electra import train
from trainer import train_glue

SIZES = {
    "embedding_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def save_network(folder, kind=ElectraForPreTraining, seed=0, words=WORDS, **changes):
    """Random weights, in the layout of a run of train_electra.py."""
    torch.manual_seed(seed)
    config = ElectraConfig(vocab_size=len(words), max_position_embeddings=128, **{**SIZES, **changes})
    kind(config).save_pretrained(folder)
    save_tokenizer(folder, words)


def save_tokenizer(folder, words):
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)


# The same number of entries, and other ids.
OTHER_WORDS = [*WORDS[:-2], WORDS[-1], WORDS[-2]]


@pytest.fixture
def place(tmp_path):
    """glue/ with two tasks, and two runs of pretraining."""
    for name in ("CoLA", "STS-B"):
        write_task(tmp_path / "glue", name, {"train.tsv": 12, "dev.tsv": 8})
    save_network(tmp_path / "electra_small" / "discriminator")
    save_network(tmp_path / "mlm_small" / "encoder", ElectraForMaskedLM)
    return tmp_path


def flags(place, *networks, **changes):
    named = [f"{name}={place / folder}" for name, folder in networks]
    words = {"data_dir": place / "glue", "work": place / "work", "task": "cola", "num_seeds": 2, **changes}
    return [*(word for name, value in words.items() for word in (f"--{name}", str(value))), "--networks", *named]


SLOW, FAST = Tuning(1e-5, 0.1, 1.0), Tuning(1e-3, 0.0, 0.8)
BOTH = (("electra", "electra_small"), ("mlm", "mlm_small"))


def start(monkeypatch, words, tunings=(FAST,)):
    """Call the benchmark with train_glue.py in this process. Returns the commands that it ran."""
    ran = []

    def in_this_process(command, log):
        ran.append(command[2:])
        assert train_glue.main([*command[2:], "--device", "cpu", "--use_compile", "0"]) == 0
        return 1.0

    monkeypatch.setattr(worth, "run_command", in_this_process)
    monkeypatch.setattr(worth, "TUNINGS", tunings)
    monkeypatch.setattr(worth, "EPOCHS", {"cola": 1, "stsb": 1})
    monkeypatch.setattr(sys, "argv", ["worth.py", *words])
    worth.main()
    return ran


def of_run(command):
    """The folder of a run below --work."""
    return value_of(command, "out_dir").rsplit("/work/", 1)[1]


def value_of(command, flag):
    """The last one counts."""
    return [value for name, value in zip(command, command[1:], strict=False) if name == f"--{flag}"][-1]


def test_each_network_is_fine_tuned_once(place, monkeypatch, capsys):
    """The table has the figures of train_glue.py's files; a second start runs nothing, one with another network only that."""
    ran = start(monkeypatch, flags(place, *BOTH, task="cola,STS-B"))
    timed, tuned = ran[:2], ran[2:]
    assert [value_of(command, "max_steps") for command in timed] == ["12", "12"]
    places = [(of_run(c), value_of(c, "task"), value_of(c, "from_scratch")) for c in tuned]
    assert places == [
        (f"{name}{kind}", task, str(int(name == "none")))
        for name in ("none", "electra", "mlm")
        for task in ("cola", "stsb")
        for kind in ("/trials/0.001_0_0.8", "")
    ]
    out = capsys.readouterr().out
    assert "18 fine-tunings are left, about " in out and "mlm, stsb: 3 fine-tunings in " in out
    for name in ("none", "electra", "mlm"):
        cells = []
        for task, metric in (("cola", "matthews"), ("stsb", "pearson")):
            files = [place / "work" / name / task / f"seed_{seed}" / "eval_results.json" for seed in (42, 43)]
            values = [100 * (json.loads(file.read_text())["results"][metric] or 0) for file in files]
            cells.append(f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}")
        work = {"none": "0"}.get(name, "-")
        assert f"| {name} | {work} | {' | '.join(cells)} |" in out

    assert start(monkeypatch, flags(place, *BOTH, task="cola,stsb")) == []
    # A third network, of which one seed is asked for. Now it comes first, and decides on the one without pretraining.
    save_network(place / "other" / "encoder", seed=1)
    ran = start(monkeypatch, flags(place, ("other", "other"), *BOTH, task="cola", num_seeds=1))
    assert [value_of(command, "model_path") for command in ran] == [str(place / "other" / "encoder")] * 2


def test_each_network_has_the_tuning_that_suits_it(place, monkeypatch, capsys):
    """Reference: the figures of the trials' own files. A seed of their own decides, which no table counts."""
    start(monkeypatch, flags(place, BOTH[0], task="stsb"), (SLOW, FAST))
    out = capsys.readouterr().out
    assert "8 fine-tunings are left, about " in out
    for name in ("none", "electra"):
        figures = {}
        for tuning, folder in ((SLOW, "1e-05_0.1_1"), (FAST, "0.001_0_0.8")):
            (file,) = (place / "work" / name / "trials" / folder / "stsb").glob("seed_*/eval_results.json")
            assert file.parent.name == "seed_1042"
            told = json.loads(file.read_text())
            figures[tuning] = told["results"]["pearson"] or 0
            assert [told["settings"][field] for field in ("learning_rate", "dropout", "layer_decay")] == [*tuning]
        best = max(figures, key=figures.get)
        assert f"| {name} | rate, dropout, --layer_decay | {best} |" in out
        for seed in (42, 43):
            file = place / "work" / name / "stsb" / f"seed_{seed}" / "eval_results.json"
            told = json.loads(file.read_text())["settings"]
            assert [told[field] for field in ("learning_rate", "dropout", "layer_decay")] == [*best]
    # One more seed: the trials stay, and so do the finished seeds.
    ran = start(monkeypatch, flags(place, BOTH[0], task="stsb", num_seeds=3), (SLOW, FAST))
    assert [(of_run(command), value_of(command, "from_resume")) for command in ran] == [("none", "1"), ("electra", "1")]
    assert "6 fine-tunings are left, about " in capsys.readouterr().out


def test_the_best_of_several_tunings():
    """By hand. A correlation that is not defined counts as 0, and of equal figures the first is taken."""

    def trials(slow, fast):
        return {SLOW: {"1042": {"pearson": slow}}, FAST: {"1042": {"pearson": fast}}}

    assert worth.best_of("stsb", trials(0.1, 0.2)) is FAST
    assert worth.best_of("stsb", trials(0.2, 0.1)) is SLOW
    assert worth.best_of("stsb", trials(0.2, 0.2)) is SLOW
    assert worth.best_of("stsb", trials(-0.1, None)) is FAST
    assert worth.best_of("stsb", trials(None, -0.1)) is SLOW


def test_what_was_stopped_half_way_is_not_gone_on_with_in_another_way(place, monkeypatch):
    """The trainer would: a seed may have half of its updates by one rate and half by another."""
    words = flags(place, BOTH[0], num_seeds=1)

    def stopped(command, log):
        if of_run(command) in ("none", "electra"):
            raise UserError("a fine-tuning ended with 143")
        return whole(command, log)

    def counted_of(ran):
        return [(of_run(c), value_of(c, "from_resume")) for c in ran if of_run(c) in ("none", "electra")]

    start(monkeypatch, words, [FAST])
    whole = worth.run_command
    # One that was stopped leaves the results of the other way beside its own beginning.
    monkeypatch.setattr(worth, "TUNINGS", [SLOW])
    monkeypatch.setattr(worth, "run_command", stopped)
    with pytest.raises(UserError, match="ended with 143"):
        worth.main()
    assert counted_of(start(monkeypatch, words, [FAST])) == [("none", "0")]
    # In the same way it goes on.
    monkeypatch.setattr(worth, "TUNINGS", [SLOW])
    monkeypatch.setattr(worth, "run_command", stopped)
    with pytest.raises(UserError, match="ended with 143"):
        worth.main()
    assert counted_of(start(monkeypatch, words, [SLOW])) == [("none", "1"), ("electra", "0")]
    results = json.loads((place / "work" / "none" / "cola" / "seed_42" / "eval_results.json").read_text())
    assert results["settings"]["learning_rate"] == SLOW.learning_rate


def test_other_weights_under_the_same_name_are_refused(place, monkeypatch):
    start(monkeypatch, flags(place, BOTH[0], num_seeds=1))
    save_network(place / "electra_small" / "discriminator", seed=1)
    with pytest.raises(UserError, match="has fine-tunings of another network"):
        start(monkeypatch, flags(place, BOTH[0], num_seeds=1))


def test_another_vocabulary_beside_the_same_weights_is_refused(place, monkeypatch):
    """For the network itself, and for the one without pretraining, which begins with the same shape and vocabulary."""
    start(monkeypatch, flags(place, BOTH[0], num_seeds=1))
    save_tokenizer(place / "electra_small" / "discriminator", OTHER_WORDS)
    with pytest.raises(UserError, match=r"none has fine-tunings of another network"):
        start(monkeypatch, flags(place, BOTH[0], num_seeds=1))
    (place / "work" / "none" / "network.json").unlink()
    with pytest.raises(UserError, match=r"electra has fine-tunings of another network"):
        start(monkeypatch, flags(place, BOTH[0], num_seeds=1))


def test_other_data_or_another_tuning_is_fine_tuned_anew(place, monkeypatch):
    """And timed anew; the same start again runs nothing."""
    start(monkeypatch, flags(place, BOTH[0], num_seeds=1))
    write_task(place / "other", "CoLA", {"train.tsv": 12, "dev.tsv": 6})
    words = flags(place, BOTH[0], num_seeds=1, data_dir=place / "other")
    for tuning, trials in ((FAST, "trials/0.001_0_0.8"), (SLOW, "trials/1e-05_0.1_1")):
        ran = start(monkeypatch, words, [tuning])
        assert [of_run(c) for c in ran] == ["timing", f"none/{trials}", "none", f"electra/{trials}", "electra"]
        results = json.loads((place / "work" / "electra" / "cola" / "seed_42" / "eval_results.json").read_text())
        assert results["settings"]["learning_rate"] == tuning.learning_rate
        assert start(monkeypatch, words, [tuning]) == []


def test_a_folder_without_notes_is_left_to_the_trainer(place, monkeypatch):
    """An earlier version wrote none of what a task was made of; train_glue.py compares, and finds all seeds done."""
    start(monkeypatch, flags(place, BOTH[0], num_seeds=1))
    for name in ("none", "electra"):
        (place / "work" / name / "network.json").write_text('{"folder": "a", "sha256": "b"}')
        (place / "work" / name / "cola.made_of.json").unlink()
    trained = place / "work" / "electra" / "cola" / "seed_42" / "model" / "model.safetensors"
    before = trained.stat().st_mtime_ns
    ran = start(monkeypatch, flags(place, BOTH[0], num_seeds=1))
    assert [of_run(command) for command in ran] == ["none", "electra"]
    assert trained.stat().st_mtime_ns == before


@pytest.mark.parametrize("layout", ["sharded", "bin"])
def test_weights_in_other_files_are_told_apart_too(tmp_path, layout):
    keys = set()
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        save_network(folder, seed=seed)
        if layout == "sharded":
            model = ElectraForPreTraining.from_pretrained(folder)
            (folder / "model.safetensors").unlink()
            model.save_pretrained(folder, max_shard_size="5KB")
            assert len(list(folder.glob("model-*.safetensors"))) > 1
        else:
            weights = ElectraForPreTraining.from_pretrained(folder).state_dict()
            torch.save(weights, folder / "pytorch_model.bin")
            (folder / "model.safetensors").unlink()
        keys.add(Network("a", folder, None).key())
    assert len(keys) == 2


def test_a_fine_tuning_that_failed_is_told(place):
    with pytest.raises(UserError, match=f"ended with 3, see {place}/log.txt"):
        worth.run_command([sys.executable, "-c", "import sys; print('why'); sys.exit(3)"], place / "log.txt")
    assert (place / "log.txt").read_text() == "why\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["electra"], "NAME=FOLDER is wanted"),
        (["a/b=electra_small"], "NAME=FOLDER is wanted"),
        (["none=electra_small"], "called none already"),
        (["timing=electra_small"], "the folder timing is for the timed runs"),
        (["a=electra_small", "a=mlm_small"], "called a already"),
        (["a=glue"], "no config.json in"),
        (["a=electra_small", "b=wide"], "hidden_size is 16 in .* and 32 in"),
        (["a=electra_small", "b=relu"], "hidden_act is gelu in .* and relu in"),
        (["a=electra_small", "b=words"], "vocabulary is .* one shape and vocabulary are wanted"),
        (["a=electra_small", "b=bare"], "no vocabulary is in there"),
        (["a=damaged", "b=electra_small"], "config.json is damaged"),
    ],
)
def test_networks_that_cannot_be_compared(place, arguments, words):
    save_network(place / "wide" / "encoder", hidden_size=32)
    save_network(place / "words" / "encoder", words=OTHER_WORDS)
    save_network(place / "relu" / "encoder", hidden_act="relu")
    ElectraForPreTraining(ElectraConfig(vocab_size=len(WORDS), max_position_embeddings=128, **SIZES)).save_pretrained(
        place / "bare"
    )
    (place / "damaged").mkdir()
    (place / "damaged" / "config.json").write_text('{"vocab_size": 1')
    with pytest.raises(UserError, match=words):
        networks_of([argument.replace("=", f"={place}/") for argument in arguments])


def test_the_work_of_a_run_has_that_of_its_stages(tmp_path):
    """Reference: what the runs print."""
    data = {"data_path": write_lines(tmp_path / "data.jsonl")[0], "vocab_path": write_vocab(tmp_path / "vocab.txt")}
    first = train(**data, out_dir=tmp_path / "a", max_steps=2)
    sizes = dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "embedding_size")
    )
    stage = {**data, **sizes, "model_path": tmp_path / "a" / "electra_small", "out_dir": tmp_path / "b"}
    second = train(**stage, max_steps=3, max_seq_len=40)
    of_runs = [run.job.outlook(run.progress).flops for run in (first, second)]
    assert work_of(tmp_path / "a" / "electra_small") == pytest.approx(of_runs[0])
    assert work_of(tmp_path / "b" / "electra_small") == pytest.approx(sum(of_runs))
    (tmp_path / "a" / "electra_small" / "electra_small.metrics.jsonl").unlink()
    with pytest.raises(WorkUnknown, match=r"no file \*.metrics.jsonl in .*/a/electra_small"):
        work_of(tmp_path / "b" / "electra_small")


def start_of(update, flops, **settings):
    model = {"flops_of_update": flops}
    fields = {"started": "now", "command": "", "data": {}, "machine": {}, "versions": {}}
    return {"step": 0, "tokens": 0, "update": update, "settings": settings, "model": model, **fields}


def write_metrics(folder, *records, ending=""):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(record) for record in records]
    (folder / f"{folder.name}.metrics.jsonl").write_text("".join(f"{line}\n" for line in lines) + ending)
    return folder


def test_the_work_of_a_run_that_was_gone_on_with(tmp_path):
    """By hand: each start counts its own updates, and those behind the checkpoint of a resume count once."""
    records = [start_of(0, 10.0), {"update": 30}, start_of(20, 7.0, batch_size=8), {"update": 25}]
    folder = write_metrics(tmp_path / "run", *records)
    assert work_of(folder) == 20 * 10 + 5 * 7
    # Of the network in its folder too, and where a kill cut the last line.
    (folder / "discriminator").mkdir()
    write_metrics(folder, *records, ending='{"update": 9')
    assert work_of(folder / "discriminator") == 20 * 10 + 5 * 7
    # A fresh start, and a resume that had to take an earlier checkpoint than the one before.
    records += [start_of(0, 3.0), {"update": 50}, start_of(40, 2.0), {"update": 44}, start_of(30, 5.0), {"update": 31}]
    assert work_of(write_metrics(folder, *records)) == 30 * 3 + 1 * 5


@pytest.mark.parametrize(
    "records, reason",
    [
        ([], "no start of a run"),
        ([{"update": 5}], "no start of a run"),
        ([start_of(5, 1.0), {"update": 9}], "the run's first start is not in"),
        ([start_of(0, None)], "does not tell the work of an update"),
        ([start_of(0, 1.0, model_path="gone/electra_small")], "no file .* in .*/gone/electra_small"),
        ([start_of(0, 1.0, model_path="run")], "a run in .*/run began with networks that are no more"),
        ([start_of(0, 1.0, model_path="between")], "a run in .*/run began with networks that are no more"),
    ],
)
def test_work_that_nobody_knows_is_told_with_its_reason(tmp_path, monkeypatch, records, reason):
    """An empty file, one without its start, a folder named from elsewhere, and runs in the place of those they began with."""
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "between", start_of(0, 1.0, model_path="run"))
    with pytest.raises(WorkUnknown, match=reason):
        work_of(write_metrics(tmp_path / "run", *records))


def test_a_comparison_that_falls_away_is_told(place, monkeypatch, capsys):
    write_metrics(place / "electra_small", start_of(0, 1e12), {"update": 9})
    start(monkeypatch, flags(place, *BOTH, num_seeds=1))
    out = capsys.readouterr().out
    assert "note: the work behind mlm is not known, so it is compared with none alone: no file" in out
    assert "| electra | 9e+12 |" in out and "electra against mlm" not in out and "behind electra" not in out


def test_verdicts():
    """By hand: the difference against the larger of the two deviations."""
    assert verdict(Figure(70.0, 1.0), Figure(67.9, 2.0)) == "+2.1 above"
    assert verdict(Figure(70.0, 1.0), Figure(68.0, 2.0)) == "+2.0 alike"
    assert verdict(Figure(67.0, 1.0), Figure(68.5, 0.5)) == "-1.5 below"
    # One seed has no deviation.
    assert verdict(Figure(67.0, float("nan")), Figure(60.0, float("nan"))) == "+7.0 (one seed)"


def test_networks_with_as_much_work_are_compared_with_each_other(tmp_path):
    networks = [
        Network(name, tmp_path, flops)
        for name, flops in (("none", 0.0), ("short", 1e14), ("electra", 4e14), ("mlm", 4.02e14), ("foreign", None))
    ]
    means = {"none": 60.0, "short": 62.0, "electra": 70.0, "mlm": 69.0, "foreign": 50.0}
    figures = {(name, "rte"): Figure(mean, 1.5) for name, mean in means.items()}
    assert comparisons(networks, ["rte"], figures) == [
        "|  | above | RTE |",
        "|---|---:|---|",
        "| short against none | 1 of 1 | +2.0 above |",
        "| electra against none | 1 of 1 | +10.0 above |",
        "| mlm against none | 1 of 1 | +9.0 above |",
        "| foreign against none | 0 of 1 | -10.0 below |",
        "| electra against mlm | 0 of 1 | +1.0 alike |",
    ]
    assert table(networks, ["rte"], figures)[2:4] == ["| none | 0 | 60.0 ± 1.5 |", "| short | 1e+14 | 62.0 ± 1.5 |"]


def test_every_task_has_its_epochs():
    default = worth_parser().get_default("task").split(",")
    assert set(default) == set(worth.EPOCHS)


@pytest.mark.slow
def test_the_command(place):
    """By path, as a user starts it; an error is one line."""
    script = str(ROOT / "benchmarks" / "worth.py")
    ended = subprocess.run([sys.executable, script, *flags(place, BOTH[0])], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "| electra against none | " in ended.stdout
    ended = subprocess.run([sys.executable, script, *flags(place, ("a", "none_there"))], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("error: --networks: no config.json in ")
