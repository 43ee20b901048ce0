"""Render a conversation with the chat template of a foreign tokenizer.

A template is a program by the author of the tokenizer folder: `{{ 'a' * 2**33 }}` takes 8 GB and two nested loops take
days. The sandbox of transformers keeps it from files and from Python, but bounds neither time nor memory. So this file
runs it in a separate process with little memory and a time limit. (Our own template is rendered by
dataset/chat/encoder.py.)
"""

import sys
from pathlib import Path

# Run by path: nothing in scripts/ may shadow a dependency.
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import contextlib
import json
import subprocess
from typing import TYPE_CHECKING, Any

from common.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Time limit of a template, process start included
SECONDS = 20
# Bytes of address space. Windows and macOS have no such bound: there the time limit ends it.
MEMORY = 1 << 30
# Characters of a rendered conversation
MAX_CHARACTERS = 4_000_000


def default_template(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """The chat template: of several the one called default. None: there is none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if template and isinstance(template, str) else None


def chat_text(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]]) -> str:
    """The rendered conversation up to the model's turn.

    Errors: UserError for a template that fails, takes too long or too much memory, or writes too much.
    """
    # A template may write special tokens by name, as {{ bos_token }}.
    words = tokenizer.special_tokens_map
    request = json.dumps({"template": default_template(tokenizer), "messages": messages, "words": words}, default=str)
    what = f"{tokenizer.name_or_path}: the chat template"
    command = [sys.executable, __file__]
    try:
        ended = subprocess.run(command, input=request.encode(), capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"{what} has not ended after {SECONDS} seconds; name another with --tokenizer_path") from None
    if ended.returncode:
        # A process killed by the system, out of memory or time, prints nothing.
        stderr_lines = ended.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {ended.returncode}"]
        raise UserError(f"{what} fails, or takes too much memory or time: {stderr_lines[-1][:200]}")
    return str(json.loads(ended.stdout))


# ------------------------------------------------------------------------------- the separate process


def main() -> None:
    """Read a request from stdin, and write the conversation as a JSON string to stdout."""
    # Windows has no such module.
    with contextlib.suppress(ImportError):
        import resource

        # The limit of CPU time ends this process even if its parent is killed. Set one by one: where the system refuses one
        # (macOS has no bound on memory), the other still holds.
        for resource_id, limit in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, SECONDS)):
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource_id, (limit, limit))
    from transformers.utils.chat_template_utils import render_jinja_template

    request = json.load(sys.stdin.buffer)
    # (texts, character ranges written by the assistant)
    rendered: Any = render_jinja_template(
        [request["messages"]], chat_template=request["template"], add_generation_prompt=True, **request["words"]
    )
    text = rendered[0][0]
    if len(text) > MAX_CHARACTERS:
        sys.exit(f"it writes {len(text):,} characters, more than {MAX_CHARACTERS:,}")
    print(json.dumps(text))


if __name__ == "__main__":
    main()
