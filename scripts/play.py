"""A page in your browser: continue texts and chat with one model or two, and watch the runs of out/ as they train.

    python scripts/play.py --weight out/pretrain_512.pth
    python scripts/play.py --weight out/pretrain_512.pth out/pretrain_768.pth     # side by side, with the same text

It prints the address to open. Nobody but this machine can reach it, unless --host says otherwise. Ctrl-C ends it.
"""

import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run by path: nothing in scripts/ may shadow a dependency.
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    from common.start import begin

    begin()
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from scripts.arguments import play_parser

    play_parser().parse_args()

import argparse
import contextlib
from collections.abc import Sequence

from common.errors import UserError
from common.notices import announce
from common.wording import one_line
from scripts.arguments import play_parser
from scripts.common import ModelChoice, load_in_dtype
from scripts.playground.models import PlayedModel
from scripts.playground.requests import is_loopback
from scripts.playground.runs import RunFolder
from scripts.playground.server import Server
from trainer.machine.command_line import run_cli
from trainer.pretrain.weights_at_hand import weights_instead

__all__ = ["main", "open_server"]

MOST_MODELS = 2
DEFAULT_WEIGHT = ROOT / "out" / "pretrain_512.pth"


def main(argv: Sequence[str] | None = None) -> int:
    server = open_server(play_parser().parse_args(argv))
    announce(f"open {server.address} in your browser; Ctrl-C ends")
    if not is_loopback(server.host):
        announce(f"warning: --host {server.host}: everybody in your network can use it, and nothing is encrypted")
    # What ends it is no fault.
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    # Ending takes a moment, in which many press it again.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.end()
    return 0


def open_server(args: argparse.Namespace) -> Server:
    """A server that listens already; args: of `play_parser`. Errors: UserError."""
    chosen = weights_and_tokenizers(args.weight, args.tokenizer_path)
    if not chosen:
        announce(f"{DEFAULT_WEIGHT} is not there: only runs are shown; {weights_instead(DEFAULT_WEIGHT.parent)}")
    models = []
    for (weight, tokenizer_path), name in zip(chosen, distinct_names([weight for weight, _ in chosen]), strict=True):
        models.append(load_played(ModelChoice(weight, tokenizer_path, args.device, args.dtype), name))
    try:
        return Server(args.host, args.port, models, RunFolder(Path(args.out_dir)))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {args.host} --port {args.port}: {reason}; name others") from error


def weights_and_tokenizers(
    weights: Sequence[str] | None, tokenizer_paths: Sequence[str] | None
) -> list[tuple[str, str | None]]:
    """(weight, tokenizer) for each model, of what the flags name; none where there is no default weight yet.

    Errors: UserError.
    """
    if weights is None:
        weights = [str(DEFAULT_WEIGHT)] if DEFAULT_WEIGHT.exists() else []
    if len(weights) > MOST_MODELS:
        raise UserError(f"--weight: {len(weights)} are too many, one or two stand side by side")
    folders: list[str | None] = [None]
    if tokenizer_paths:
        folders = list(tokenizer_paths)
    if len(folders) == 1:
        folders = folders * len(weights)
    if len(folders) != len(weights):
        raise UserError(f"--tokenizer_path: one for all or one for each --weight is wanted, not {len(folders)}")
    return list(zip(weights, folders, strict=True))


def distinct_names(weights: Sequence[str]) -> list[str]:
    """What the page calls the weights: a file's or folder's own name, or the whole path where two have the same."""
    names = [Path(weight).absolute().name.removesuffix(".pth") for weight in weights]
    if len(set(names)) < len(names):
        names = list(weights)
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    # A file name that is not UTF-8 holds lone surrogates.
    return [one_line(name).encode(errors="backslashreplace").decode() for name in names]


def load_played(choice: ModelChoice, name: str) -> PlayedModel:
    """A model that has written its first tokens already."""
    played = PlayedModel(name, *load_in_dtype(choice))
    played.warm_up()
    return played


if __name__ == "__main__":
    run_cli(main)
