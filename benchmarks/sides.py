"""The sides that benchmarks/bench.py compares: each trains in a separate process, in turns.

After each update a side calls `Turns.done`, which measures the turn and blocks until the next one.
"""

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.corpora import texts_of
from benchmarks.training import LEARNING_RATE, WARM_UP, Training
from dataset.batches import Assembler, UpdateSchedule
from dataset.corpus import Corpus
from dataset.lm_dataset import PretrainDataset
from dataset.loader import Loader, to_device
from dataset.packing import Totals
from dataset.reading.settings import TextSettings
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import DEFAULT
from model.config import ModelConfig
from model.hf import MiniMindForCausalLM
from trainer.machine.devices import pick_dtype
from trainer.machine.measure import peak_memory, synchronize
from trainer.optim.schedules import get_lr

# names of the sides
SIDES = ("plain", "hf", "hf-compiled", "ours")
# more updates than any run makes
ENDLESS = 10**6


class Turns:
    """Lets a side train in turns: a pipe brings the seconds of each, and takes its figures."""

    def __init__(self, pipe: "Connection[Any, Any]", device: torch.device) -> None:
        self.pipe = pipe
        self.device = device
        self.updates = 0

    def begin(self, model: nn.Module) -> None:
        """All is set up, the first update of `model` comes next."""
        self.first: dict[str, float] = {"parameters": sum(p.numel() for p in model.parameters())}
        self.start = time.perf_counter()

    def done(self, text: int, positions: int) -> None:
        """Count an update of `text` targets in `positions` positions. Ends the process after the last turn."""
        self.updates += 1
        if self.updates == 1:
            synchronize(self.device)
            self.first["first_update_seconds"] = time.perf_counter() - self.start
        if self.updates <= WARM_UP:
            if self.updates == WARM_UP:
                synchronize(self.device)
                self.pipe.send(self.first)
                self.wait()
            return
        self.slice["updates"] += 1
        self.slice["text"] += text
        self.slice["positions"] += positions
        if time.perf_counter() - self.start >= self.limit:
            synchronize(self.device)
            self.pipe.send({**self.slice, "seconds": time.perf_counter() - self.start})
            self.wait()

    def wait(self) -> None:
        """Block until the next turn; end the process if there is none."""
        try:
            limit = self.pipe.recv()
        except (EOFError, ConnectionError):
            # bench.py has ended.
            sys.exit(1)
        if limit is None:
            self.pipe.send({"peak_memory_bytes": peak_memory(self.device)})
            sys.exit(0)
        self.slice = {"updates": 0, "text": 0, "positions": 0}
        self.limit = limit
        self.start = time.perf_counter()


def train_plain(args: argparse.Namespace, config: ModelConfig, device: torch.device, turns: Turns) -> None:
    """The plain MiniMind loop: each item padded to the full length, eager, AdamW, one forward with all logits; bf16 autocast
    on a GPU, fp32 elsewhere."""
    model: MiniMindForCausalLM = MiniMindForCausalLM(config).to(device).train()  # type: ignore[arg-type]  # wrapped without types
    dataset = PretrainDataset(args.documents_file, load_tokenizer(DEFAULT), args.max_seq_len)
    turns.begin(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=False, foreach=False)
    generator = torch.Generator().manual_seed(42)
    loader = DataLoader(dataset, args.rows, shuffle=True, generator=generator)
    # Endless epochs
    for step, batch in enumerate(itertools.chain.from_iterable(itertools.repeat(loader))):
        inputs, targets, mask = (part.to(device) for part in batch)
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, ENDLESS, LEARNING_RATE)
        # One context around the whole loop would cache the first step's half-precision weights, and every later step would
        # use them.
        with torch.autocast(device.type, pick_dtype("bfloat16", device)[0], enabled=device.type == "cuda"):
            output = model(inputs)
            losses = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="none")
            loss = (losses * mask.flatten()).sum() / mask.sum() + output.aux_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Counted on the CPU: reading the mask on the device would wait for it.
        turns.done(int(batch[-1].sum()), mask.numel())


def train_hf(
    args: argparse.Namespace, config: ModelConfig, device: torch.device, turns: Turns, compiled: bool = False
) -> None:
    """The Hugging Face Trainer. Labels are the inputs, shifted by the model: T - 1 targets a row."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from model.hf_format import hf_config

    their_config = hf_config(config)
    T = args.max_seq_len
    if hasattr(their_config, "output_router_logits"):
        # With auxiliary loss, as on the other sides
        their_config.output_router_logits = True
    documents = DocumentEncoder(load_tokenizer(DEFAULT)).encode(list(texts_of(args.documents_file)))
    ids = torch.tensor(list(itertools.chain.from_iterable(documents)))
    rows = [{"input_ids": row, "labels": row} for row in ids[: len(ids) // T * T].view(-1, T)]

    class Pace(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            turns.done(args.rows * (T - 1), args.rows * T)

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_train_batch_size=args.rows, max_steps=ENDLESS, dataloader_drop_last=True,
            learning_rate=LEARNING_RATE, weight_decay=0.01, max_grad_norm=1.0, optim="adamw_torch_fused", torch_compile=compiled,
            bf16=pick_dtype("bfloat16", device)[0] is torch.bfloat16, use_cpu=device.type == "cpu",
            logging_strategy="no", logging_nan_inf_filter=False, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(their_config, dtype=torch.float32, trust_remote_code=False)
        trainer = Trainer(model, settings, train_dataset=rows, callbacks=[Pace()])
        turns.begin(model)
        trainer.train()


def train_ours(args: argparse.Namespace, fields: dict[str, Any], device: torch.device, turns: Turns) -> None:
    """As train_pretrain.py does."""
    T = args.max_seq_len
    training = Training(fields, device, args.rows, T, compiled=args.use_compile == "1")
    engine = training.engine
    with tempfile.TemporaryDirectory() as folder:
        encoder = DocumentEncoder(load_tokenizer(DEFAULT))
        texts, reading = [args.documents_file], TextSettings(cache_dir=folder)
        corpus = Corpus(texts, encoder, reading, max_seq_len=T, seed=42, progress=False)
        turns.begin(training.model)
        # Its processes persist over epochs, as in the trainer: a GPU finishes these documents in a moment. On a CPU each process
        # would take time from the training.
        on_gpu = device.type == "cuda"
        loader = Loader(Assembler(corpus.store, args.rows if on_gpu else 0), num_workers=int(on_gpu), pin_memory=on_gpu)
        with contextlib.closing(loader):
            for epoch in itertools.count():
                plan = corpus.plan(epoch)
                for _, (batch,) in loader.updates(plan.recipe, UpdateSchedule(plan.n_rows, args.rows, args.rows)):
                    assert batch is not None
                    engine.micro_batch(to_device(batch, device), Totals(batch.n_targets, batch.n_documents))
                    engine.update(LEARNING_RATE)
                    engine.poll()
                    turns.done(batch.n_targets, batch.targets.numel())


def train_side(name: str, fields: dict[str, Any], args: argparse.Namespace, pipe: "Connection[Any, Any]") -> None:
    """Train as side `name` until the last turn. fields: of the ModelConfig."""
    # Keep prints of libraries out of the table.
    os.dup2(2, 1)
    device = torch.device(args.device)
    turns = Turns(pipe, device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = ModelConfig(**fields)
    if name == "plain":
        train_plain(args, config, device, turns)
    elif name == "ours":
        train_ours(args, fields, device, turns)
    else:
        train_hf(args, config, device, turns, compiled=name == "hf-compiled")
