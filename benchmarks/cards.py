"""The tables of docs/gpu.md: memory by the formula of trainer/pretrain/memory.py, time by arithmetic. Nothing is measured.

python benchmarks/cards.py          # prints them; tests/benchmarks/test_cards.py holds the page against them
"""

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)

from benchmarks.arguments import STEP_SIZES
from model.config import MiniMindConfig, parameter_count
from trainer.machine.command_line import run_cli
from trainer.pretrain.flops import flops_per_token
from trainer.pretrain.memory import training_memory
from trainer.pretrain.memory_plan import SAFE_SHARE

T = 512
ROWS = (8, 32, 128, 256)
MOST_ROWS = 1024
NAMES = {
    "26m": "default",
    "104m": "`--hidden_size 768 --num_hidden_layers 16`",
    "64m": "`--generation minimind3 --hidden_size 768`",
    "moe": "`--use_moe 1`",
}
# pretrain_hq.jsonl as the shipped tokenizer cuts it, and the mean of a token's position in its document, doubled.
TOKENS = 515e6
CONTEXT = 320


class Card(NamedTuple):
    """gigabytes: of memory, as it is sold. rate: of dense bf16 products with sums in fp32 as the maker states it (of
    fp16 products on a T4, which has no bf16), in FLOP/s; None: cards of this size have very different ones."""

    name: str
    gigabytes: int
    rate: float | None


CARDS = (
    Card("H200", 141, 989e12),
    Card("H100", 80, 989e12),
    Card("RTX 4090", 24, 165e12),
    Card("RTX 3090", 24, 71e12),
    Card("T4", 16, 65e12),
    Card("8 GB", 8, None),
    Card("6 GB", 6, None),
)
# Of the rate above that training is taken to reach. Nobody has measured it.
DENSE_SHARE = 0.25
MOE_SHARE = 0.20


def config_of(size: str) -> MiniMindConfig:
    """The model of a size, with the vocabulary of the shipped tokenizer."""
    return MiniMindConfig(vocab_size=6400, **STEP_SIZES[size])


def peak(size: str, rows: int, gradient_checkpointing: bool = False, optimizer: str = "adamw") -> int:
    """Bytes on a GPU, compiled, in half precision."""
    estimate = training_memory(
        config_of(size),
        rows,
        T,
        optimizer,
        compiled=True,
        gradient_checkpointing=gradient_checkpointing,
        device="cuda",
    )
    return estimate.total


def most_rows(size: str, gigabytes: int, gradient_checkpointing: bool = False) -> int:
    """The largest power of two of rows that takes a safe share of the memory; 0: not one row."""
    room = SAFE_SHARE * gigabytes * 1e9
    rows = MOST_ROWS
    while rows and peak(size, rows, gradient_checkpointing) > room:
        rows //= 2
    return rows


def seconds_of_a_pass(size: str, rate: float) -> float:
    """One epoch of pretrain_hq.jsonl."""
    config = config_of(size)
    share = MOE_SHARE if config.use_moe else DENSE_SHARE
    return TOKENS * flops_per_token(config, CONTEXT) / (share * rate)


def label(size: str) -> str:
    return f"{parameter_count(config_of(size)) / 1e6:.0f} M ({NAMES[size]})"


def duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 60 else f"{minutes / 60:.1f} h"


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def rule(columns: int) -> str:
    return f"|{'---|' * columns}"


def memory_table() -> list[str]:
    """Gigabytes at the peak, by rows of a micro-batch."""
    names = [f"{rows} rows" for rows in ROWS]
    lines = [row("model", *names, "32 rows, Muon", "32 rows, recomputed"), rule(len(ROWS) + 3)]
    for size in STEP_SIZES:
        peaks = [peak(size, rows) for rows in ROWS]
        peaks += [peak(size, 32, optimizer="muon"), peak(size, 32, gradient_checkpointing=True)]
        lines.append(row(label(size), *(f"{taken / 1e9:.1f}" for taken in peaks)))
    return lines


def rows_table() -> list[str]:
    """The rows of a micro-batch that fit each card, without and with gradient checkpointing."""
    lines = [row("model", *(card.name for card in CARDS)), rule(len(CARDS) + 1)]
    for size in STEP_SIZES:
        cells = []
        for card in CARDS:
            plain = most_rows(size, card.gigabytes)
            recomputed = most_rows(size, card.gigabytes, gradient_checkpointing=True)
            cells.append(f"{plain} ({recomputed})")
        lines.append(row(label(size), *cells))
    return lines


def time_table() -> list[str]:
    """One pass over pretrain_hq.jsonl."""
    cards = [card for card in CARDS if card.rate is not None]
    lines = [row("model", "work", *(card.name for card in cards)), rule(len(cards) + 2)]
    for size in STEP_SIZES:
        work = TOKENS * flops_per_token(config_of(size), CONTEXT)
        times = [duration(seconds_of_a_pass(size, card.rate)) for card in cards if card.rate is not None]
        lines.append(row(label(size), f"{work / 1e15:.0f} PFLOP", *times))
    return lines


TABLES = {"memory, GB": memory_table, "rows that fit": rows_table, "time of one pass": time_table}


def main() -> None:
    for title, table in TABLES.items():
        print("\n".join([f"{title}:", "", *table(), ""]))


if __name__ == "__main__":
    run_cli(main)
