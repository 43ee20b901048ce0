"""The sides of the ELECTRA row of benchmarks/bench.py: the small networks, 128 positions an example, 30,522 entries.

All train on the same batches. The plain ones make their step as the public PyTorch trainers do, one in fp32 and one under
bf16 autocast: Hugging Face's networks, eager, the generator's head on every position, unfused AdamW, and a loss that is
printed after each step. Ours computes in bf16, compiled, as train_electra.py does.
"""

import argparse
import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.sides import Turns
from benchmarks.training import LEARNING_RATE
from common.errors import UserError
from dataset.electra.electra_dataset import Batch, ElectraAssembler, ElectraPlan, Examples, Totals
from dataset.loader import Loader, UpdateSchedule
from dataset.store.token_store import open_or_build
from dataset.tokenizing.encoder import LineEncoder
from dataset.tokenizing.sample import TextSource
from dataset.tokenizing.wordpiece import train_wordpiece
from model.electra.masking import IGNORE
from model.electra.model_electra import ElectraPretrainer, configs, flops_per_token
from model.electra.sampling import sample
from model.electra.sizes import SIZES
from trainer.electra.loss import DISC_WEIGHT, N_SUMS, electra_loss
from trainer.engine import Engine
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import pick_dtype
from trainer.machine.ranks import Ranks
from trainer.optim.build import build_adamw, parameter_groups

T = SIZES["small"].max_seq_len
SHARE = SIZES["small"].mask_share
# Of the vocabulary
ENTRIES = 30_522


def flops() -> float:
    """FLOPs of a position in a training step that needs the head on masked positions alone."""
    return flops_per_token(*configs(SIZES["small"], ENTRIES), T, SHARE)


def new_model() -> ElectraPretrainer:
    return ElectraPretrainer.from_configs(*configs(SIZES["small"], ENTRIES)).train()


def rows_of(args: argparse.Namespace) -> int:
    """Of a batch: it has as many positions as the other sizes' micro-batches."""
    return max(1, args.rows * args.max_seq_len // T)


def batches(args: argparse.Namespace, folder: str) -> Iterator[tuple[Batch, Totals]]:
    """(Batch, Totals) without end."""
    tokenizer = train_wordpiece(TextSource(args.documents_file).documents(), ENTRIES)
    encoder = LineEncoder(tokenizer)
    rows = rows_of(args)
    store = open_or_build(args.documents_file, encoder, cache_dir=folder, num_procs=args.threads, progress=False)
    examples = Examples(store, T, encoder.sep_id, 42)
    assembler = ElectraAssembler(store, tokenizer, T, SHARE, "electra", 42)
    # As the trainer's: its processes live on from epoch to epoch, and a GPU fetches batches by itself.
    loader = Loader(assembler, num_workers=args.num_workers, pin_memory=args.device == "cuda")
    with contextlib.closing(loader):
        for epoch in itertools.count():
            plan = ElectraPlan(examples, SHARE, 42, epoch)
            whole = plan.n_rows // rows * rows
            if not whole:
                raise UserError(f"{plan.n_rows} examples are less than a batch of {rows}: give more --documents")
            schedule = UpdateSchedule(whole, rows)
            for update, (batch,) in loader.updates(plan, schedule):
                assert batch is not None
                yield batch, plan.totals(*schedule.rows(update))


def products_in(dtype: torch.dtype, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context of one step's forward pass. Each step needs its own, see `step_context` of the plain loop."""
    if dtype is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def plain_loss(model: ElectraPretrainer, batch: Batch) -> torch.Tensor:
    """The loss of a Batch as public trainers compute it, 0-d."""
    seen = (torch.arange(T, device=batch.ids.device) < batch.lengths[:, None]).long()
    inputs = {"attention_mask": seen, "token_type_ids": batch.token_type_ids}
    used = batch.labels != IGNORE
    masked = torch.zeros_like(seen).scatter_add(1, batch.positions, used.long()).bool()
    logits = model.generator(batch.masked_ids, **inputs).logits  # [R, T, V]
    mlm = F.cross_entropy(logits[masked], batch.ids[masked])
    corrupted = batch.ids.clone()
    corrupted[masked] = sample(logits[masked].detach(), "fp32_gumbel")
    replaced = (corrupted != batch.ids).float()
    disc = model.discriminator(corrupted, **inputs).logits
    real = seen.bool()
    return mlm + DISC_WEIGHT * F.binary_cross_entropy_with_logits(disc[real], replaced[real])


def train_plain(args: argparse.Namespace, device: torch.device, turns: Turns, dtype: torch.dtype) -> None:
    """dtype: of matrix products; float32 goes without autocast."""
    model = new_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-6, fused=False, foreach=False)
    with tempfile.TemporaryDirectory() as folder:
        for step, (batch, totals) in enumerate(batches(args, folder)):
            if not step:
                turns.begin(model)
            with products_in(dtype, device):
                loss = plain_loss(model, batch.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            # Printed by the public trainers.
            loss.item()
            turns.done(totals.targets, batch.ids.numel())


def train_ours(args: argparse.Namespace, device: torch.device, turns: Turns) -> None:
    model = new_model().to(device)
    dtype, _ = pick_dtype("bfloat16", device)
    optimizer = build_adamw(parameter_groups(model, 0.01), LEARNING_RATE, eps=1e-6)
    engine = Engine(
        model,
        optimizer,
        partial(electra_loss, model),
        device=device,
        dtype=dtype,
        ranks=Ranks(),
        n_sums=N_SUMS,
    )
    compile_blocks(model, args.use_compile, device, print, (rows_of(args), T), dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        for step, (batch, totals) in enumerate(batches(args, folder)):
            if not step:
                turns.begin(model)
            engine.micro_batch(batch.to(device), totals, last=True)
            engine.update(LEARNING_RATE)
            engine.poll()
            turns.done(totals.targets, batch.ids.numel())
