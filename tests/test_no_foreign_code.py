"""A folder of a stranger: none of its code runs, whatever the standard input says, and no chat template is without bounds."""

import io
import json
import sys

import pytest

from common.errors import UserError
from dataset.tokenizing.encoder import load_tokenizer
from scripts import chat_template, evaluate, generate
from tests.encoders.electra.test_command import flags as electra_flags
from tests.encoders.electra.test_examples import write_lines
from tests.encoders.glue.glue_helpers import arguments as glue_arguments
from tests.encoders.glue.glue_helpers import make_place
from tests.helpers import ROOT, complaint, copy_tokenizer, write_corpus, write_weights
from trainer import train_electra, train_glue
from trainer.machine.command_line import run_cli

CODE = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
pathlib.Path({marker!r}).touch()
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
class Config(PreTrainedConfig):
    model_type = "stranger"
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
BOMBS = {
    "memory": "{{ 'a' * 2**33 }}",
    "output": "{% for i in range(90000) %}{{ 'a' * 100 }}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}
FOREIGN = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}|{{ m['content'] | trim }}]{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant|{% endif %}{{ strftime_now('%Y')[:0] }}{{ messages | tojson }}"
)


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A folder whose tokenizer and model want code of their own; where that code leaves its mark; a stdin that says yes."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "code.py").write_text(CODE.format(marker=str(tmp_path / "the code ran")))
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer.json").write_bytes((ROOT / "model" / "tokenizer.json").read_bytes())
    kinds = ("CausalLM", "SequenceClassification", "PreTraining")
    auto_map = {"AutoConfig": "code.Config", **{f"AutoModelFor{kind}": "code.Model" for kind in kinds}}
    (folder / "config.json").write_text(json.dumps({"model_type": "stranger", "auto_map": auto_map}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\ny\nyes\n" * 20))
    return folder


def commands(folder, here):
    """{what reads the folder: (its main, its flags)}"""
    weight, text = write_weights(here / "pretrain_32", vocab_size=6400), str(write_corpus(here / "data.jsonl"))
    electra = {"data_path": write_lines(here / "lines.jsonl")[0], "out_dir": here / "out", "vocab_path": folder}
    own = ["--weight", weight, "--tokenizer_path", str(folder), "--device", "cpu"]
    return {
        "fine-tuning": (train_glue.main, glue_arguments(make_place(here / "place"), here / "out", model_path=folder)),
        "electra": (train_electra.main, electra_flags(**electra)),
        "generating": (generate.main, ["--weight", str(folder), "--device", "cpu"]),
        "evaluating": (evaluate.main, ["perplexity", "--data_path", text, *own]),
    }


@pytest.mark.parametrize("command", ["fine-tuning", "electra", "generating", "evaluating"])
def test_the_code_of_a_folder_never_runs(command, stranger, tmp_path, capsys):
    """The standard input would say yes to the question of transformers: nobody reads it, and one line says what is wrong."""
    main, arguments = commands(stranger, tmp_path)[command]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_cli(lambda: main(arguments))
    errors = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert sys.stdin.tell() == 0
    assert not (tmp_path / "the code ran").exists()
    (line,) = [line for line in errors if line.startswith("error: ")]
    refusal = "Python code from its folder, which is never run"
    assert (refusal if command != "generating" else "model_type 'stranger': MiniMind has no such form") in line
    assert not any("Traceback" in line for line in errors)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_chat_template_that_asks_for_too_much_is_one_line(bomb, tmp_path, capsys):
    """Reference: the peak memory of the processes that this one has started."""
    weight = write_weights(tmp_path / "pretrain_32", vocab_size=6400)
    folder = copy_tokenizer(tmp_path / "chat", chat_template=BOMBS[bomb])
    arguments = ["--weight", weight, "--tokenizer_path", str(folder), "--device", "cpu", "--chat", "hi"]
    before = peak_memory("RUSAGE_CHILDREN")
    assert complaint(capsys, generate.main, arguments).startswith(f"error: {folder}: the chat template")
    # Linux counts the memory that a child shares with this process between its fork and its exec as the child's.
    assert peak_memory("RUSAGE_CHILDREN") <= max(before, peak_memory("RUSAGE_SELF"), 1.3 * chat_template.MEMORY)


def peak_memory(of):
    """Bytes; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    import resource

    return 1024 * resource.getrusage(getattr(resource, of)).ru_maxrss


def test_a_chat_template_without_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 2)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = load_tokenizer(copy_tokenizer(tmp_path / "chat", chat_template=loops))
    with pytest.raises(UserError, match="has not ended after 2 seconds"):
        chat_template.chat_text(tokenizer, [{"role": "user", "content": "hi"}])


def test_a_chat_template_of_another_tokenizer_gives_what_transformers_makes_of_it(tmp_path):
    """Reference: apply_chat_template in this process. Our own template: tests/dataset/chat/test_encoder.py."""
    messages = [{"role": "user", "content": " 你好 <|im_end|> "}, {"role": "assistant", "content": 'it\'s "me"\n'}]
    tokenizer = load_tokenizer(copy_tokenizer(tmp_path / "chat", chat_template=FOREIGN))
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert generate.chat_ids(generate.turns_encoder(tokenizer), messages, 10_000) == ids
