"""What the benchmarks train: shapes of models, texts, and a training on random tokens for those that need no text."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.start import ROOT
from dataset.batches import Batch
from dataset.embedded_corpus import build_embedded_corpus
from dataset.loader import to_device
from dataset.packing import Totals
from model.config import ModelConfig
from model.model_minimind import MiniMindLM
from trainer.cuda_graphs import may_record
from trainer.engine import make_engine
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import pick_dtype
from trainer.machine.ranks import Ranks
from trainer.pretrain.loss import n_sums, pretrain_loss
from trainer.settings import OptimizerSettings

# Model shapes, as differences from ModelConfig's defaults
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2},
    "26m": {},
    "104m": {"hidden_size": 768, "num_hidden_layers": 16},
    "64m": {"generation": "minimind3"},
    "moe": {"use_moe": True},
}
LEARNING_RATE = 5e-4
# tokens of a document
MEAN_LENGTH = 320

# Benchmark corpora, public tokenizers, GLUE files and golden outputs, not in the repository: docs/corpora.md says how to make
# them. Without them some tests are skipped, and benchmarks use the embedded corpus.
REFERENCE = Path(os.environ.get("MINIMIND_REFERENCE") or ROOT.parent / "shared")


def corpus_files() -> list[Path]:
    """English and Chinese, or the embedded corpus if these are missing."""
    files = [REFERENCE / "corpora" / f"{name}.train.jsonl" for name in ("en_wiki", "zh_wiki")]
    return files if all(file.is_file() for file in files) else [build_embedded_corpus()]


def texts_of(file: str | Path) -> Iterator[str]:
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


class Training:
    """A model with its engine and one batch, on which every step trains.

    fields: of the ModelConfig. context: sum(n^2) / sum(n) over the documents' lengths n, for flops_per_token.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        device: torch.device,
        rows: int,
        T: int = 512,
        *,
        compiled: bool = True,
        dtype: str = "bfloat16",
        optimizer: str = "adamw",
        cuda_graphs: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        config = ModelConfig(**fields)
        self.model = MiniMindLM(config).train()
        generator = torch.Generator().manual_seed(1)
        batch, self.context = packed_batch(rows, T, MEAN_LENGTH, config.vocab_size, generator)
        # As a loader yields it, and on the device
        self.host_batch = batch
        self.batch = to_device(batch, device)
        self.totals = Totals(batch.n_targets, batch.n_documents)
        self.tokens = rows * T
        products = pick_dtype(dtype, device)[0]
        self.engine = make_engine(
            self.model,
            partial(pretrain_loss, self.model),
            OptimizerSettings(learning_rate=LEARNING_RATE, optimizer=optimizer),
            n_sums=n_sums(config),
            identity={},
            ranks=Ranks(),
            device=device,
            dtype=products,
            cuda_graphs=may_record(cuda_graphs, device, Ranks(), products, recomputes=False, dropout=0),
        )
        choice = "1" if compiled else "0"
        for notice in compile_blocks(self.model.compile_training, choice, device, (rows, T), dtype=products):
            print(notice)

    def step(self) -> None:
        """An update of one micro-batch; asynchronous on a GPU."""
        self.engine.micro_batch(self.batch, self.totals)
        self.engine.update(LEARNING_RATE)


def packed_batch(
    rows: int, T: int, mean_length: int, vocab_size: int, generator: torch.Generator
) -> tuple[Batch, float]:
    """Full rows of random tokens, each starting a document with probability 1 / mean_length; (Batch, sum(n^2) / sum(n))."""
    begins = torch.rand(rows, T, generator=generator) < 1 / mean_length
    begins[:, 0] = True
    document_ids = begins.long().cumsum(dim=1) - 1
    positions = torch.arange(T)
    position_ids = positions - torch.where(begins, positions, 0).cummax(dim=1).values
    ids = torch.randint(3, vocab_size, (rows, T + 1), generator=generator)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    batch = Batch(inputs, targets, document_ids, position_ids, rows * T, int(begins.sum()))
    # The first n odd numbers add up to n^2.
    return batch, float((2 * position_ids + 1).float().mean())
