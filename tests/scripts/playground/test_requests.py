"""What a browser may ask for: the ranges are those of generate.py's flags; hosts by a list of what is ours."""

import json

import pytest

from common.errors import UserError
from scripts.playground.requests import is_loopback, is_own_host, parse_request
from tests.scripts.playground.pages import HOSTILE, asked


def parsed(**fields):
    return parse_request(json.dumps(asked(**fields)).encode(), n_models=2)


def test_a_request_is_taken_as_it_was_meant():
    number, request = parsed(model=1, text="", temperature=0, top_p=1)
    assert (number, request.text, request.messages, request.seed) == (1, "", [], 1)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.max_new_tokens) == (0.0, 1.0, 8)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    _, request = parsed(text=None, messages=messages)
    assert (request.text, request.messages) == (None, messages)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_a_text(text):
    assert parsed(text=text)[1].text == text


TURN = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": 2},
        {"model": -1},
        {"model": True},
        {"model": "0"},
        {"text": None},
        {"text": 7},
        {"text": ["a"]},
        {"text": "a" * 100_001},
        {"text": "\ud800"},
        {"text": "a", "messages": [TURN]},
        {"temperature": -1},
        {"temperature": 1e-9},
        {"temperature": 1e9},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "0.8"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": None},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": 1.5},
        {"max_new_tokens": 0},
        {"max_new_tokens": 1025},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": 10**400},
        {"top_k": 5},
        {"text": None, "messages": []},
        {"text": None, "messages": {}},
        {"text": None, "messages": [7]},
        {"text": None, "messages": [{"role": "user"}]},
        {"text": None, "messages": [{**TURN, "name": "x"}]},
        {"text": None, "messages": [{"role": "root", "content": "hi"}]},
        {"text": None, "messages": [{"role": ["user"], "content": "hi"}]},
        {"text": None, "messages": [{"role": "user", "content": None}]},
        {"text": None, "messages": [{"role": "assistant", "content": "hi"}]},
        {"text": None, "messages": [TURN] * 201},
        {"text": None, "messages": [{"role": "user", "content": "a" * 60_000}] * 2},
    ],
    ids=lambda fields: json.dumps(fields)[:50],
)
def test_what_is_out_of_range_is_one_line(fields):
    with pytest.raises(UserError) as error:
        parsed(**fields)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("value", ["1e99", "1e999", "-1e99", "NaN", "-Infinity", "9" * 4000, "1" + "0" * 400, "1.0"])
def test_a_number_that_is_no_count_is_told_in_plain_words(value):
    """As JSON spells it. Not what Python says of its own conversion, and none of the digits."""
    for name in ("max_new_tokens", "seed"):
        body = json.dumps(asked(**{name: "HERE"})).replace('"HERE"', value).encode()
        with pytest.raises(UserError) as error:
            parse_request(body, n_models=1)
        assert str(error.value) == f"{name}: a whole number is wanted"


@pytest.mark.parametrize("value", [0, -1, 1025])
def test_how_many_tokens_may_be_asked_for_is_told(value):
    with pytest.raises(UserError, match=f"^max_new_tokens: {value} must be a number above 0 and at most 1,024$"):
        parsed(max_new_tokens=value)


@pytest.mark.parametrize("value", ["1e99", "1e999", "NaN", "9" * 4000])
def test_a_number_beyond_its_range_is_told_in_a_short_line(value):
    for name in ("temperature", "top_p"):
        body = json.dumps(asked(**{name: "HERE"})).replace('"HERE"', value).encode()
        with pytest.raises(UserError) as error:
            parse_request(body, n_models=1)
        assert str(error.value).startswith(f"{name}: ") and len(str(error.value)) < 80


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"]
)
def test_what_is_no_request_is_one_line(body):
    with pytest.raises(UserError):
        parse_request(body, n_models=1)


@pytest.mark.parametrize(
    "header", ["127.0.0.1", "127.0.0.1:8765", "localhost", "localhost:9000", "LOCALHOST:1", "[::1]:8765", "127.0.0.2"]
)
def test_this_machine_is_addressed_as_localhost(header):
    """Any port: a tunnel may have another one."""
    for bound in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
        assert is_own_host(header, bound)


FOREIGN = [
    "example.com",
    "example.com:8765",
    "localhost.example.com",
    "127.0.0.1.example.com",
    "localhost:80@example.com",
    "localhost#example.com",
    "localhost/",
    "localhost localhost",
    "[::1",
    "::1",
    "",
    ":8765",
    "localhost:",
    "2130706433",
    "0x7f.1",
    "localhost\u00a0",
]


@pytest.mark.parametrize("header", [*FOREIGN, "192.168.1.5", "0.0.0.0", "[fe80::1]"])
def test_another_name_or_address_is_refused(header):
    """A name of somebody else may have our address (DNS rebinding)."""
    assert not is_own_host(header, "127.0.0.1")


@pytest.mark.parametrize("header", FOREIGN)
def test_a_server_for_the_network_takes_addresses_but_no_names(header):
    for bound in ("0.0.0.0", "192.168.1.5", "::"):
        assert is_own_host("192.168.1.5:8765", bound)
        assert not is_own_host(header, bound)
    assert is_own_host("box.lan:8765", "box.lan") and not is_own_host("example.com", "box.lan")


def test_what_only_this_machine_reaches():
    assert [host for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "box.lan") if is_loopback(host)] == [
        "127.0.0.1",
        "::1",
        "localhost",
    ]
