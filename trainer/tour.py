"""The whole of pretraining on one page: read text, pack it into rows, train a MiniMind on them, save it.

    python trainer/tour.py                                         # a minute or two on two CPU cores, on Python's own documentation
    python trainer/tour.py --data_path my.jsonl --max_updates 0    # one JSON object {"text": "..."} per line

Read this file first. trainer/train_pretrain.py does the same in the same order. With the same flags and --dtype float32
--use_compile 0 --cpu_processes 1 it gets the same losses and weights, bit for bit (tests/trainer/test_tour.py); but there
--max_updates limits the whole run, here each epoch. It adds what long runs need: other input formats, several processes,
half precision, compiled code, checkpoints, validation, a time budget. The model and the packing are the same code.

Shapes: B rows per micro-batch, T positions per row.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

if __package__ in (None, ""):
    # Run by path: nothing in trainer/ may shadow a dependency.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.errors import UserError, user_errors
from common.files import atomic_file
from dataset.embedded_corpus import build_embedded_corpus
from dataset.packing import EpochPlan
from model.loss import IGNORE
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.machine.command_line import run_cli

ROOT = Path(__file__).resolve().parents[1]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """A few of the flags of train_pretrain.py. The defaults train a small model in a minute or two."""
    parser = argparse.ArgumentParser(description="Pretrain a small MiniMind, on one page.")
    parser.add_argument("--data_path", help="a .jsonl of texts; default: Python's own documentation")
    parser.add_argument("--out_dir", default=str(ROOT / "out"))
    parser.add_argument("--hidden_size", type=int, default=128, help="width of the model")
    parser.add_argument("--num_hidden_layers", type=int, default=4)
    parser.add_argument("--use_moe", type=int, default=0, help="1: mixture of experts")
    parser.add_argument("--max_seq_len", type=int, default=256, help="T, positions per row")
    parser.add_argument("--batch_size", type=int, default=8, help="B, rows per micro-batch")
    parser.add_argument("--accumulation_steps", type=int, default=1, help="micro-batches per update")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--grad_clip", type=float, default=1.0, help="maximum norm of the gradient; 0: no clipping")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the text")
    parser.add_argument("--max_updates", type=int, default=150, help="maximum updates per epoch; 0: the whole text")
    parser.add_argument("--log_interval", type=int, default=10, help="micro-batches between two log lines")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights and the row order")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------------------------------- the data


def read_tokens(path: Path, tokenizer: PreTrainedTokenizerBase) -> SimpleNamespace:
    """All documents in one array: `tokens` int64 [N], and `offsets` int64 [documents + 1], where each starts.

    A document is BOS, the ids of its text, EOS. So the model learns where texts start and end.
    """
    try:
        with open(path, encoding="utf-8-sig") as lines:
            records = [json.loads(line) for line in lines if line.strip()]
    except ValueError:
        records = []
    if not records or not all(isinstance(record, dict) and isinstance(record.get("text"), str) for record in records):
        raise UserError(f'{path}: each line must be an object {{"text": "..."}}, in UTF-8')
    # As in train_pretrain.py: empty texts are skipped, and BOS and EOS spelt out around MiniMind's texts are not doubled.
    texts = [record["text"].removeprefix(tokenizer.bos_token) for record in records if record["text"]]
    texts = [text.removesuffix(tokenizer.eos_token) for text in texts]
    if not texts:
        raise UserError(f"{path}: no text in it")
    # split_special_tokens: text that spells a special token, such as a page about this tokenizer, must not become one.
    ids_of_texts = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    documents = [[tokenizer.bos_token_id, *ids, tokenizer.eos_token_id] for ids in ids_of_texts]
    lengths = [len(document) for document in documents]
    return SimpleNamespace(tokens=np.concatenate(documents), offsets=np.cumsum([0, *lengths]))


def make_batch(data: SimpleNamespace, plan: EpochPlan, rows: range) -> tuple[torch.Tensor, ...]:
    """Returns input_ids, targets, document_ids and position_ids, each int64 [B, T], of some rows of the plan.

    Documents share rows, so there is little padding (`plan` assigns them, see dataset/packing.py). A piece of a document with
    n (input, target) pairs takes n positions: the target of a position is the next token of the same document. `document_ids`
    separates the documents of a row: a position attends only to itself and earlier ones of its document. Padding has document -1 and
    no target (IGNORE, the ignore_index of torch's cross-entropy).
    """
    shape = (len(rows), plan.T)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORE)
    document_ids = torch.full(shape, -1)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    for b, row in enumerate(rows):
        t = 0
        for number, (document, start, pairs) in enumerate(plan.pieces_of_row(row)):
            # `start` is relative to the document.
            begin = data.offsets[document] + start
            piece = torch.tensor(data.tokens[begin : begin + pairs + 1])
            input_ids[b, t : t + pairs] = piece[:-1]
            targets[b, t : t + pairs] = piece[1:]
            document_ids[b, t : t + pairs] = number
            position_ids[b, t : t + pairs] = torch.arange(pairs)
            t += pairs
    return input_ids, targets, document_ids, position_ids


def slices(first: int, end: int, size: int) -> Iterator[range]:
    """range(first, end) in pieces of `size`; the last one may be shorter."""
    return (range(at, min(at + size, end)) for at in range(first, end, size))


# -------------------------------------------------------------------------------------------------------- the training


def train(args: argparse.Namespace) -> None:
    """Train as the flags say, and save the weights. Errors: UserError for unreadable data and shapes that do not fit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    with user_errors():
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "model", trust_remote_code=False)
        config = MiniMindConfig(
            hidden_size=args.hidden_size,
            num_hidden_layers=args.num_hidden_layers,
            use_moe=bool(args.use_moe),
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = MiniMindForCausalLM(config).train()
        data_path = args.data_path or build_embedded_corpus()
        data = read_tokens(Path(data_path), tokenizer)

    model.to(device)
    # Weight decay pulls matrices towards 0. Norm weights are factors around 1 and get none.
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    parameters = matrices + vectors
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, fused=True)
    n_parameters = sum(p.numel() for p in parameters)
    print(f"{n_parameters / 1e6:.2f} M parameters, {len(data.tokens):,} tokens of {data_path}, on {device}")

    rows_of_update = args.batch_size * args.accumulation_steps
    for epoch in range(args.epochs):
        # Seed and epoch determine which documents share a row, and the order of the rows.
        plan = EpochPlan(data.offsets, args.max_seq_len, args.seed, epoch)
        n_rows = min(plan.n_rows, args.max_updates * rows_of_update) if args.max_updates else plan.n_rows
        # A step is a micro-batch, as in MiniMind's log lines.
        n_steps = math.ceil(n_rows / args.batch_size)
        loss_sum = 0.0
        targets_since_line = 0
        started = time.perf_counter()
        for update_rows in slices(0, n_rows, rows_of_update):
            # MiniMind's cosine schedule: from 1.1 down to 0.1 times the learning rate, over the rows of the run.
            done = (epoch + update_rows.start / n_rows) / args.epochs
            rate = args.learning_rate * (0.1 + 0.5 * (1 + math.cos(math.pi * done)))
            # The loss of an update is the mean over its targets. Each micro-batch adds its sum, divided by the targets of the
            # whole update, so the gradient does not depend on how the rows are split into micro-batches.
            n_targets, n_documents = plan.totals(update_rows.start, update_rows.stop)
            first_step = update_rows.start // args.batch_size
            micro_batches = slices(update_rows.start, update_rows.stop, args.batch_size)
            for step, rows in enumerate(micro_batches, first_step):
                batch = [part.to(device) for part in make_batch(data, plan, rows)]
                # Cross-entropy: summed over the targets. Auxiliary loss, which balances the experts' load: a mean over the
                # documents (0 for a dense model).
                cross_entropy, aux_loss = model.training_losses(*batch)
                targets, documents = plan.totals(rows.start, rows.stop)
                loss = cross_entropy / n_targets + aux_loss * (documents / n_documents)
                loss.backward()
                loss_sum += cross_entropy.item()
                targets_since_line += targets
                if step % args.log_interval == 0 or step == n_steps - 1:
                    done_steps = step + 1
                    minutes_left = (time.perf_counter() - started) / done_steps * (n_steps - done_steps) / 60
                    place = f"Epoch:[{epoch + 1}/{args.epochs}]({step}/{n_steps})"
                    mean_loss = loss_sum / targets_since_line
                    print(f"{place} loss:{mean_loss:.3f} lr:{rate:.12f} epoch_Time:{minutes_left:.1f}min:", flush=True)
                    loss_sum = 0.0
                    targets_since_line = 0
            norm = torch.nn.utils.clip_grad_norm_(parameters, args.grad_clip or math.inf)
            if norm.isfinite():
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
            else:
                print(f"step {step}: the gradient is not finite: this update is not applied")
            optimizer.zero_grad()

    path = save(model, Path(args.out_dir))
    print(sample(model, tokenizer, "Return the"))
    print(f"saved: {path}; talk to it: python scripts/generate.py --weight {path}")


def save(model: MiniMindForCausalLM, out_dir: Path) -> Path:
    """Save the weights in half precision, as MiniMind's code loads them, and the config beside them."""
    out_dir.mkdir(parents=True, exist_ok=True)
    moe = "_moe" if model.config.use_moe else ""
    path = out_dir / f"tour_{model.config.hidden_size}{moe}.pth"
    with atomic_file(path) as weights, atomic_file(path.with_suffix(".json")) as config:
        torch.save({name: tensor.half().cpu() for name, tensor in model.state_dict().items()}, weights)
        config.write(json.dumps(model.config.to_dict(), indent=2).encode())
    return path


def sample(model: MiniMindForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """The prompt and its continuation."""
    model.eval()
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    continued = model.generate(ids, max_new_tokens=60, do_sample=True, temperature=0.7, top_k=50)  # type: ignore[misc]
    return str(tokenizer.decode(continued[0], skip_special_tokens=True))


if __name__ == "__main__":
    # Unreadable data ends in one line. Ctrl-C ends without saving; train_pretrain.py saves, and can resume.
    run_cli(lambda: train(parse_args()))
