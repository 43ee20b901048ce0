"""A conversation as the text that the chat template of a foreign tokenizer makes of it.

A template is a program of whoever wrote the tokenizer folder: `{{ 'a' * 2**33 }}` takes 8 GB and two nested loops take
days. The sandbox of transformers keeps it from files and from Python, but bounds neither time nor memory. So it runs in
a process of its own, this file's, which has little memory and is ended after some seconds. (Our own template is
rendered by dataset/chat/encoder.py.)
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run by path: nothing in scripts/ may shadow a dependency.
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)

import contextlib
import json
import subprocess
from typing import TYPE_CHECKING, Any

from common.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For a template, the process's start included.
SECONDS = 20
# Bytes of address space; Windows and macOS have no such bound, the seconds end it there.
MEMORY = 1 << 30
# Characters of a conversation.
LONGEST = 4_000_000


def default_template(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The template by which a conversation is written. Of several, it is the one called default.

    Errors: UserError for a tokenizer that has none.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template or not isinstance(template, str):
        raise UserError(
            "--chat: this tokenizer has no chat template, or several of which none is called default; name another one with "
            "--tokenizer_path"
        )
    return template


def can_chat(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether there is a template by which a conversation is written."""
    try:
        default_template(tokenizer)
    except UserError:
        return False
    return True


def chat_text(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]]) -> str:
    """The conversation up to the model's turn.

    Errors: UserError for a template that fails, takes too long or too much memory, or writes too much.
    """
    template = default_template(tokenizer)
    # A template may write them by name, as {{ bos_token }}.
    words: dict[str, str | list[str]] = {}
    for name, token in tokenizer.special_tokens_map.items():
        words[name] = list(map(str, token)) if isinstance(token, list | tuple) else str(token)
    return render_apart({"template": template, "messages": messages, "words": words})


def render_apart(request: dict[str, Any]) -> str:
    """What `main` makes of the request in a process of its own. Errors: UserError, as `chat_text`."""
    what = "--chat: the chat template of this tokenizer"
    try:
        ended = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{what} has not ended after {SECONDS} seconds; name another one with --tokenizer_path"
        ) from None
    try:
        answer = json.loads(ended.stdout)
    except ValueError:
        # The system ended it, out of memory or of time, before it could say so.
        raise UserError(f"{what} takes too much memory or time (exit code {ended.returncode})") from None
    if "error" in answer:
        raise UserError(f"{what} fails: {answer['error']}")
    return str(answer["text"])


# ------------------------------------------------------------------------------- the process of its own


def main() -> None:
    """Read a request from the standard input, answer {"text": ...} or {"error": ...} on the standard output."""
    bound_this_process()
    request = json.loads(sys.stdin.buffer.read())
    try:
        text = render(request)
        if len(text) > LONGEST:
            raise ValueError(f"it writes {len(text):,} characters, more than {LONGEST:,}")
        answer = {"text": text}
    # A template is a foreign program: it can raise whatever it likes.
    except Exception as error:
        reason = " ".join(str(error)[:1000].split())[:200]
        answer = {"error": f"{type(error).__name__}: {reason}".removesuffix(": ")}
    print(json.dumps(answer), flush=True)


def render(request: dict[str, Any]) -> str:
    """The text of a request, as transformers renders it in its sandbox."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # (texts, which characters the assistant wrote)
    rendered: Any = render_jinja_template(
        [request["messages"]], chat_template=request["template"], add_generation_prompt=True, **request["words"]
    )
    return str(rendered[0][0])


def bound_this_process() -> None:
    """At most MEMORY bytes, and SECONDS of a core even if whoever started this process is killed."""
    try:
        import resource
    except ImportError:
        # Windows has no such module.
        return
    # One after the other: where the system refuses the one (macOS knows no bound of memory, and a lower bound than ours
    # may not be raised), the other still holds.
    for what, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, SECONDS)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    main()
