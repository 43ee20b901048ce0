"""common/settings.py: settings as flags and as files. References: the values, and a list of all flags."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.settings import absolute, write_settings
from encoders.electra.settings import ElectraSettings
from encoders.glue.settings import GlueSettings
from tests.helpers import ROOT, argument_list, complaint
from trainer.pretrain.data import data_of
from trainer.pretrain.settings import PretrainSettings
from trainer.sft.settings import SftSettings

GLUE = ["--task", "cola", "--data_dir", "glue"]
COMMANDS = {"pretrain": PretrainSettings, "sft": SftSettings, "electra": ElectraSettings, "glue": GlueSettings}
# Every flag that users' scripts may say, and what it is where they do not. None of these may disappear or change.
COMMON = {
    "save_minutes": "auto", "keep_checkpoints": 2, "log_interval": 100, "report": True, "tracker": "none", "use_wandb": False,
    "cache_dir": None, "rows_per_update": 0, "weight_decay": 0.01, "grad_clip": 1.0, "max_bad_updates": 10, "seed": 42,
    "from_resume": False, "device": None, "dtype": "bfloat16", "use_compile": "auto", "gradient_checkpointing": False,
    "dist_timeout": 600, "shard": "none",
}  # fmt: skip
PRETRAINING = {
    **COMMON, "out_dir": str(ROOT / "out"), "data_path": None, "text_field": "text", "skip_bad_lines": False,
    "text_suffixes": None, "learning_rate": 0.0005, "optimizer": "adamw", "embed_lr": 0.0, "val_path": None,
    "val_fraction": 0.0, "allow_val_overlap": False, "eval_interval": 500, "num_workers": 1, "cpu_processes": "auto",
    "deduplicate": "none",
}  # fmt: skip
ENCODERS = {
    "save_steps": 0, "adam_epsilon": 1e-06, "vocab_path": None, "lower_case": True, "max_seq_len": 128, "accumulation_steps": 1,
    "warmup_steps": None, "adam_bias_correction": True, "deterministic": False,
}  # fmt: skip
DEFAULTS = {
    "pretrain": {
        **PRETRAINING, "save_interval": 100, "wandb_project": "MiniMind-Pretrain", "save_weight": "pretrain",
        "sample_prompts": [], "generation": "minimind2", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": None, "use_moe": False, "init_scheme": "default", "from_weight": "none",
        "tokenizer_path": str(ROOT / "model"), "max_seq_len": 512, "pack": True, "long_documents": "split",
        "parse_special_tokens": None, "epochs": 1, "batch_size": 32, "accumulation_steps": 8, "lr_schedule": "minimind",
        "warmup_iters": 0, "muon_lr": 0.02, "deterministic": True, "cuda_graphs": "auto", "ddp": False, "budget": None,
        "budget_tokens": None, "budget_flops": None, "dry_run": False, "max_updates": 0, "decay_share": 0.2, "mixture": None,
        "dropout": 0.0, "sampled_softmax": 0,
    },
    "electra": {
        **PRETRAINING, **ENCODERS, "save_interval": 1000, "wandb_project": "MiniMind-ELECTRA",
        "save_percents": [6.25, 12.5, 25.0, 50.0, 100.0], "size": "small", "hidden_size": None, "num_hidden_layers": None,
        "num_attention_heads": None, "intermediate_size": None, "embedding_size": None, "generator_divisor": None,
        "init_std": 0.02, "position_init": "normal", "dropout": 0.1, "eval_batch_size": 32, "generator_config": None,
        "discriminator_config": None, "example_interval": 0, "mask_share": 0.15, "mask_style": "electra", "max_steps": 1000000,
        "batch_size": None, "lr_schedule": "original_linear", "muon_lr": 0.006, "sampling": "multinomial", "gen_smooth": 0.0,
        "disc_smooth": 0.0,
    },
    "glue": {
        **COMMON, **ENCODERS, "out_dir": str(ROOT / "out/glue"), "save_interval": 500, "wandb_project": "MiniMind-GLUE",
        "overwrite_output_dir": False, "model_path": str(ROOT / "out/electra_small/discriminator"), "from_scratch": False,
        "dropout": None, "overwrite_cache": False, "kind": None, "train_file": None, "dev_file": None, "test_file": None,
        "text": ["text"], "label": "label", "no_cuda": False, "fp16": False, "model_type": None, "fp16_opt_level": None,
        "server_ip": "", "server_port": "", "do_train": True, "epochs": None, "max_steps": -1, "batch_size": 32,
        "learning_rate": 0.0001, "num_seeds": 1, "warmup_share": 0.1, "layer_decay": 0.8, "do_eval": True, "do_predict": False,
        "evaluate_during_training": False, "eval_interval": None, "eval_batch_size": None, "eval_all_checkpoints": False,
        "lr_schedule": "separate_linear", "num_workers": 0,
    },
}  # fmt: skip
DEFAULTS["sft"] = DEFAULTS["pretrain"] | {
    "wandb_project": "MiniMind-Full-SFT", "save_weight": "full_sft", "from_weight": "pretrain", "epochs": 2,
    "batch_size": 16, "accumulation_steps": 1, "learning_rate": 1e-5,
}  # fmt: skip
for of_texts in ("text_field", "text_suffixes", "long_documents", "parse_special_tokens"):
    del DEFAULTS["sft"][of_texts]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_there_and_has_its_default(command, monkeypatch):
    # in a folder without weights, of which train_sft.py would take the newest
    monkeypatch.setattr(Path, "glob", lambda *_: [])
    required = {"task": "cola", "data_dir": "glue"} if command == "glue" else {}
    settings = vars(COMMANDS[command].parse(argument_list(required)))
    assert settings | DEFAULTS[command] | required == settings
    # 0 == False and 1 == True, which a settings file would write differently.
    for name, value in DEFAULTS[command].items():
        assert type(settings[name]) is type(value), name


GIVEN = {
    "pretrain": [
        "--data_path", "a b.jsonl:0.7", "文.jsonl:0.3", "--learning_rate", "3e-4", "--use_moe", "--pack", "0",
        "--sample_prompts", "", "the: cat # sat", "- a dash", "-5", "no", "a\nb\x85\0", "a\x85b", "caf\udce9", "--save_weight", "null", "--num_key_value_heads", "2", "--text_suffixes", ".md",
    ],
    "sft": ["--data_path", "a.jsonl", "--from_weight", "none", "--batch_size", "8", "--sample_prompts", "Why?"],
    "electra": ["--save_percents", "25,50.5", "--max_steps", "7", "--lower_case", "False", "--vocab_path", "yes"],
    "glue": [*GLUE, "--dropout", "0.0", "--epochs", "3", "--do_predict", "--cache_dir", "123"],
}  # fmt: skip


# A list of texts may look like flags.
LIKE_FLAGS = [PretrainSettings(data_path=texts) for texts in (["-foo"], ["->", "b"], ["a", "--epochs=3"], ["--", "a"])]


@pytest.mark.parametrize("settings", [*(COMMANDS[name].parse(GIVEN[name]) for name in COMMANDS), *LIKE_FLAGS])
def test_a_settings_file_gives_the_same_settings(settings, tmp_path):
    write_settings(settings, tmp_path / "run.settings.yaml")
    assert type(settings).parse(["--config", str(tmp_path / "run.settings.yaml")]) == settings


@pytest.mark.parametrize(
    "content, given",
    [
        # YAML alone would make ten, ninety, a date or a number of it.
        *((f"out_dir: {text}\n", ["--out_dir", text]) for text in ("012", "1:30", "2026-11-21", "1e3")),
        ("out_dir: 'no'\n", ["--out_dir", "no"]),
        # What the file does not say is the default.
        ("epochs: null\ndata_path: []\nuse_moe:\n", []),
    ],
)
def test_a_value_is_the_text_that_stands_there(content, given, tmp_path):
    """Reference: the same text as a flag."""
    path = tmp_path / "run.yaml"
    path.write_text(content)
    assert PretrainSettings.parse(["--config", str(path)]) == PretrainSettings.parse(given)


def test_paths_of_a_call_are_those_of_its_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, text in {"few.txt": "a", "base.pth": "", "mix.yaml": "sources: [{path: [a, s3://b], share: 1}]"}.items():
        Path(name).write_text(text)
    paths = {"data_path": ["a/*.jsonl:0.7", "file://b:1", "s3://b/c:1", "/d:2"], "val_path": ["v"], "out_dir": "~/out",
             "cache_dir": "..", "from_weight": "base", "sample_prompts": ["few.txt"]}  # fmt: skip
    settings, _ = PretrainSettings.of_call(paths)
    here = f"{tmp_path}/"
    fixed = {"data_path": [f"{here}a/*.jsonl:0.7", f"{here}b:1", "s3://b/c:1", "/d:2"], "val_path": [f"{here}v"], "out_dir": f"{here}out",
             "cache_dir": f"{here}..", "from_weight": f"{here}base.pth", "sample_prompts": [f"{here}few.txt"]}  # fmt: skip
    assert {name: getattr(settings, name) for name in paths} == fixed
    assert {**settings.values(), **paths, "from_weight": "base.pth", "out_dir": f"{here}out"} == settings.values()
    # what a plan decides later, and a folder whose name looks like a pattern
    assert replace(settings, cache_dir="/c").values()["cache_dir"] == "/c"
    assert (absolute("*.txt", "/[a]"), absolute("b.txt", "/[a]")) == ("/[[]a]/*.txt", "/[a]/b.txt")
    given = {"mixture": "mix.yaml", "sample_prompts": ["few.txt", "the"], "from_weight": "no"}
    mixed, _ = PretrainSettings.of_call(given)
    monkeypatch.chdir("/")
    assert data_of(mixed)[0].paths == [f"{here}a", "s3://b"]
    assert mixed.sample_prompts == ["few.txt", "the"] and mixed.from_weight == "no"


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("batch_size: 8\nlearning_rate: 3e-4\npack: no\ndata_path: [a]\nuse_moe: true\nuse_compile: False\n")
    paths = ["--data_path", "a", "b", "--data_path", "c"]
    settings = PretrainSettings.parse(["--batch_size", "4", "--config", str(path), *paths, "--cuda_graphs", "on"])
    assert (settings.batch_size, settings.learning_rate, settings.pack, settings.use_moe) == (4, 3e-4, False, True)
    assert (settings.use_compile, settings.cuda_graphs) == ("0", "1"), "as sweeps write what may be auto, 0 or 1"
    assert settings.data_path == ["a", "b", "c"], "a flag of several values may come several times"


def test_what_a_command_must_be_told_may_stand_in_the_file(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"task": "cola", "data_dir": "there", "warmup_share": 0.25, "device": null}')
    assert GlueSettings.parse([f"--config={path}"]).data_dir == "there"
    path.write_text('{"epochs": 4}')
    assert GlueSettings.parse([*GLUE, "--config", str(path)]).epochs == 4


def test_a_bad_file_is_one_line(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    for content, said in (
        ("batchsize: 8\n", "run.yaml: unrecognized arguments: --batchsize=8; did you mean --batch_size?"),
        ("batch_size: -8\n", "run.yaml: argument --batch_size: -8 must be a number above 0"),
        *((f"split_text: {word}\n", "lines, blank or a mark") for word in ("line", "Blank", r"\n")),
        ("pack: perhaps\n", "run.yaml: argument --pack: 'perhaps' is not true or false"),
        ("data_path: {a: 1}\n", "run.yaml: data_path: expected a text, a number, true or false, or a list of these"),
        ("tracker: no\n", "run.yaml: argument --tracker: invalid choice: 'no'"),
        ("batch_size: 1:30\n", "run.yaml: argument --batch_size: invalid positive int or auto value: '1:30'"),
        ("config: other.yaml\n", "run.yaml: config: not possible within a settings file"),
        ("!!python/object/apply:os.system ['true']\n", "run.yaml holds no settings"),
        ("budget: 1m\nbudget_flops: 1e15\n", "--budget and --budget_flops exclude each other: drop one"),
        ("dry_run: true\n", "--dry_run prints a budget's plan: add --budget 10m"),
        ("init_scheme: induction\ngeneration: minimind3\n", "induction is for"),
        ("init_scheme: induction\nnum_hidden_layers: 1\n", "induction is for"),
        ("val_path: a\nval_fraction: 0.1\n", "--val_path and --val_fraction exclude each other: drop one"),
        ("x: " + "1" * (1 << 20), "larger than 1,048,576 bytes"),
        ("[" * 1000, "is not YAML"),
    ):
        path.write_text(content, encoding="utf-8")
        assert said in complaint(capsys, PretrainSettings.parse, ["--config", str(path)])


@pytest.mark.parametrize("words", [["--config", "absent.yaml"], ["--config"], ["--config", "."]])
def test_a_file_that_cannot_be_read_is_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "--config" in complaint(capsys, PretrainSettings.parse, words)
