"""The recipes of CONTRIBUTING.md, applied to a copy of the repository and run there. Reference: what the files say afterwards."""

import json
import math
import re
import shutil

import pytest
import torch

from tests.chats import turn, write_chats
from tests.helpers import ROOT, change_json, command_line, flags, records, write_corpus, write_records

FOLDERS = ("common", "model", "dataset", "trainer", "encoders", "scripts", "benchmarks")


def recipe(name: str) -> list[tuple[str, str, str]]:
    """(file, where in it, code) of each block under a heading of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = re.split(r"^##", text.split(f"### {name}\n")[1], flags=re.MULTILINE)[0]
    blocks = re.findall(r"```python\n# (\S+), ([^\n]+)\n(.*?)```", section, re.DOTALL)
    assert 1 <= len({file for file, _, _ in blocks}) <= 3, "a recipe touches three files at most"
    return blocks


@pytest.fixture
def copy(tmp_path):
    place = tmp_path / "copy"
    for folder in FOLDERS:
        left_out = shutil.ignore_patterns("__pycache__", ".token_store", "*.jsonl")
        shutil.copytree(ROOT / folder, place / folder, ignore=left_out)
    return place


def apply(name, place):
    for file, where, code in recipe(name):
        path = place / file
        if where == "a new file":
            path.write_text(code, encoding="utf-8")
            continue
        text = path.read_text(encoding="utf-8")
        if where == "at the end":
            path.write_text(f"{text}\n\n{code}", encoding="utf-8")
            continue
        before = where.removeprefix("in place of ")
        assert text.count(f"\n{before}\n") == 1, f"{file} has no line {before}: change this block of CONTRIBUTING.md"
        path.write_text(text.replace(f"\n{before}\n", f"\n{code}"), encoding="utf-8")


def run(place, *words):
    ended = command_line(words[1:], cwd=place, script=words[0])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


# One command after the other in one process: a start takes longer than what is trained here.
COMMANDS = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    sys.path.insert(0, sys.argv[0].partition("/")[0])
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""


def run_all(place, *commands):
    return run(place, "-c", COMMANDS, json.dumps(commands, default=str))


@pytest.mark.slow
def test_the_recipes_pass_make_lint(copy):
    """All at once. mypy looks at what they touch, and knows the libraries from an earlier `make lint`, if there was one."""
    shutil.copy(ROOT / "pyproject.toml", copy)
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", copy / ".mypy_cache")
    for name in re.findall(r"^### (.+)$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE):
        apply(name, copy)
    run(copy, "-m", "ruff", "check", *FOLDERS)
    run(copy, "-m", "ruff", "format", "--check", *FOLDERS)
    files = "trainer/train_bytes.py trainer/train_dpo.py scripts/evaluate.py model/model_minimind.py"
    run(copy, "-m", "mypy", *files.split())


@pytest.mark.slow
def test_a_schedule_an_optimiser_and_an_input_format(copy, tmp_path):
    """All three at once, then a resume, which looks at what the optimiser keeps."""
    for name in ("A learning-rate schedule", "An optimiser", "An input format"):
        apply(name, copy)
    (tmp_path / "data.ini").write_text("".join(f"[{i}]\ntext = the cat {i} sat on a mat\n" for i in range(40)))
    options = {"data_path": tmp_path / "data.ini", "out_dir": tmp_path / "out"}
    options |= {"lr_schedule": "half", "optimizer": "sgd"}
    first = ["trainer/train_pretrain.py", *flags(**options, pack=0)]
    printed = run_all(copy, first, [*first, "--epochs", "2", "--from_resume", "1"])
    assert "data: 40 documents" in printed and "resumed from" in printed
    first, *others = [line["lr"] for line in records(tmp_path / "out" / "pretrain_16.metrics.jsonl")]
    assert (first, others[-1], {*others}) == (5e-4, 2.5e-4, {5e-4, 2.5e-4})


@pytest.mark.slow
def test_a_field_of_the_model(copy, tmp_path):
    """It has its generation's default, is written beside the weights, read from there, and is part of the architecture."""
    apply("A field of the model's config", copy)
    data = write_corpus(tmp_path / "data.jsonl", 20)
    options = {"data_path": data, "out_dir": tmp_path / "out", "generation": "minimind3", "num_key_value_heads": 2}
    run(copy, "trainer/train_pretrain.py", *flags(**options))
    config_file = tmp_path / "out" / "pretrain_16.json"
    assert json.loads(config_file.read_text())["embedding_scale"] == 2.0
    change_json(config_file, embedding_scale=3.0)
    look = """if True:
        import sys
        from model.config import ARCHITECTURE
        from model.model_minimind import MiniMindForCausalLM
        config = MiniMindForCausalLM.from_pth(sys.argv[1]).config
        print(config.embedding_scale, "embedding_scale" in ARCHITECTURE)
    """
    assert run(copy, "-c", look, config_file.with_suffix(".pth")) == "3.0 True\n"


WINDOW_CHECKS = """if True:
    import functools
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, create_mask
    from transformers import AutoModelForCausalLM
    from transformers.masking_utils import sliding_window_causal_mask_function
    from model.hf_format import hf_config, to_hf
    from model.masks import block_mask, dense_mask, first_keys
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

    config = MiniMindConfig(generation="minimind3", sliding_window=150)
    first, theirs = first_keys(config, torch.arange(700)).expand(2, 700), sliding_window_causal_mask_function(150)
    assert torch.equal(dense_mask(first), create_mask(theirs, 2, None, 700, 700, device="cpu"))
    ours, reference = vars(block_mask(first)), vars(create_block_mask(theirs, 2, None, 700, 700, device="cpu"))
    assert all(torch.equal(ours[name], value) for name, value in reference.items() if torch.is_tensor(value))

    sizes = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = MiniMindConfig(generation="minimind3", sliding_window=5, **sizes)
    torch.manual_seed(0)
    model = MiniMindForCausalLM(config)
    ids = torch.randint(3, 61, (2, 24))
    rows = ids, ids, (torch.arange(24) > 9).long().expand(2, 24), torch.arange(24).expand(2, 24)
    plain, _ = model.training_losses(*rows)
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    model.compile_training((2, 24))
    torch.testing.assert_close(model.training_losses(*rows)[0], plain)

    model.eval()
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, disable_compile=True)
    whole = model.generate(ids, use_cache=False, **options)
    for cache in ("dynamic", "static"):
        assert torch.equal(model.generate(ids, cache_implementation=cache, **options), whole)
    theirs = AutoModelForCausalLM.from_config(hf_config(config)).eval()
    theirs.load_state_dict(to_hf(model.state_dict(), config), strict=False)
    torch.testing.assert_close(theirs(ids).logits, model(ids).logits)
"""


@pytest.mark.slow
def test_sliding_window_attention(copy):
    """Compiled and plain agree, cached and whole, and Hugging Face's masks and its Qwen3 with the same window."""
    apply("Sliding-window attention", copy)
    run(copy, "-c", WINDOW_CHECKS)


@pytest.mark.slow
def test_an_evaluation_task(copy, tmp_path):
    apply("An evaluation task", copy)
    data = write_corpus(tmp_path / "data.jsonl", 20)
    train = ["trainer/train_pretrain.py", *flags(data_path=data, out_dir=tmp_path / "out")]
    weight = tmp_path / "out" / "pretrain_16.pth"
    run_all(copy, train, ["scripts/evaluate.py", "short", "--weight", weight, "--data_path", data, "--device", "cpu"])
    (figures,) = (tmp_path / "out").glob("pretrain_16.short.*.json")
    assert json.loads(figures.read_text())["task"] == "short"


@pytest.mark.slow
def test_a_job_trains_resumes_and_reports(copy, tmp_path):
    """Reference: a run that is not stopped in between; the weights are bitwise the same."""
    apply("A job", copy)
    given = "--device cpu --batch_size 4 --accumulation_steps 2 --log_interval 1 --dtype float32 --learning_rate 0.1"
    commands = []
    for folder, epochs in ("a", "4"), ("b", "2"), ("b", "4"):
        words = [*given.split(), "--epochs", epochs, "--from_resume", "1", "--out_dir", tmp_path / folder]
        commands.append(["trainer/train_bytes.py", *words])
    assert "report: " in run_all(copy, *commands)
    lines = records(tmp_path / "a" / "bytes.metrics.jsonl")
    assert lines[-1]["loss"] < 0.6 * lines[0]["loss"]
    first, second = (torch.load(tmp_path / name / "bytes.pth", weights_only=True)["weight"] for name in "ab")
    assert torch.equal(first, second)
    assert (tmp_path / "a" / "bytes.report.html").is_file()
    assert (tmp_path / "a" / "bytes.settings.yaml").is_file()


@pytest.mark.slow
def test_adapters_and_a_preference_job(copy, tmp_path):
    """References: which matrices stay, log 2 (the loss of a model that is its own reference), a run that is not stopped."""
    pytest.importorskip("peft")

    def weights(path):
        return torch.load(path, weights_only=True)

    for name in ("Low-rank adapters", "A preference job"):
        apply(name, copy)
    pairs = []
    for i in range(10):
        chosen, rejected = ([turn("user", f"{i} and one?"), turn("assistant", text)] for text in (f"{i + 1}.", "No!"))
        pairs.append({"chosen": chosen, "rejected": rejected})
    write_records(tmp_path / "pairs.jsonl", pairs)
    given = ["--device", "cpu", "--dtype", "float32", "--max_seq_len", "64", "--log_interval", "1", "--report", "0"]
    shape = ["--hidden_size", "64", "--num_hidden_layers", "2", "--use_compile", "0", "--cpu_processes", "1"]
    words = ["--data_path", write_corpus(tmp_path / "text.jsonl"), "--max_updates", "1", "--out_dir", tmp_path]
    commands = [["trainer/train_pretrain.py", *given, *shape, *words]]
    words = ["--data_path", write_chats(tmp_path / "chats.jsonl", 10), "--epochs", "8", "--out_dir", tmp_path]
    weight = ["--learning_rate", "1e-2", "--from_weight", tmp_path / "pretrain_64.pth"]
    commands.append(["trainer/train_lora.py", *given, *shape, *words, *weight])
    dpo = ["trainer/train_dpo.py", *given, "--data_path", tmp_path / "pairs.jsonl", "--learning_rate", "1e-3"]
    for folder, epochs in ("whole", "4"), ("stopped", "2"), ("stopped", "4"):
        length = ["--epochs", epochs, "--from_resume", "1", "--out_dir", tmp_path / folder]
        commands.append([*dpo, "--from_weight", tmp_path / "lora_64.pth", *length])
    run_all(copy, *commands)
    lines = records(tmp_path / "lora_64.metrics.jsonl")
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    before, after = weights(tmp_path / "pretrain_64.pth"), weights(tmp_path / "lora_64.pth")
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}
    # The reference of a resume is that of its run.
    length = ["--epochs", "6", "--from_resume", "1", "--out_dir", tmp_path / "whole"]
    with pytest.raises(AssertionError, match="weights of the start"):
        run(copy, *dpo, "--from_weight", tmp_path / "pretrain_64.pth", *length)
    lines = records(tmp_path / "whole" / "dpo_64.metrics.jsonl")
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert lines[-1]["loss"] < 0.3 and lines[-1]["accuracy"] == 1
    whole, resumed = (weights(tmp_path / folder / "dpo_64.pth") for folder in ("whole", "stopped"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
