"""common/settings.py: settings as flags and as files. References: the values themselves, and a list of the flags there are."""

import dataclasses

import pytest
import yaml

from common.settings import default_of, write_settings
from trainer.electra import settings as electra
from trainer.glue import settings as glue
from trainer.pretrain import settings as pretrain

GLUE = ["--task", "cola", "--data_dir", "glue"]
COMMANDS = {"pretrain": (pretrain, []), "electra": (electra, []), "glue": (glue, GLUE)}
# What users' scripts say; none of these may disappear or change its meaning.
FLAGS = {
    "pretrain": {
        "out_dir", "save_interval", "keep_checkpoints", "log_interval", "report", "tracker", "use_wandb", "wandb_project",
        "save_weight", "sample_prompts", "generation", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "use_moe", "init_scheme", "from_weight", "tokenizer_path", "data_path", "text_field",
        "skip_bad_lines", "text_suffixes", "cache_dir", "max_seq_len", "pack", "long_documents", "parse_special_tokens",
        "epochs", "batch_size", "accumulation_steps", "learning_rate", "weight_decay", "grad_clip", "max_bad_updates", "seed",
        "from_resume", "lr_schedule", "warmup_iters", "optimizer", "muon_lr", "val_path", "val_fraction",
        "allow_val_overlap", "eval_interval", "device", "dtype", "use_compile", "num_workers", "gradient_checkpointing",
        "dist_timeout", "ddp", "local_rank",
    },
    "electra": {
        "out_dir", "save_interval", "keep_checkpoints", "log_interval", "report", "tracker", "use_wandb", "wandb_project",
        "save_percents", "size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
        "embedding_size", "generator_divisor", "model_path", "init_std", "position_init", "dropout", "data_path", "text_field",
        "skip_bad_lines", "text_suffixes", "cache_dir", "vocab_path", "lower_case", "max_seq_len", "mask_share", "mask_style",
        "max_steps", "batch_size", "accumulation_steps", "learning_rate", "weight_decay", "grad_clip", "max_bad_updates",
        "seed", "from_resume", "lr_schedule", "warmup_steps", "optimizer", "muon_lr", "adam_bias_correction", "sampling",
        "gen_smooth", "disc_smooth", "device", "dtype", "use_compile", "num_workers", "gradient_checkpointing",
        "dist_timeout",
    },
    "glue": {
        "out_dir", "save_interval", "keep_checkpoints", "log_interval", "report", "tracker", "use_wandb", "wandb_project",
        "save_steps", "overwrite_output_dir", "model_path", "from_scratch", "dropout", "task", "data_dir", "max_seq_len",
        "cache_dir", "overwrite_cache", "do_train", "epochs", "max_steps", "batch_size", "accumulation_steps",
        "learning_rate", "weight_decay", "grad_clip", "max_bad_updates", "seed", "from_resume", "num_seeds", "warmup_share",
        "layer_decay", "do_eval", "do_predict", "evaluate_during_training", "eval_interval", "eval_all_checkpoints",
        "device", "dtype", "use_compile", "num_workers", "gradient_checkpointing", "dist_timeout",
    },
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_there(command):
    module, given = COMMANDS[command]
    assert vars(module.parse_args(given)).keys() == FLAGS[command]


def test_defaults_that_people_rely_on():
    settings = pretrain.parse_args([])
    assert (settings.batch_size, settings.accumulation_steps, settings.learning_rate) == (32, 8, 5e-4)
    assert (settings.save_interval, settings.num_workers, settings.wandb_project) == (100, 1, "MiniMind-Pretrain")
    fine_tuning = glue.parse_args(GLUE)
    assert (fine_tuning.batch_size, fine_tuning.accumulation_steps, fine_tuning.learning_rate) == (32, 1, 1e-4)
    assert (fine_tuning.save_interval, fine_tuning.num_workers, fine_tuning.wandb_project) == (500, 0, "MiniMind-GLUE")
    networks = electra.parse_args([])
    assert (networks.batch_size, networks.accumulation_steps, networks.learning_rate) == (None, 1, 5e-4)
    assert networks.save_percents == [6.25, 12.5, 25.0, 50.0, 100.0]


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_are_those_of_the_fields(command):
    module, given = COMMANDS[command]
    settings = module.parse_args(given)
    filled = {"max_steps", "max_seq_len", "learning_rate", "mask_share"} if command == "electra" else set()
    for field in dataclasses.fields(settings):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            continue
        if field.name not in filled:
            assert getattr(settings, field.name) == default_of(type(settings), field.name), field.name


def test_lists_are_not_shared_by_two_settings():
    first, second = electra.parse_args([]), electra.parse_args([])
    first.save_percents.append(1.0)
    assert 1.0 not in second.save_percents
    assert 1.0 not in electra.parse_args([]).save_percents


GIVEN = {
    "pretrain": [
        "--data_path", "a b.jsonl:0.7", "文.jsonl:0.3", "--learning_rate", "3e-4", "--use_moe", "--pack", "0",
        "--sample_prompts", "", "the: cat # sat", "--save_weight", "null", "--num_key_value_heads", "2", "--text_suffixes", ".md",
    ],
    "electra": ["--save_percents", "25,50.5", "--max_steps", "7", "--lower_case", "False", "--vocab_path", "yes"],
    "glue": [*GLUE, "--dropout", "0.0", "--epochs", "3", "--do_predict", "--cache_dir", "123"],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_settings_file_gives_the_same_settings(command, tmp_path):
    module, _ = COMMANDS[command]
    settings = module.parse_args(GIVEN[command])
    write_settings(settings, tmp_path / "run.settings.yaml")
    assert module.parse_args(["--config", str(tmp_path / "run.settings.yaml")]) == settings


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("batch_size: 8\nlearning_rate: 3e-4\npack: no\ndata_path: [a.jsonl, b.jsonl]\nuse_moe: true\n")
    settings = pretrain.parse_args(["--batch_size", "4", "--config", str(path), "--data_path", "c.jsonl"])
    assert (settings.batch_size, settings.learning_rate, settings.pack, settings.use_moe) == (4, 3e-4, False, True)
    assert settings.data_path == ["c.jsonl"]


def test_a_json_file_is_read_too(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"batch_size": 8, "sample_prompts": ["a", "b"], "device": null}')
    settings = pretrain.parse_args([f"--config={path}"])
    assert (settings.batch_size, settings.sample_prompts, settings.device) == (8, ["a", "b"], None)


def test_what_a_command_must_be_told_may_stand_in_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("task: cola\ndata_dir: there\n")
    assert glue.parse_args(["--config", str(path)]).data_dir == "there"


@pytest.mark.parametrize(
    "content, said",
    [
        ("batchsize: 8\n", "run.yaml: batchsize is no setting of this command; did you mean batch_size?"),
        ("batch_size: -8\n", "run.yaml: argument --batch_size: -8 must be a number above 0"),
        ("batch_size: many\n", "run.yaml: argument --batch_size: invalid"),
        ("batch_size: [8, 9]\n", "run.yaml: argument --batch_size: invalid"),
        ("pack: perhaps\n", "run.yaml: argument --pack: 'perhaps' is not true or false"),
        ("optimizer: sgd\n", "run.yaml: argument --optimizer: invalid choice: 'sgd'"),
        ("data_path: {a: 1}\n", "run.yaml: data_path is a dict"),
        ("data_path: [--epochs]\n", "run.yaml: data_path: '--epochs' begins with a dash"),
        ("config: other.yaml\n", "run.yaml: config is no setting of this command"),
        ("help: true\n", "run.yaml: help is no setting of this command"),
        ("- batch_size\n", "run.yaml holds no settings"),
        ("", "run.yaml holds no settings"),
        ("batch_size: [\n", "run.yaml:2 is no YAML"),
        ("a: &a [1, 1]\nb: [*a, *a]\n", "run.yaml:2 is no YAML (an alias)"),
        ("!!python/object/apply:os.system ['true']\n", "is no YAML (could not determine a constructor"),
        ("\x00", "is no YAML"),
        ("val_path: a\nval_fraction: 0.1\n", "--val_path and --val_fraction exclude each other: drop one"),
        ("seed: ''\n", "argument --seed: invalid"),
        ("out_dir: ''\n", "argument --out_dir/--save_dir: an empty text"),
        ("x: " + "1" * (1 << 20), "has more than 1,048,576 bytes"),
        ("[" * 5000, "is no YAML"),
    ],
)
def test_a_bad_file_is_one_line(content, said, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        pretrain.parse_args(["--config", str(path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.parametrize("words", [["--config", "absent.yaml"], ["--config", ""], ["--config"], ["--config", "."]])
def test_a_file_that_cannot_be_read_is_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        pretrain.parse_args(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert "--config" in line


def test_a_file_that_is_not_utf8_is_one_line(tmp_path, capsys):
    (tmp_path / "run.yaml").write_bytes(b"out_dir: \xff\n")
    with pytest.raises(SystemExit):
        pretrain.parse_args(["--config", str(tmp_path / "run.yaml")])
    assert "is no YAML" in capsys.readouterr().err


def test_settings_are_plain_yaml(tmp_path):
    """Reference: PyYAML's safe loader."""
    settings = pretrain.parse_args(GIVEN["pretrain"])
    write_settings(settings, tmp_path / "a.yaml")
    found = yaml.safe_load((tmp_path / "a.yaml").read_text(encoding="utf-8"))
    assert found == {name: value for name, value in vars(settings).items() if value is not None}


def test_help_shows_ten_flags_first(capsys):
    for module, _ in COMMANDS.values():
        with pytest.raises(SystemExit):
            module.parse_args(["--help"])
        text = capsys.readouterr().out
        first = text[text.index("the 10 flags that matter first:") : text.index("\noutput:")]
        assert first.count("\n  --") == 10
        assert text.count("--batch_size ") == 1
