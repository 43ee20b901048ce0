"""Continue a text, or talk to a model.

    python scripts/generate.py --weight out/pretrain_512.pth "The harbour lies" "这座小城"
    python scripts/generate.py --weight out/pretrain_512.pth              # interactive; Ctrl-D ends it
    python scripts/generate.py --weight out/pretrain_512_hf --chat "Who are you?"

The text goes to stdout as it comes, the speed to stderr. Prompts can also be piped in, one a line.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder, and answers wrong flags

import contextlib
import dataclasses
import functools
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from common.errors import UserError, user_errors, utf8
from common.wording import announce, counted, one_line, printable
from dataset.chat.encoder import ChatEncoder
from dataset.tokenizing.byte_level_bpe import CHAT_TOKENS, OUR_TEMPLATES
from model.decoding import OnTokens, Sampling, decode, fuse
from model.model_minimind import MiniMindLM
from scripts.arguments import FINE_TUNED, generate_parser, weight_of
from scripts.chat_template import chat_text, default_template
from scripts.common import end_ids, load, note_untrained, trained_length
from trainer.machine.command_line import run_cli

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def main(argv: Sequence[str] | None = None) -> int:
    args = generate_parser().parse_args(argv)
    if args.system and not args.chat:
        raise UserError("--system has no effect without --chat: add it, or leave --system out")
    weight = weight_of(args.weight, FINE_TUNED if args.chat else "")
    model, tokenizer, encoder = load(weight, args.tokenizer_path, args.device, args.dtype, with_interface=False)
    args.max_new_tokens = args.max_new_tokens or min(256, trained_length(model.config))
    sampling = Sampling(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Sampling)})
    chat = turns_encoder(tokenizer) if args.chat else None
    torch.manual_seed(args.seed)
    # The conversation so far, in the format of chat templates
    messages = [{"role": "system", "content": utf8(args.system, "--system")}] if args.system else []
    # After an error an interactive session continues with the next prompt; otherwise the program ends.
    is_interactive = not args.prompts and sys.stdin is not None and sys.stdin.isatty()
    for prompt in args.prompts or stdin_prompts():
        try:
            if chat is None:
                if prompt.endswith(" "):
                    note = "note: the prompt ends in a space, with which most tokens begin: without it the text continues better"
                    announce(note, to_stderr=True)
                reply(model, tokenizer, encoder.prompt_ids(utf8(prompt)), sampling, is_interactive, echo=prompt)
                continue
            turn = {"role": "user", "content": utf8(prompt)}
            ids = chat_ids(chat, [*messages, turn], prompt_limit(model, sampling))
            answer = reply(model, tokenizer, ids, sampling, is_interactive)
        except (UserError, KeyboardInterrupt) as error:
            if not is_interactive:
                raise
            # Ctrl-C before the first token or after the last one; `reply` handles it in between.
            announce(f"error: {one_line(error)}" if isinstance(error, UserError) else "\n(stopped)", to_stderr=True)
            continue
        # Each prompt of the command line is a separate conversation.
        if not args.prompts:
            messages += [turn, {"role": "assistant", "content": answer}]
    return 0


def stdin_prompts() -> Iterator[str]:
    """Lines of stdin; in a terminal with a prompt sign and line editing."""
    if hasattr(sys.stdin, "reconfigure"):
        # `utf8` refuses invalid bytes.
        sys.stdin.reconfigure(errors="surrogateescape")
    # None: closed by the caller
    if sys.stdin is None or not sys.stdin.isatty():
        has_prompt = False
        for line in sys.stdin or ():
            with contextlib.suppress(UnicodeError):
                # Windows decodes a pipe by its code page, though PowerShell and files are mostly UTF-8.
                line = line.encode(sys.stdin.encoding or "utf-8", "surrogateescape").decode("utf-8-sig")
            if line.strip():
                has_prompt = True
                yield line.rstrip("\n")
        if not has_prompt:
            raise UserError("no prompt came through the standard input: name one on the command line")
        return
    # Windows has no such module.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - history and editing in input()
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            # Drops the current line, as in a shell; the conversation stays.
            print("\n(Ctrl-D ends the session; on Windows Ctrl-Z and Enter)")
            continue
        if line.strip():
            yield line


def prompt_limit(model: MiniMindLM, sampling: Sampling) -> int:
    """Maximum tokens of a prompt."""
    return max(model.config.max_position_embeddings - sampling.max_new_tokens, 0)


def check_prompt(model: MiniMindLM, ids: list[int], sampling: Sampling) -> None:
    """Errors: UserError for a prompt that the model cannot continue."""
    limit = prompt_limit(model, sampling)
    if len(ids) > limit:
        raise UserError(
            f"a prompt of {counted(len(ids), 'token')} is too long: {limit:,} fit beside "
            f"{counted(sampling.max_new_tokens, 'new token')} (--max_new_tokens)"
        )
    if not ids:
        raise UserError("the tokenizer of this model has no BOS to begin a text with: write something first")


# Turns of a conversation -> their ids, up to the model's answer
TurnsEncoder = Callable[[list[dict[str, str]]], list[int]]


def turns_encoder(tokenizer: "PreTrainedTokenizerBase") -> TurnsEncoder:
    """The encoder of our fine-tuning for our template; otherwise one with the tokenizer's own template.

    Errors: UserError for a tokenizer without a template, or with ours and without its tokens.
    """
    template = default_template(tokenizer)
    if template is None:
        raise UserError(
            "--chat: this tokenizer has no chat template, or several of which none is called default; name another one with "
            "--tokenizer_path"
        )
    if template in OUR_TEMPLATES:
        # the only one used of several templates
        tokenizer.chat_template = template
        with user_errors():
            return ChatEncoder(tokenizer).chat_prompt_ids

    def chat_prompt_ids(messages: list[dict[str, str]]) -> list[int]:
        # The template writes its special tokens itself.
        return list(tokenizer(chat_text(tokenizer, messages), add_special_tokens=False).input_ids)

    return chat_prompt_ids


def chat_ids(encode: TurnsEncoder, messages: list[dict[str, str]], length: int) -> list[int]:
    """The ids of a conversation up to the model's turn. Drops as few of the oldest exchanges as needed to fit `length`.

    A system message at the start stays. If the last question alone does not fit, its ids are longer than `length`.
    """
    system = [message for message in messages[:1] if message["role"] == "system"]
    turns = messages[len(system) :]

    @functools.cache
    def ids_without(exchanges: int) -> list[int]:
        # An exchange: a question and its answer
        return encode([*system, *turns[2 * exchanges :]])

    if len(ids_without(0)) <= length:
        return ids_without(0)
    # Bisection: a foreign template is rendered in a process, a second each time. The last question has no answer yet.
    n_exchanges = (len(turns) - 1) // 2
    return ids_without(bisect_left(range(n_exchanges), True, key=lambda n: len(ids_without(n)) <= length))


def reply(
    model: MiniMindLM,
    tokenizer: "PreTrainedTokenizerBase",
    ids: list[int],
    sampling: Sampling,
    is_interactive: bool,
    echo: str = "",
) -> str:
    """Print a continuation of `ids` as it is sampled, then its speed; returns the text.

    is_interactive: an interactive prompt; Ctrl-C then cuts the text short, once it has started.
    """
    check_prompt(model, ids, sampling)
    stream = TextStream(tokenizer)
    print_text(echo)
    start = time.perf_counter()
    try:
        generate(model, tokenizer, [ids], sampling, lambda tokens, logits: stream.add(int(tokens)))
        stream.end()
    except KeyboardInterrupt:
        # No token, no answer: `main` drops the prompt.
        if not is_interactive or not stream.count:
            raise
        stream.end()
    seconds = time.perf_counter() - start
    print(flush=True)
    print(f"[{counted(stream.count, 'token')}, {stream.count / seconds:.1f} tokens/s]", file=sys.stderr, flush=True)
    note_untrained(model.config, len(ids) + stream.count)
    return stream.text


def generate(
    model: MiniMindLM,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[list[int]],
    sampling: Sampling,
    on_tokens: OnTokens | None = None,
) -> list[list[int]]:
    """The ids that continue each prompt. on_tokens: see `decode`."""
    if model.fused_layers is None:
        fuse(model)
    with user_errors():
        return decode(model, prompts, sampling, end_ids(model, tokenizer.eos_token_id), on_tokens)


def print_text(text: str) -> None:
    """Print text with visible control characters: a terminal would act on them."""
    print(printable(text), end="", flush=True)


class TextStream:
    """Prints text as its tokens come. `text` is the printed text, equal to decoding all tokens at once, without special
    tokens except those around thoughts and calls; `count` is the number of tokens.

    A Chinese character has three bytes, which may be spread over several tokens. So tokens are held back until their
    text is whole. Some decoders look at the previous token to decide on a space: the tokens printed last are decoded
    again with the new ones, and their text is cut off.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", write: Callable[[str], object] = print_text) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.hidden = {i for i, token in added if token.special and str(token) not in CHAT_TOKENS}
        self.write = write
        self.text = ""
        self.count = 0
        self.shown: list[int] = []
        self.held_back: list[int] = []

    def add(self, token: int) -> None:
        self.count += 1
        self.held_back.append(token)
        text = self._text_added(self.held_back)
        # The first bytes of a character decode to the replacement character.
        if text and not text.endswith("\ufffd"):
            self._print(text)

    def end(self) -> None:
        """Print the tokens held back, even half a character."""
        self._print(self._text_added(self.held_back))

    def _text_added(self, tokens: list[int]) -> str:
        """The text of tokens that follow those that are shown."""
        before = self._text_of(self.shown)
        return self._text_of(self.shown + tokens)[len(before) :]

    def _text_of(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode([i for i in ids if i not in self.hidden]))

    def _print(self, text: str) -> None:
        self.shown = self.held_back
        self.held_back = []
        self.text += text
        self.write(text)


if __name__ == "__main__":
    run_cli(main)
