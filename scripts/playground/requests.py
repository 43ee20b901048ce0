"""What a browser sends, checked: nothing of it is believed."""

import argparse
import ipaddress
import json
import re
from collections.abc import Callable
from typing import TypeVar

from common.errors import UserError
from common.flags import positive, seed, share
from common.wording import first_to_last
from scripts.arguments import temperature
from scripts.generate import Sampling, utf8
from scripts.playground.models import MOST_NEW_TOKENS, Message, Request

# Of the JSON of a request, which is longer than its text where characters are written as escapes.
MOST_BODY_BYTES = 1 << 20
MOST_CHARACTERS = 100_000
MOST_MESSAGES = 200
# Of a number, its sign and point among them
MOST_DIGITS = 30
ROLES = ("system", "user", "assistant")
FIELDS = {"model", "text", "messages", "max_new_tokens", "temperature", "top_p", "seed"}

# A name or an address, in [ ] if it has colons, and perhaps a port
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")

Number = TypeVar("Number", int, float)


def parse_request(body: bytes, n_models: int) -> tuple[int, Request]:
    """(number of the model, what it is to do). Errors: UserError that says what is wrong with the request."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise UserError("the request is not JSON") from None
    if not isinstance(fields, dict) or fields.keys() - FIELDS:
        raise UserError(f"the request has to be an object with some of the fields {', '.join(sorted(FIELDS))}")
    model = fields.get("model")
    # A bool is an int to Python.
    if type(model) is not int or not 0 <= model < n_models:
        raise UserError(f"model: a number is wanted, {first_to_last(0, n_models - 1)}")
    if ("text" in fields) == ("messages" in fields):
        raise UserError("either text or messages is wanted")
    sampling = Sampling(
        max_new_tokens=number(fields, "max_new_tokens", int, positive(int, MOST_NEW_TOKENS)),
        temperature=number(fields, "temperature", float, temperature),
        top_p=number(fields, "top_p", float, share),
    )
    text = text_of(fields["text"]) if "text" in fields else None
    messages = messages_of(fields["messages"]) if "messages" in fields else []
    return model, Request(text, messages, sampling, number(fields, "seed", int, seed))


def number(fields: dict[str, object], name: str, kind: type[Number], convert: Callable[[str], Number]) -> Number:
    """A field, by the rule of the flag of the same name. kind: int takes whole numbers alone. Errors: UserError."""
    value = fields.get(name)
    is_right_kind = type(value) is int or (kind is float and type(value) is float)
    # A number of thousands of digits is no number that any of the rules takes, and would make a line that nobody reads.
    if not is_right_kind or len(str(value)) > MOST_DIGITS:
        raise UserError(f"{name}: a {'whole ' if kind is int else ''}number is wanted")
    try:
        return convert(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UserError(f"{name}: {error}") from None


def text_of(value: object) -> str:
    if not isinstance(value, str):
        raise UserError("a text is wanted")
    if len(value) > MOST_CHARACTERS:
        raise UserError(f"a text of at most {MOST_CHARACTERS:,} characters is wanted")
    return utf8(value)


def messages_of(value: object) -> list[Message]:
    """The turns of a conversation, of which the last one is the person's. Errors: UserError."""
    if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
        raise UserError(f"messages: a list of 1 to {MOST_MESSAGES} is wanted")
    messages = []
    for entry in value:
        if not isinstance(entry, dict) or entry.keys() != {"role", "content"} or entry["role"] not in ROLES:
            raise UserError(f"messages: each has a role ({', '.join(ROLES)}) and a content")
        messages.append({"role": str(entry["role"]), "content": text_of(entry["content"])})
    if messages[-1]["role"] != "user":
        raise UserError("messages: the last one has to be the user's")
    if sum(len(message["content"]) for message in messages) > MOST_CHARACTERS:
        raise UserError(f"messages: at most {MOST_CHARACTERS:,} characters in all")
    return messages


def is_own_host(header: str, bound: str) -> bool:
    """Whether the Host of a request is this machine. bound: the --host that the server listens on.

    A page of anybody can give its own name the address 127.0.0.1 (DNS rebinding), and then its scripts could talk to us.
    But the browser sends that name along. So no name is taken but localhost and what --host says. Addresses are no names:
    a server that listens to other machines takes any. The port is left aside: a tunnel may have another one.
    """
    match = HOST.fullmatch(header)
    if not match:
        return False
    host = match[1].strip("[]").lower()
    if host in ("localhost", bound.lower()):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or not is_loopback(bound)


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach a server that listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
