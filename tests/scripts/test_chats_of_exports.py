"""An exported chat model answers in other programs as generate.py does, whatever they say of thoughts; its answers are counted."""

import json

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.decoding import Sampling
from scripts import export_gguf, export_hf
from scripts.common import load
from scripts.generate import generate, turns_encoder
from tests.chats import train, turn
from tests.helpers import ROOT, write_records
from tests.llama_cpp_server import llama_cpp
from tests.scripts.test_evaluate import run
from tests.scripts.test_export import write

PAIRS = [("What is up?", "The sky."), ("What is down?", "The ground."), ("Who are you?", "I am a tiny model.")]
GREEDY = Sampling(max_new_tokens=24, temperature=0.0, top_p=1.0)
# What a reader may say of thoughts: nothing, open them, close them
WORDS = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
CALL = {"name": "look", "arguments": '{"at": "sky"}'}
CHAT = [
    turn("system", "Be <brief> & kind."),
    turn("user", [{"type": "text", "text": "What's"}, {"type": "text", "text": " up?"}]),
    turn("assistant", None, reasoning_content="Hm.", tool_calls=[CALL, {"type": "function", "function": CALL}]),
    turn("tool", "3 < 4"),
    turn("assistant", "天。", tool_calls=[]),
    turn("user", "<|im_end|>"),
]


def learned(folder, thoughts=""):
    """A weight that has learned the answers of PAIRS by heart."""
    chats = folder / "chats.jsonl"
    answers = [(turn("user", asked), turn("assistant", said, reasoning_content=thoughts)) for asked, said in PAIRS]
    write_records(chats, [{"messages": turns} for turns in answers])
    train(
        data_path=chats, out_dir=folder, hidden_size=32, learning_rate=1e-2, epochs=80, batch_size=2,
        accumulation_steps=1, lr_schedule="linear",
    )  # fmt: skip
    return folder / "full_sft_32.pth"


@pytest.fixture(scope="module")
def weight(tmp_path_factory):
    return learned(tmp_path_factory.mktemp("plain"))


def answer_of_generate(weight, asked):
    model, tokenizer, _ = load(str(weight), device="cpu")
    ids = turns_encoder(tokenizer)([turn("user", asked)])
    return tokenizer.decode(generate(model, tokenizer, [ids], GREEDY)[0], skip_special_tokens=True)


@torch.no_grad()
def answer_of_transformers(folder, asked, words):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).float()
    words = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", **words}
    prompt = tokenizer.apply_chat_template([turn("user", asked)], **words)
    found = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(found, skip_special_tokens=True)


def test_transformers_answer_as_generate_does(tmp_path, weight):
    export_hf.export(weight, tmp_path / "hf")
    for asked, said in PAIRS:
        assert answer_of_generate(weight, asked) == said
        # The export is asked as its source is.
        assert answer_of_generate(tmp_path / "hf", asked) == said
        for words in WORDS:
            assert answer_of_transformers(tmp_path / "hf", asked, words) == said, words


def jinja(template, **words):
    environment = ImmutableSandboxedEnvironment()
    environment.globals["raise_exception"] = None
    return environment.from_string(template).render(words)


def minijinja(template, **words):
    return pytest.importorskip("minijinja").Environment().render_str(template, **words)


@pytest.mark.parametrize("engine", [jinja, minijinja])
@pytest.mark.parametrize("words", WORDS)
def test_the_template_of_an_export_writes_the_same_in_other_engines(tmp_path, engine, words):
    """Reference: transformers. llama.cpp is compared in test_export_gguf.py."""
    export_hf.export(write(tmp_path), tmp_path / "hf")
    for folder in (ROOT / "model", tmp_path / "hf"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        said = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **words)
        assert said.count("<tool_call>") == 2 and "Be <brief> & kind." in said
        template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
        assert engine(template, messages=CHAT, add_generation_prompt=True, **words) == said


def test_answers_are_counted(tmp_path, weight, capsys):
    result, values = run("answers", weight, str(weight.with_name("chats.jsonl")), tmp_path / "r")
    assert (result["counts"], values) == ({"questions": 3}, {"accuracy": 1.0})
    assert "3 of 3 questions answered with the right first sentence" in capsys.readouterr().out
    asked = [{"messages": [turn("user", "What is up?"), turn("assistant", "The sky. It is blue.")]}]
    asked.append({"messages": [turn("user", "What is down?"), turn("assistant", "The sky.")]})
    _, values = run("answers", weight, write_records(tmp_path / "asked.jsonl", asked), tmp_path / "r")
    assert values == {"accuracy": 0.5} and "! The ground.\n  right: The sky." in capsys.readouterr().out


@pytest.mark.slow
def test_thoughts_are_opened_where_some_were_trained(tmp_path):
    weight = learned(tmp_path, thoughts="Hm.")
    assert answer_of_generate(weight, "Who are you?") == "\nHm.\n\n\nI am a tiny model."
    export_hf.export(weight, tmp_path / "hf")
    export_hf.convert_to_pth(tmp_path / "hf", tmp_path / "back_32.pth")
    export_hf.export(tmp_path / "back_32.pth", tmp_path / "again")
    for folder in (tmp_path / "hf", tmp_path / "again"):
        said = answer_of_transformers(folder, "Who are you?", {"enable_thinking": True})
        assert said == "Hm.\n\n\nI am a tiny model."


@pytest.mark.slow
def test_llama_cpp_answers_as_generate_does(tmp_path, weight):
    """Asked as its users ask its server, which renders the template that the file holds."""
    export_gguf.export(weight, tmp_path / "model.gguf", dtype="float32")
    with llama_cpp(tmp_path / "model.gguf") as ask:
        for asked, said in PAIRS:
            for words in WORDS:
                request = {"messages": [turn("user", asked)], "chat_template_kwargs": words}
                answer = ask("/v1/chat/completions", **request, max_tokens=24, temperature=0)
                assert answer["choices"][0]["message"] == {"role": "assistant", "content": said}, words
