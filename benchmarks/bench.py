"""Training speed against the plain MiniMind loop and the Hugging Face Trainer, side by side in one run.

    python benchmarks/bench.py                                             # 26 M, all cores, about 4 minutes
    python benchmarks/bench.py --sizes 26m 104m 64m moe --threads 1 2      # everything
    python benchmarks/bench.py --sizes tiny --threads 1 --seconds 30       # smoke test

    plain        each document padded to a full row, eager, AdamW; fp32 on a CPU, bf16 autocast on a GPU
    hf           Trainer with Llama (or Qwen3, Qwen2-MoE) of the same shape: bf16, fused AdamW, full rows of
                 concatenated documents, with attention across their borders
    hf-compiled  the same with torch_compile; ours is compared with the faster of the two
    ours         Corpus, loader, engine and compiled blocks as train_pretrain.py puts them together

Each side is a separate process, so that its peak memory is measured alone. Sides train in turns: rounds of short
slices, in which matrix products are timed too, in bf16 where supported. A ratio is the median over the rounds, with its
range.
All sides train on the same documents: English and Chinese Wikipedia (docs/corpora.md), or the embedded corpus if
MINIMIND_REFERENCE has none, cut to 325 tokens on average. "text" counts trained targets, without padding.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.training import LEARNING_RATE, SIZES, Training, corpus_files, texts_of
from common.errors import UserError, user_errors
from common.files import atomic_file
from common.flags import Parser, at_least, positive
from common.start import ROOT
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
from trainer.machine.command_line import run_cli
from trainer.machine.devices import pick_device, pick_dtype
from trainer.machine.measure import peak_memory, product_rate, synchronize
from trainer.optim.schedules import get_lr
from trainer.pretrain.memory import flops_per_token

# Tokens of a document, BOS and EOS included: drawn from this range, then cut to MAX_TOKENS.
LENGTHS = (64, 600)
MAX_TOKENS = 512
# more updates than any run makes
ENDLESS = 10**6
# Each side imports torch itself, with its own number of threads.
SPAWN = multiprocessing.get_context("spawn")
# Figures of a turn, of a side, or of a run
Figures = dict[str, Any]


def write_documents(path: str, n: int) -> list[int]:
    """Write the starts of `n` texts, or of as many as there are; returns the number of (input, target) pairs of each.

    325 tokens on average, MAX_TOKENS at most; texts that are too short are skipped.
    """
    tokenizer = load_tokenizer(DEFAULT)
    draw = random.Random(0)
    length = min(draw.randint(*LENGTHS), MAX_TOKENS)
    documents: list[str] = []
    for text in itertools.chain.from_iterable(zip(*map(texts_of, corpus_files()), strict=False)):
        text = text[: 8 * MAX_TOKENS]
        ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        # The encoder adds BOS and EOS.
        if len(ends) >= length - 2:
            documents.append(text[: ends[length - 3][1]])
            length = min(draw.randint(*LENGTHS), MAX_TOKENS)
        if len(documents) == n:
            break
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    return [len(ids) - 1 for ids in DocumentEncoder(tokenizer).encode(documents)]


# ------------------------------------------------------------------------------------- the process of a side


class Turns:
    """Lets a side train in turns: a pipe brings the seconds of each, and takes its figures. The process ends with the pipe."""

    def __init__(self, pipe: "Connection[Any, Any]", device: torch.device) -> None:
        self.pipe = pipe
        self.device = device

    def begin(self, model: nn.Module) -> None:
        """All is set up, the first update of `model` comes next."""
        self.parameters = sum(p.numel() for p in model.parameters())
        self.wait()

    def wait(self) -> None:
        """Block until the next turn; end the process if there is none."""
        try:
            self.limit = self.pipe.recv()
        except (EOFError, ConnectionError):
            sys.exit()
        self.updates = self.text = self.positions = 0
        self.start = time.perf_counter()

    def done(self, text: int, positions: int) -> None:
        """Count an update of `text` targets in `positions` positions, and end a turn that is over."""
        self.updates += 1
        self.text += text
        self.positions += positions
        if time.perf_counter() - self.start < self.limit:
            return
        synchronize(self.device)
        seconds = time.perf_counter() - self.start
        of_turn = {"updates": self.updates, "text": self.text, "positions": self.positions, "seconds": seconds}
        self.pipe.send({**of_turn, "parameters": self.parameters, "peak_memory_bytes": peak_memory(self.device)})
        self.wait()


def train_plain(args: argparse.Namespace, fields: dict[str, Any], device: torch.device, turns: Turns) -> None:
    """The plain MiniMind loop: each item padded to the full length, eager, AdamW, one forward with all logits; bf16 autocast
    on a GPU, fp32 elsewhere."""
    model: MiniMindForCausalLM = MiniMindForCausalLM(ModelConfig(**fields)).to(device).train()  # type: ignore[arg-type]  # wrapped without types
    dataset = PretrainDataset(args.text, load_tokenizer(DEFAULT), args.max_seq_len)
    turns.begin(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=False, foreach=False)
    loader = DataLoader(dataset, args.rows, shuffle=True, generator=torch.Generator().manual_seed(42))
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
    args: argparse.Namespace, fields: dict[str, Any], device: torch.device, turns: Turns, compiled: bool = False
) -> None:
    """The Hugging Face Trainer. Labels are the inputs, shifted by the model: T - 1 targets a row."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from model.hf_format import hf_config

    config = hf_config(ModelConfig(**fields))
    T = args.max_seq_len
    if hasattr(config, "output_router_logits"):
        # With auxiliary loss, as on the other sides
        config.output_router_logits = True
    documents = DocumentEncoder(load_tokenizer(DEFAULT)).encode(list(texts_of(args.text)))
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
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
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
        reading = TextSettings(cache_dir=folder)
        corpus = Corpus([args.text], encoder, reading, max_seq_len=T, seed=42, progress=False)
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


SIDES: dict[str, Callable[..., None]] = {
    "plain": train_plain,
    "hf": train_hf,
    "hf-compiled": partial(train_hf, compiled=True),
    "ours": train_ours,
}


def train_side(name: str, size: str, args: argparse.Namespace, pipe: "Connection[Any, Any]") -> None:
    """Train until no further turn comes."""
    # Keep prints of libraries out of the table.
    os.dup2(2, 1)
    # The first of those that the process sees
    device = torch.device(torch.device(args.device).type)
    torch.manual_seed(0)
    SIDES[name](args, SIZES[size], device, Turns(pipe, device))


# ------------------------------------------------------------------------------------- the run


@contextlib.contextmanager
def process_of(
    name: str, size: str, args: argparse.Namespace, variables: Mapping[str, str]
) -> Iterator[Callable[[float], Figures | None]]:
    """The process of a side: a function that lets it train for some seconds. It returns the figures; None once the process has ended.

    variables: of its environment.
    """
    pipe, its_end = SPAWN.Pipe()
    process = SPAWN.Process(target=run_cli, args=(partial(train_side, name, size, args, its_end),))
    with mock.patch.dict(os.environ, variables):
        process.start()
    # Only the process holds it now, so that its end is noticed here.
    its_end.close()

    def turn(seconds: float) -> Figures | None:
        try:
            pipe.send(seconds)
            figures: Figures = pipe.recv()
        except (EOFError, ConnectionError):
            return None
        return figures

    try:
        yield turn
    finally:
        pipe.close()
        process.join()


def environment(threads: int, device: torch.device) -> dict[str, str]:
    """Variables of the sides: their threads, and one GPU, since the Trainer would take all."""
    variables = {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        variables["CUDA_VISIBLE_DEVICES"] = visible[device.index or 0] if visible[0] else str(device.index or 0)
    return variables


def measure(size: str, threads: int, args: argparse.Namespace, pairs: Sequence[int]) -> Figures:
    """All sides on one size, in turns for `args.seconds`, setup included. Returns its figures.

    pairs: the number of (input, target) pairs of each document.
    """
    deadline = time.monotonic() + args.seconds
    device = torch.device(args.device)
    dtype, _ = pick_dtype("bfloat16", device)
    T = args.max_seq_len
    torch.set_num_threads(threads)
    rates: list[float] = []
    firsts: dict[str, float] = {}
    slices: dict[str, list[Figures]] = {}
    with contextlib.ExitStack() as stack:
        turns = {}
        # One after the other, so that none disturbs another
        for name in args.sides:
            turn = stack.enter_context(process_of(name, size, args, environment(threads, device)))
            # Two updates without a measured turn: the first compiles, the second still sets things up.
            first = turn(0)
            if first is None or turn(0) is None:
                print(f"{name}: could not start (its error is above) and is left out", flush=True)
                continue
            turns[name], firsts[name], slices[name] = turn, first["seconds"], []
        if not turns:
            raise UserError(f"{size}: none of the sides {', '.join(args.sides)} could start")
        round_seconds = 0.0
        while len(rates) < 3 or time.monotonic() + round_seconds < deadline:
            begin = time.monotonic()
            rates.append(product_rate(device, dtype, (1024, 2048, 4096) if device.type == "cpu" else None))
            # Back and forth, so that no side always follows the same other one
            for name in list(turns) if len(rates) % 2 else reversed(turns):
                figures = turns[name](args.slice)
                if figures is None:
                    raise UserError(f"{name} on {size} has ended within the run (its error is above)")
                # Its rows have one document each, and a turn has too few of them to estimate the padding.
                if name == "plain":
                    figures["text"] = figures["positions"] * sum(min(n, T - 1) for n in pairs) / (len(pairs) * (T - 1))
                slices[name].append(figures)
            round_seconds = time.monotonic() - begin
    run: Figures = {"size": size, "threads": threads, "rounds": len(rates), "product_flops": max(rates), "sides": {}}
    run |= {name: getattr(args, name) for name in ("device", "rows", "max_seq_len", "slice")}
    for name in slices:
        # Context as in flops_per_token: the whole row for the Trainer, for the others a token's own document, at most a row.
        seen = [min(n, T) for n in pairs]
        context = T if name.startswith("hf") else sum(n * n for n in seen) / sum(seen)
        flops = flops_per_token(ModelConfig(**SIZES[size]), context)
        run["sides"][name] = summary(slices[name], flops / max(rates)) | {"first_update_seconds": firsts[name]}
    return {**run, "ratios": ratios(slices)}


def rate(part: Figures) -> float:
    """Text tokens per second."""
    return float(part["text"] / part["seconds"])


def summary(slices: Sequence[Figures], product_seconds: float) -> Figures:
    """Figures of one side. product_seconds: those of a text token at the best rate of a matrix product in the run."""
    text, positions = (sum(part[name] for part in slices) for name in ("text", "positions"))
    middle = median(map(rate, slices))
    return {
        **{name: slices[-1][name] for name in ("parameters", "peak_memory_bytes")},
        "text_tokens_per_second": middle,
        "updates_per_second": median(part["updates"] / part["seconds"] for part in slices),
        "padding": 1 - text / positions,
        "utilisation": middle * product_seconds,
        "slices": slices,
    }


def ratios(slices: Mapping[str, Sequence[Figures]]) -> dict[str, tuple[float, float, float]]:
    """{what: (median, least, greatest) over the rounds} of ours against plain and the faster Trainer, from {side: its slices}."""
    ratio_of = {}
    middles = {name: median(map(rate, slices[name])) for name in slices if name.startswith("hf")}
    fastest = max(middles, key=middles.__getitem__, default="no Trainer")
    for other in ("plain", fastest):
        if "ours" in slices and other in slices:
            each = [rate(a) / rate(b) for a, b in zip(slices["ours"], slices[other], strict=True)]
            ratio_of[f"ours / {other}, text tokens"] = (median(each), min(each), max(each))
    return ratio_of


def show(run: Figures) -> None:
    """Print a run as a table and its ratios."""
    print(
        f"\n{run['size']}, {run['threads']} threads, {run['device']}, {run['rows']} x {run['max_seq_len']}, "
        f"{run['rounds']} rounds; best product {run['product_flops'] / 1e9:,.0f} GFLOP/s"
    )
    print("| side | M parameters | text tokens/s | updates/s | padding | utilisation | peak GB | first update s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, side in run["sides"].items():
        print(
            f"| {name} | {side['parameters'] / 1e6:.2f} | {side['text_tokens_per_second']:,.0f} | {side['updates_per_second']:.3g} "
            f"| {side['padding']:.1%} | {side['utilisation']:.1%} | {side['peak_memory_bytes'] / 1e9:.2f} | "
            f"{side['first_update_seconds']:.1f} |"
        )
    for what, (middle, least, greatest) in run["ratios"].items():
        print(f"{what}: {middle:.2f} ({least:.2f} to {greatest:.2f})")
    sys.stdout.flush()


def main() -> None:
    p = Parser(prog="bench.py", description="Training speed against MiniMind's loop and the Hugging Face Trainer.")
    p.add_argument("--sizes", nargs="+", choices=SIZES, default=["26m"], help="models to train (default 26m)")
    p.add_argument("--threads", nargs="+", type=positive(int), help="one run for each (default: one per core)")
    p.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="those to compare (default: all)")
    p.add_argument("--seconds", type=positive(float), default=240, help="for a size and thread count (default 240)")
    p.add_argument("--slice", type=positive(float), default=3.0, help="seconds of a turn (default 3)")
    p.add_argument("--rows", type=positive(int), help="of a micro-batch (default: 32 on a GPU, 8 on a CPU)")
    p.add_argument(
        "--max_seq_len",
        type=at_least(2, "to hold an input and a target"),
        default=512,
        help="positions in a row (default 512)",
    )
    p.add_argument("--documents", type=positive(int), default=4000, help="how many (default 4000)")
    p.add_argument("--use_compile", choices=("0", "1"), default="1", help="1: compile our side (default 1)")
    p.add_argument("--device", help="cuda:0, mps or cpu (default: the first available)")
    p.add_argument("--out", default=str(ROOT / "out" / "bench.json"), help="all figures (default: out/bench.json)")
    args = p.parse_args()
    args.device = str(pick_device(args.device))
    args.threads = args.threads or [torch.get_num_threads()]
    args.rows = args.rows or (32 if args.device.startswith("cuda") else 8)
    out = Path(args.out)
    with user_errors():
        # Before minutes of work: an unwritable path fails at once.
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        args.text = str(Path(folder, "documents.jsonl"))
        pairs = write_documents(args.text, args.documents)
        print(f"{len(pairs):,} documents of {sum(pairs) / len(pairs):.0f} tokens on average", flush=True)
        for size, threads in itertools.product(args.sizes, args.threads):
            runs.append(measure(size, threads, args, pairs))
            show(runs[-1])
            with atomic_file(out) as file:
                file.write(json.dumps(runs, indent=1).encode())
    print(f"\nall figures: {out}")


if __name__ == "__main__":
    run_cli(main)
