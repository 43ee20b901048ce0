"""OpenAI's chat and text completions for `play.py --api`, in terms of the page's requests and answers.

Shapes: https://platform.openai.com/docs/api-reference. A request gets one answer, of text.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any

from common.errors import UserError

# {route: the field of its prompt}
ROUTES = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
# What a request may have beside its prompt: what is read here, then what changes no text. Anything else is refused ...
TAKEN = {"temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop", "max_tokens", "max_completion_tokens"}
TAKEN |= {"stream", "stream_options", "model", "user", "metadata", "store", "service_tier", "safety_identifier"}
TAKEN |= {"prompt_cache_key", "prompt_cache_retention", "cache_prompt", "keep_alive", "parallel_tool_calls"}
# ... except with one of these values, which ask for nothing.
NOTHING: tuple[object, ...] = (False, 0, "", [], {})
NO_EFFECT: dict[str, tuple[object, ...]] = {
    "response_format": ({}, {"type": "text"}),
    "modalities": ([], ["text"]),
    **dict.fromkeys(("n", "best_of", "num_beams", "typical_p", "tfs_z", "length_penalty", "repeat_penalty"), (1,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("add_special_tokens", "add_generation_prompt", "skip_special_tokens"), (True,)),
}


class Enough(Exception):
    """A stop text has come: the rest of the answer is not wanted."""


class Reply:
    """The answer to a request, in events or as a whole: its text up to the first stop text."""

    def __init__(self, name: str, route: str, send: Callable[[Any], None]) -> None:
        """name: of the model. send: gets the events."""
        self.prompt = ROUTES[route]
        self.is_chat = self.prompt == "messages"
        self.head = {"id": secrets.token_hex(12), "created": int(time.time()), "model": name}
        self.send = send
        self.text = ""
        # characters of it that hold no beginning of a stop text
        self.passed = 0

    def read(self, fields: dict[str, Any], tokens: int, most: int) -> dict[str, Any]:
        """The page's fields for those of a request. tokens, most: default and maximum of max_tokens. Errors: of any kind."""
        defaults = {"temperature": 0.8, "top_p": 0.9, "seed": secrets.randbits(32), "stop": []}
        given = {**defaults, **{name: value for name, value in fields.items() if value is not None}}
        for name, value in given.items():
            if name not in (*TAKEN, self.prompt) and value not in NO_EFFECT.get(name, NOTHING):
                raise UserError(f"{name[:60]} is not supported here")
        self.stops = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
        if not isinstance(self.stops, list) or not all(isinstance(stop, str) and stop for stop in self.stops):
            raise UserError("stop: expected texts")
        self.is_stream = bool(given.get("stream"))
        self.has_usage = given.get("stream_options", {}).get("include_usage")
        chat = "chat.completion.chunk" if self.is_stream else "chat.completion"
        self.head["object"] = chat if self.is_chat else "text_completion"
        text = None if self.is_chat else given.get("prompt")
        # So LangChain sends one.
        if isinstance(text, list) and len(text) == 1:
            text = text[0]
        if not (self.is_chat or isinstance(text, str)):
            raise UserError("prompt: expected a text, one a request")
        sent = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        asked = fields.get(sent, tokens)
        fills_context = asked in (None, -1)
        if fills_context:
            # The least: old turns of a chat leave that room.
            asked = tokens if self.is_chat else 1
        if type(asked) is not int or asked < 1:
            raise UserError(f"{sent}: expected a number above 0, or -1 for as many as fit")
        return {**given, "text": text, "max_new_tokens": min(asked, most), "fills_context": fills_context}

    def part(self, text: str, reason: str | None = None) -> dict[str, Any]:
        """An event, or the whole answer."""
        message = {"content": text} if self.is_stream and self.passed else {"role": "assistant", "content": text}
        said = {"delta" if self.is_stream else "message": message} if self.is_chat else {"text": text}
        return {**self.head, "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": reason}]}

    def receive(self, piece: dict[str, Any]) -> None:
        """Called with each piece that the page would get. Raises Enough."""
        self.text += piece["text"]
        found = [at for stop in self.stops if (at := self.text.find(stop, self.passed)) >= 0]
        unsent = len(self.text) - self.passed
        begun = [n for stop in self.stops for n in range(min(len(stop), unsent + 1)) if self.text.endswith(stop[:n])]
        end = min(found, default=len(self.text) - max(begun, default=0))
        if self.is_stream and end > self.passed:
            self.send(self.part(self.text[self.passed : end]))
        self.passed = end
        if found:
            self.text = self.text[:end]
            raise Enough

    def end(self, last: dict[str, Any]) -> dict[str, Any] | None:
        """last: what the page would get at the end. Returns the whole answer; None if it was sent in events."""
        reason = "stop" if last["reason"] == "end" else "length"
        n_prompt, n_new = last["prompt_tokens"], last["tokens"]
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
        if not self.is_stream:
            return {**self.part(self.text, reason), "usage": usage}
        self.send(self.part(self.text[self.passed :], reason))
        if self.has_usage:
            self.send({**self.head, "choices": [], "usage": usage})
        return None
