"""The whole of pretraining: read text, pack it into rows, train a MiniMind on them, save it, let it speak.

    python trainer/tour.py                                         # a minute or two on two CPU cores, on Python's own documentation
    python trainer/tour.py --data_path my.jsonl --max_updates 0    # one JSON object {"text": "..."} per line

This file, model/plain.py, `chunked_cross_entropy` in model/loss.py and `naive_rows` in dataset/packing.py are the whole of it.
Tests prove that the fast code computes the same bits: trainer/train_pretrain.py with these flags and --dtype float32 --use_compile 0
--cpu_processes 1 has the same losses and weights (but there --max_updates limits the whole run, here each epoch). It adds what long
runs need: other formats, experts, several processes, half precision, compiled code, checkpoints, validation, a time budget.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # Run by path: nothing in trainer/ may shadow a dependency.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.errors import UserError, user_errors
from common.start import ROOT
from dataset.embedded_corpus import build_embedded_corpus
from dataset.packing import Piece, naive_rows
from model.config import IGNORE
from model.loss import chunked_cross_entropy
from model.plain import Config, MiniMind
from trainer.machine.command_line import run_cli


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """A few of the flags of train_pretrain.py. The defaults train a small model in a minute or two."""
    parser = argparse.ArgumentParser(description="Pretrain a small MiniMind, on one page.")
    parser.add_argument("--data_path", help="a .jsonl of texts; default: Python's own documentation")
    parser.add_argument("--out_dir", default=str(ROOT / "out"))
    parser.add_argument("--hidden_size", type=int, default=128, help="width of the model, a multiple of 16")
    parser.add_argument("--num_hidden_layers", type=int, default=4)
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


def read_documents(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The documents of a file, each BOS, the ids of its text, EOS: so the model learns where texts start and end."""
    try:
        with open(path, encoding="utf-8-sig") as lines:
            texts = [json.loads(line)["text"] for line in lines if line.strip()]
        # As in train_pretrain.py: empty texts are skipped, and BOS and EOS spelt out around MiniMind's texts are not doubled.
        texts = [text.removeprefix(tokenizer.bos_token).removesuffix(tokenizer.eos_token) for text in texts if text]
    except (ValueError, TypeError, KeyError, AttributeError):
        texts = []
    if not texts:
        raise UserError(f'{path}: no texts: each line must be an object {{"text": "..."}}, in UTF-8')
    # split_special_tokens: text that spells a special token, such as a page about this tokenizer, must not become one.
    ids_of_texts = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [[tokenizer.bos_token_id, *ids, tokenizer.eos_token_id] for ids in ids_of_texts]


def make_batch(documents: list[list[int]], rows: list[list[Piece]], T: int) -> tuple[torch.Tensor, ...]:
    """Returns input_ids, targets, document_ids and position_ids, each int64 [B, T].

    A piece of a document with n (input, target) pairs takes n positions of a row: the target of a position is the next token of
    the same document. `document_ids` separates documents: a position attends only to itself and earlier ones of its document.
    Padding has document -1 and no target (IGNORE).
    """
    shape = (len(rows), T)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORE)
    document_ids = torch.full(shape, -1)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    for b, row in enumerate(rows):
        t = 0
        for number, (document, start, pairs) in enumerate(row):
            piece = torch.tensor(documents[document][start : start + pairs + 1])
            input_ids[b, t : t + pairs] = piece[:-1]
            targets[b, t : t + pairs] = piece[1:]
            document_ids[b, t : t + pairs] = number
            position_ids[b, t : t + pairs] = torch.arange(pairs)
            t += pairs
    return input_ids, targets, document_ids, position_ids


def train(args: argparse.Namespace) -> None:
    """Train as the flags say, and save the weights. Errors: UserError for unreadable data and a width that does not fit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    if args.hidden_size % 16:
        raise UserError(
            f"--hidden_size {args.hidden_size} is not a multiple of 16: eight heads whose dimensions RoPE pairs"
        )
    with user_errors():
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "model", trust_remote_code=False)
        model = MiniMind(Config(len(tokenizer), args.hidden_size, args.num_hidden_layers)).to(device)
        data_path = args.data_path or build_embedded_corpus()
        documents = read_documents(Path(data_path), tokenizer)

    # Weight decay pulls matrices towards 0. Norm weights are factors around 1 and get none.
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    parameters = matrices + vectors
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, fused=True)
    lengths = [len(document) for document in documents]
    print(f"{sum(p.numel() for p in parameters):,} parameters, {sum(lengths):,} tokens of {data_path}, on {device}")

    rows_of_update = args.batch_size * args.accumulation_steps
    for epoch in range(args.epochs):
        # Seed and epoch determine which documents share a row, and the order of the rows.
        rows = naive_rows(lengths, args.max_seq_len, np.random.PCG64([args.seed, epoch]))
        if args.max_updates:
            rows = rows[: args.max_updates * rows_of_update]
        # A step is a micro-batch, as in MiniMind's log lines.
        n_steps = math.ceil(len(rows) / args.batch_size)
        loss_sum = 0.0
        targets_since_line = 0
        for start in range(0, len(rows), rows_of_update):
            # MiniMind's cosine schedule: from 1.1 down to 0.1 times the learning rate, over the rows of the run.
            done = (epoch + start / len(rows)) / args.epochs
            rate = args.learning_rate * (0.1 + 0.5 * (1 + math.cos(math.pi * done)))
            # The loss of an update is the mean over its targets. Each micro-batch adds its sum, divided by the targets of the
            # whole update, so the gradient does not depend on how the rows are split into micro-batches.
            update_rows = rows[start : start + rows_of_update]
            n_targets = sum(pairs for row in update_rows for _, _, pairs in row)
            for first in range(0, len(update_rows), args.batch_size):
                step = (start + first) // args.batch_size
                batch = make_batch(documents, update_rows[first : first + args.batch_size], args.max_seq_len)
                input_ids, targets, document_ids, position_ids = (part.to(device) for part in batch)
                hidden = model(input_ids, document_ids, position_ids)
                # F.cross_entropy(logits, targets, reduction="sum") of logits = lm_head(hidden), never all of them in memory.
                loss = chunked_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, targets.flatten())
                (loss / n_targets).backward()
                loss_sum += loss.item()
                targets_since_line += int((targets != IGNORE).sum())
                if step % args.log_interval == 0 or step == n_steps - 1:
                    progress = f"Epoch:[{epoch + 1}/{args.epochs}]({step}/{n_steps})"
                    print(f"{progress} loss:{loss_sum / targets_since_line:.3f} lr:{rate:.12f}", flush=True)
                    loss_sum = 0.0
                    targets_since_line = 0
            torch.nn.utils.clip_grad_norm_(parameters, args.grad_clip or math.inf)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

    path = save(model, Path(args.out_dir))
    print(sample(model, tokenizer, "Return the"))
    print(f"saved: {path}; talk to it: python scripts/generate.py --weight {path}")


def save(model: MiniMind, out_dir: Path) -> Path:
    """Save the weights in half precision, as MiniMind's code loads them, and the config beside them."""
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / f"tour_{model.config.hidden_size}.pth"
    torch.save({name: tensor.half().cpu() for name, tensor in model.state_dict().items()}, path)
    path.with_suffix(".json").write_text(json.dumps(vars(model.config), indent=2))
    return path


@torch.no_grad()
def sample(model: MiniMind, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """The prompt and its continuation, token by token, each one of the 50 most probable."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.lm_head.weight.device)
    while ids.shape[1] < 64 and ids[0, -1] != tokenizer.eos_token_id:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        logits, candidates = model.lm_head(model(ids, torch.zeros_like(ids), positions)[:, -1]).topk(50)
        choice = torch.multinomial((logits / 0.7).softmax(dim=-1), 1)
        ids = torch.cat((ids, candidates.gather(1, choice)), dim=1)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


if __name__ == "__main__":
    run_cli(lambda: train(parse_args()))
