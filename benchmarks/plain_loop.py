"""The plain MiniMind loop, the reference that speed and learning are compared with: tokenise each item when it is asked
for, pad it to the full length, fp32 on the CPU, eager, AdamW, one forward with all logits.

    python benchmarks/plain_loop.py --data_path train.jsonl --val_path valid.jsonl --updates 300 --learning_rate 1e-3
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import plain_loop_parser

    plain_loop_parser().parse_args()

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.arguments import plain_loop_parser
from common.errors import UserError
from dataset.corpus import Corpus
from dataset.lm_dataset import PretrainDataset
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.evaluation import evaluate
from trainer.machine.command_line import run_cli
from trainer.machine.ranks import Ranks
from trainer.optim.schedules import get_lr


def step_context(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context of one step's forward pass: bf16 on a GPU, fp32 elsewhere.

    One context around the whole loop would keep the half-precision copies of the weights that the first step made, and
    every later step would compute with the weights of the start.
    """
    if device.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return contextlib.nullcontext()


def plain_steps(
    model: MiniMindForCausalLM,
    dataset: PretrainDataset,
    batch_size: int,
    updates: int,
    lr: float,
    seed: int = 42,
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[tuple[float, int]]:
    """Train `updates` micro-batches of `batch_size` padded rows; yields (loss, text tokens) of each.

    context: makes the context of a step's forward pass. Errors: UserError where the documents are less than a batch.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=False, foreach=False)
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(dataset, batch_size, shuffle=True, drop_last=True, generator=generator)
    if len(dataset) < batch_size:
        raise UserError(f"{len(dataset)} documents are less than a batch of {batch_size}: give more, or fewer rows")
    # As many epochs as it takes.
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, batch in zip(range(updates), batches, strict=False):
        inputs, targets, mask = (part.to(device) for part in batch)
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, updates, lr)
        with context():
            output = model(inputs)
            losses = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="none")
            loss = (losses * mask.flatten()).sum() / mask.sum() + output.aux_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item(), int(mask.sum())


def main() -> None:
    args = plain_loop_parser().parse_args()

    torch.manual_seed(args.seed)
    tokenizer = load_tokenizer(ROOT / "model")
    encoder = DocumentEncoder(tokenizer)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=args.hidden_size, vocab_size=encoder.vocab_size)).train()
    dataset = PretrainDataset(args.data_path, tokenizer, max_length=args.max_seq_len)
    tokens = 0
    start = time.perf_counter()
    steps = plain_steps(model, dataset, args.batch_size, args.updates, args.learning_rate, args.seed)
    for step, (loss, n) in enumerate(steps):
        tokens += n
        if step % 25 == 0 or step == args.updates - 1:
            seconds = time.perf_counter() - start
            print(f"update {step + 1}: loss {loss:.3f}, {tokens:,} text tokens, {tokens / seconds:,.0f}/s", flush=True)

    corpus = Corpus([args.data_path], encoder, max_seq_len=args.max_seq_len, seed=args.seed, val_path=args.val_path)
    validation = corpus.validation()
    assert validation is not None
    # All that an evaluation asks of an engine and of the signals.
    engine: Any = SimpleNamespace(
        model=model, ranks=Ranks(), device=torch.device("cpu"), autocast=contextlib.nullcontext
    )
    no_signal: Any = SimpleNamespace(signum=0)
    values, _ = evaluate(engine, validation, no_signal)
    print({name: round(value, 4) for name, value in values.items()})


if __name__ == "__main__":
    run_cli(main)
