"""play.py --api, asked by OpenAI's own client. Reference: generate.py's text with the same seed."""

import re
from itertools import count
from unittest import mock

import pytest
import torch

from model.decoding import Sampling
from scripts import play
from tests.chats import turn
from tests.scripts.test_play import streamed

openai = pytest.importorskip("openai")
TURNS = [turn("system", "Be brief."), turn("user", [{"type": "text", "text": "Hi"}])]
PROMPTS = {True: {"messages": TURNS}, False: {"prompt": "a"}}
ROUTES = pytest.mark.parametrize("is_chat", [True, False])


@pytest.fixture
def ask(server):
    """ask(is_chat, **fields) -> what the client makes of the answer."""
    client = openai.OpenAI(base_url=f"{server.address}v1", api_key="any", max_retries=0)
    given = {"model": client.models.list().data[0].id, "max_tokens": 20, "temperature": 0.9, "top_p": 0.8, "seed": 7}
    chats, texts = client.chat.completions, client.completions
    return lambda is_chat, **fields: (chats if is_chat else texts).create(**{**given, **PROMPTS[is_chat], **fields})


def written(server, is_chat, **sampling):
    """(ids of the prompt, generate.py's stream)"""
    turns = [TURNS[0], turn("user", "Hi")]
    ids = server.model.chat(turns) if is_chat else server.model.encoder.prompt_ids("a")
    torch.manual_seed(7)
    return ids, streamed(server.model, ids, Sampling(20, 0.9, 0.8, **sampling))[0]


def text_of(event):
    """The text of an event or of a whole answer."""
    choice = event.choices[0]
    part = getattr(choice, "delta", None) or getattr(choice, "message", None)
    return part.content if part else choice.text


@ROUTES
def test_an_answer_is_the_text_of_generate(server, ask, is_chat):
    ids, stream = written(server, is_chat)
    whole = ask(is_chat)
    assert text_of(whole) == stream.text and whole.model == server.model.name
    assert whole.choices[0].finish_reason == "length"
    *events, used = ask(is_chat, stream=True, stream_options={"include_usage": True})
    assert len(events) > 5 and "".join(map(text_of, events)) == stream.text
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    for usage in (whole.usage, used.usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), stream.count)
    if is_chat:
        assert [event.choices[0].delta.role for event in events] == ["assistant"] + [None] * (len(events) - 1)
    # Without a seed each answer is another one.
    assert text_of(ask(is_chat, seed=None)) != text_of(ask(is_chat, seed=None))


@ROUTES
def test_a_text_ends_before_its_first_stop_text(server, ask, is_chat):
    """None of it is sent, even if it comes in several tokens; what only begins one is."""
    text = written(server, is_chat)[1].text
    cut = len(text) // 2
    for stop, expected in ((["~", text[cut : cut + 4]], "stop"), (text[-2:] + "~", "length")):
        end = text.index(stop[1]) if expected == "stop" else None
        whole, events = ask(is_chat, stop=stop), list(ask(is_chat, stop=stop, stream=True))
        assert text_of(whole) == "".join(map(text_of, events)) == text[:end]
        assert whole.choices[0].finish_reason == events[-1].choices[0].finish_reason == expected


def test_an_error_names_the_field_as_it_was_sent(ask):
    wrong = {"temperature": [-3, "hot"], "top_p": [0], "seed": [-1], "stop": [[""], 5], "n": [2], "tools": [[{}]]}
    wrong |= {"messages": [[], TURNS[:1], [turn("tool", "x")], "text", [turn("user", 5)]], "max_tokens": [0]}
    wrong |= {"max_completion_tokens": ["x"], "min_p": [0.1], "mirostat": [2], "max_new_tokens": [5]}
    wrong |= {"top_k": [1.5], "repetition_penalty": [0], "add_special_tokens": [False], "tool_choice": ["required"]}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(openai.BadRequestError) as raised:
            ask(True, extra_body={name: value})
        said = raised.value.body
        assert said["type"] == "invalid_request_error" and said["message"].startswith(name), (name, value, said)
        assert not re.search("object|literal|indices", said["message"]), said


def test_a_text_has_the_sampling_of_generate(server, ask):
    """With what clients send beside it, LangChain a list of one text."""
    ids, stream = written(server, False, top_k=5, repetition_penalty=1.5)
    nothing = {"min_p": 0, "n": 1, "logprobs": False, "best_of": 1, "presence_penalty": 0.0, "user": "me"}
    fields = {"top_k": 5, "repetition_penalty": 1.5, "tool_choice": "auto", **nothing}
    assert text_of(ask(False, prompt=["a"], extra_body=fields)) == stream.text != written(server, False)[1].text
    developers = [{**TURNS[0], "role": "developer"}, TURNS[1]]
    assert text_of(ask(True, messages=developers)) == text_of(ask(True))


def test_without_a_limit_a_text_fills_the_context(server, ask):
    prompt = len(written(server, False)[0])
    for asked, room in ((-1, 30), (None, 30), (-1, 5000)):
        with mock.patch.object(server.model.model.config, "max_position_embeddings", prompt + room):
            used = ask(False, max_tokens=asked).usage
        assert used.completion_tokens == min(room, play.MAX_NEW_TOKENS)


def test_a_model_by_name(server):
    models = openai.OpenAI(base_url=f"{server.address}v1", api_key="any", max_retries=0).models
    with mock.patch.object(server.model, "name", "out/a b.pth"):
        assert models.retrieve("out/a b.pth").id == "out/a b.pth"
        with pytest.raises(openai.NotFoundError, match="no such model"):
            models.retrieve("gpt")


def test_a_prompt_that_does_not_fit_and_a_model_without_chats(server, ask):
    for stream in (False, True):
        for prompt, message in (("a b " * 40_000, "too long.*.max_tokens"), ("x" * 2_100_000, "allows no cut")):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(False, prompt=prompt, stream=stream)
    with mock.patch.object(server.model, "chat", None), pytest.raises(openai.BadRequestError, match="no chat template"):
        ask(True)


def test_a_model_that_fails_ends_the_answer_with_an_error(ask, capsys):
    receive, calls = play.PieceStream.receive, count()

    def failing(*arguments):
        assert next(calls) % 6 != 5, "a bug"
        receive(*arguments)

    with mock.patch.object(play.PieceStream, "receive", failing):
        with pytest.raises(openai.InternalServerError, match="the model has failed"):
            ask(False)
        events = ask(False, stream=True)
        assert text_of(next(events))
        with pytest.raises(openai.APIError, match="the model has failed"):
            list(events)
    assert "a bug" in capsys.readouterr().err
