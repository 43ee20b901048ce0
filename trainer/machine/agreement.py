"""Ranks that have other flags, packages, data or a precision of their own: found at the start, and told in one line.

On several machines each rank reads its own command line, its own packages and its own copy of the data. The ranks of a run
make the same plan without a word to each other, so with different ones they would train other rows than they should, or
wait for messages that nobody sends.
"""

import socket
from collections.abc import Mapping

import numpy as np
import tokenizers
import torch
import torch.distributed as dist
import transformers

from trainer.machine.collectives import end_all, first_said
from trainer.machine.ranks import Ranks

# Of the flags, what each machine may have in its own way: devices, workers, and the places of its files. What is in the files of
# the data is compared by their digests, the shares of a --mixture and the shape of a --from_weight with the rest of the run's
# identity. The weights themselves are rank 0's.
OWN_OF_A_MACHINE = frozenset(
    {
        "cache_dir",
        "data_dir",
        "data_path",
        "dev_file",
        "device",
        "from_weight",
        "local_rank",
        "mixture",
        "model_path",
        "num_workers",
        "out_dir",
        "test_file",
        "tokenizer_path",
        "train_file",
        "val_path",
        "vocab_path",
    }
)


def compare_settings(ranks: Ranks, settings: object) -> None:
    """All ranks must call it. settings: those of the command. Errors: UserError where a rank has other flags or packages."""
    flags = {f"--{name}": value for name, value in vars(settings).items() if name not in OWN_OF_A_MACHINE}
    # That compute, or draw the order of the rows
    packages = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "numpy": np.__version__,
    }
    compare_with_main(ranks, {**flags, **packages})


def compare_precision(ranks: Ranks, dtype: torch.dtype) -> None:
    """All ranks must call it. dtype: that this rank computes in, which its hardware may have chosen instead of --dtype.

    With float16 losses are scaled, so gradients of another precision cannot be added to its own. Errors: UserError where it
    is not that of rank 0.
    """
    advice = "name one that all of them have: --dtype float16 on GPUs, --dtype float32 on CPUs"
    compare_with_main(ranks, {"precision": str(dtype).removeprefix("torch.")}, advice)


def compare_with_main(
    ranks: Ranks, facts: Mapping[str, object], advice: str = "all ranks need the same flags, packages and data"
) -> None:
    """All ranks must call it. facts: of this rank, {what it is: value}. Errors: UserError where they are not those of rank 0."""
    if ranks.world_size == 1:
        return
    # The entries of an architecture in its place: a line names those that differ, not all of them.
    own: dict[str, object] = {}
    for name, value in facts.items():
        own |= (
            {f"{name} {entry}": below for entry, below in value.items()} if isinstance(value, dict) else {name: value}
        )
    of_main = [own]
    dist.broadcast_object_list(of_main, src=0)
    main = of_main[0]
    differing = [name for name in sorted({*own, *main}) if own.get(name) != main.get(name)]
    said = ""
    if differing:
        told = ", ".join(f"{name} {own.get(name)} (rank 0: {main.get(name)})" for name in differing)
        said = f"rank {ranks.rank} on {socket.gethostname()!r} has {told}: {advice}"
    end_all(ranks, first_said(ranks, said))
