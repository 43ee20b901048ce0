"""All trainers in a Python that lacks something. What each test takes away is in its program."""

import json
import subprocess
import sys
from typing import Any, NamedTuple

from tests.chats import write_chats
from tests.dataset.electra.test_electra_dataset import write_lines, write_vocab
from tests.helpers import ROOT, write_corpus
from tests.trainer.glue.glue_helpers import make_place


class Inputs(NamedTuple):
    """Small ones, for each trainer."""

    # Of train_pretrain.py.
    data: Any
    # {flag: value} of train_sft.py, which goes on from what train_pretrain.py has left in out/.
    chats: dict[str, Any]
    # {flag: value} of train_electra.py.
    electra: dict[str, Any]
    # Of train_glue.py, see glue_helpers.arguments.
    place: Any


def write_inputs(folder):
    """The Inputs, written into a folder."""
    electra = {
        "data_path": write_lines(folder / "lines.jsonl")[0],
        "vocab_path": write_vocab(folder / "vocab.txt"),
        "out_dir": folder / "electra",
    }
    chats = {"data_path": write_chats(folder / "chats.jsonl"), "max_seq_len": 64, "out_dir": folder / "out"}
    return Inputs(write_corpus(folder / "data.jsonl"), chats, electra, make_place(folder / "place"))


def run_program(program, asked):
    """The end of a process that runs this text of Python; `asked` is its sys.argv[1], as JSON. Paths go as text."""
    command = [sys.executable, "-c", program, json.dumps(asked, default=str)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
