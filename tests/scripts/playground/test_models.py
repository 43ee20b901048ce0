"""Models that write side by side: each writes what it would write alone, which is what generate.py writes."""

import threading

import pytest
import torch

from common.errors import UserError
from scripts.generate import Sampling, TextStream, generate
from scripts.playground import models
from scripts.playground.models import Request
from scripts.playground.turns import Line, TooManyError
from tests.scripts.playground.pages import played_model, wait_until

SAMPLING = Sampling(max_new_tokens=25, temperature=0.9, top_p=0.95)


def request(text="the cat", seed=5, **changes):
    return Request(text, [], Sampling(**{**vars(SAMPLING), **changes}), seed)


def text_of(model, wanted):
    pieces = []
    outcome = model.write(wanted, pieces.extend, lambda ahead: None)
    return "".join(piece.text for piece in pieces), outcome


def alone(model, wanted):
    """Reference: what generate.py does with the flags of the request."""
    stream = TextStream(model.tokenizer, lambda text: None)
    torch.manual_seed(wanted.seed)
    generate(model.model, model.tokenizer, model.encoder.prompt_ids(wanted.text), wanted.sampling, stream)
    return stream.text


def test_a_text_is_that_of_generate_with_the_same_seed():
    model = played_model()
    for wanted in (request(), request(seed=6), request(temperature=0.0)):
        found, outcome = text_of(model, wanted)
        assert found == alone(model, wanted)
        assert (
            outcome.tokens == 25
            and outcome.prompt_tokens == len(model.prompt_ids(wanted))
            and outcome.reason == "length"
        )
    assert text_of(model, request())[0] != text_of(model, request(seed=6))[0]


def test_two_models_write_in_turns_what_each_writes_alone():
    """They share one generator of random numbers. Reference: each alone; the turns are seen in the order of the pieces."""
    pair = [played_model("one"), played_model("two", seed=1)]
    wanted = request(max_new_tokens=40)
    both_there = threading.Barrier(2)
    order, texts = [], {}

    def write(model):
        pieces = []

        def tell(new):
            if not pieces:
                both_there.wait(60)
            pieces.extend(new)
            order.append(model.name)

        model.write(wanted, tell, lambda ahead: None)
        texts[model.name] = "".join(piece.text for piece in pieces)

    threads = [threading.Thread(target=write, args=(model,)) for model in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [texts[model.name] for model in pair] == [alone(model, wanted) for model in pair]
    changes = sum(a != b for a, b in zip(order[:-1], order[1:], strict=True))
    assert changes > 40, "one after the other there would be one change"


def test_the_end_of_a_text_is_told():
    """A model whose likeliest token is always EOS."""
    model = played_model()
    with torch.no_grad():
        model.model.lm_head.weight.zero_()
    end = model.tokenizer.eos_token_id
    model.model.lm_head.register_forward_hook(
        lambda module, inputs, logits: torch.nn.functional.one_hot(torch.full(logits.shape[:-1], end), 6400) * 50.0
    )
    pieces = []
    outcome = model.write(request(), pieces.extend, lambda ahead: None)
    assert (outcome.reason, outcome.tokens) == ("end", 1)
    assert [(piece.text, piece.tokens[0].label) for piece in pieces] == [("", "<|im_end|>")]


def test_whoever_leaves_ends_the_text_and_lets_the_next_one_write():
    model = played_model()
    told = []

    def leave(pieces):
        told.append(pieces)
        if len(told) == 3:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        model.write(request(), leave, lambda ahead: None)
    assert len(told) == 3
    assert text_of(model, request())[0] == alone(model, request())


def test_a_line_is_served_in_its_order_and_turns_away_who_is_too_many():
    line = Line()
    places = [line.join(), line.join(), line.join()]
    with pytest.raises(TooManyError):
        line.join(most=3)
    assert [line.ahead_of(place, 0.01) for place in places] == [0, 1, 2]
    line.leave(places[1])
    assert line.ahead_of(places[2], 0.01) == 1
    line.leave(places[0])
    assert line.ahead_of(places[2]) == 0


def test_one_text_at_a_time_for_a_model(monkeypatch):
    """The second one hears that it has to wait, and the one beyond the bound is turned away."""
    monkeypatch.setattr(models, "MOST_WAITING", 1)
    monkeypatch.setattr(models, "SECONDS_BETWEEN_NEWS", 0.01)
    model = played_model()
    may_go_on, heard = threading.Event(), []

    def hold(pieces):
        heard.append("writes")
        assert may_go_on.wait(60)

    def news(ahead):
        heard.append(ahead)

    first = threading.Thread(target=model.write, args=(request(max_new_tokens=2), hold, news))
    first.start()
    wait_until(lambda: "writes" in heard)
    second = threading.Thread(target=model.write, args=(request(max_new_tokens=2), lambda pieces: None, news))
    second.start()
    wait_until(lambda: 1 in heard)
    with pytest.raises(TooManyError):
        text_of(model, request())
    may_go_on.set()
    first.join(60)
    second.join(60)
    assert text_of(model, request())[0] == alone(model, request())


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"text": "word " * 6000}, "tokens, and 4,096 fit"), ({"max_new_tokens": 40_000}, "leaves no room")],
)
def test_a_prompt_that_does_not_fit_is_one_line(changes, message):
    with pytest.raises(UserError, match=message):
        text_of(played_model(), request(**changes))


def test_a_model_that_begins_no_text_by_itself_says_so(monkeypatch):
    """Qwen's tokenizer has no token that a document begins with."""
    model = played_model()
    monkeypatch.setattr(model.encoder, "prompt_ids", lambda text: [])
    with pytest.raises(UserError, match="write something first"):
        text_of(model, request(""))


def test_a_conversation_is_put_through_the_template():
    """Reference: the ids of transformers' own rendering."""
    model = played_model()
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    ids = model.prompt_ids(Request(None, messages, SAMPLING, 1))
    rendered = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert model.tokenizer.decode(ids) == rendered
    model.tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        model.prompt_ids(Request(None, messages, SAMPLING, 1))
