"""The flags that all trainers share, and those of the main one."""

import argparse
from pathlib import Path

from common.flags import HelpWithDefaults, Parser, fraction, not_negative, positive, seed
from common.wording import counted
from dataset.reading.file_kinds import TEXT_SUFFIXES_HELP, text_suffix
from trainer.optim.schedules import SCHEDULES
from trainer.reporting.trackers import TRACKERS

ROOT = Path(__file__).resolve().parents[1]
MOST_WORKERS = 64
MOST_LAYERS = 1000


def row_length(text: str) -> int:
    value = positive(int)(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text} must be at least 2 to hold an input and a target")
    return value


def workers(text: str) -> int:
    """A number of loader processes. Each takes memory and file handles, and one or two keep up with any device."""
    value = int(text)
    if not 0 <= value <= MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to {MOST_WORKERS}; one or two are enough")
    return value


def layers(text: str) -> int:
    """A number of blocks. They are built one by one, so a slip of the keyboard would be built for hours."""
    value = int(text)
    if not 0 < value <= MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"{text} must be from 1 to {MOST_LAYERS:,}")
    return value


def file_prefix(text: str) -> str:
    """What file names begin with. --out_dir says which folder they are in."""
    if not text.strip() or "/" in text or "\\" in text:
        raise argparse.ArgumentTypeError(f"{text!r} must be the beginning of a file name, not a path: see --out_dir")
    return text


def new_parser(prog, description):
    return Parser(
        prog=prog,
        description=description,
        formatter_class=HelpWithDefaults,
        allow_abbrev=False,
    )


count, size = positive(int), not_negative(int)


def output_flags(p, out_dir, project, save_interval=100, log_interval=100):
    """The group "output" of every trainer; returns it."""
    g = p.add_argument_group("output")
    g.add_argument("--out_dir", "--save_dir", default=out_dir, help="folder for weights, checkpoints and metrics")
    g.add_argument("--save_interval", type=count, default=save_interval, help="micro-batches between saves")
    g.add_argument("--keep_checkpoints", type=count, default=2, help="resume checkpoints to keep")
    g.add_argument("--log_interval", type=count, default=log_interval, help="micro-batches between log lines")
    p.switch(g, "--report", True, "write {name}.report.html and .loss.png at the end")
    g.add_argument("--tracker", choices=("none", *TRACKERS), default="none", help="log to an experiment tracker too")
    p.switch(g, "--use_wandb", False, "--tracker wandb (WANDB_MODE=offline needs no network)")
    g.add_argument("--wandb_project", default=project, help="project in the tracker")
    return g


def data_flags(p, g):
    """What every trainer that reads text asks about it."""
    g.add_argument("--text_field", default="text", help="the field that holds the text")
    p.switch(g, "--skip_bad_lines", False, "skip and count faulty lines instead of stopping at the first")
    g.add_argument("--text_suffixes", type=text_suffix, nargs="+", metavar="SUFFIX", help=TEXT_SUFFIXES_HELP)
    g.add_argument("--cache_dir", help="folder for tokenised data (default: .token_store beside the data)")


def update_flags(p, g, batch_size, accumulation_steps, learning_rate, weight_decay=0.01):
    """What every trainer's updates are made of."""
    g.add_argument("--batch_size", type=count, default=batch_size, help="rows per micro-batch and rank")
    g.add_argument("--accumulation_steps", type=count, default=accumulation_steps, help="micro-batches per update")
    g.add_argument("--learning_rate", type=positive(float), default=learning_rate, help="what the schedule multiplies")
    g.add_argument("--weight_decay", type=not_negative(float), default=weight_decay, help="on matrices alone")
    g.add_argument("--grad_clip", type=not_negative(float), default=1.0, help="largest global gradient norm; 0: off")
    g.add_argument("--max_bad_updates", type=count, default=10, help="stop after so many non-finite updates in a row")
    g.add_argument("--seed", type=seed, default=42, help="of weights, data order and samples")
    p.switch(g, "--from_resume", False, "go on from the newest intact checkpoint, if there is one")


def optimizer_flags(g):
    """What the pretraining scripts ask about the optimiser."""
    kinds = "muon: for the blocks' matrices, AdamW elsewhere"
    g.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help=kinds)
    g.add_argument("--muon_lr", type=positive(float), default=0.02, help="Muon's learning rate, on the same schedule")


def machine_flags(p, num_workers=1):
    """The group "machine" of every trainer; returns it."""
    g = p.add_argument_group("machine")
    g.add_argument("--device", help="cuda:0, mps or cpu (default: the best there is)")
    g.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of matrix products (autocast)"
    )
    g.add_argument("--use_compile", choices=("auto", "0", "1"), default="auto", help="torch.compile")
    g.add_argument("--num_workers", type=workers, default=num_workers, help="processes that load batches; 0: none")
    p.switch(g, "--gradient_checkpointing", False, "recompute activations in the backward pass: less memory, more time")
    g.add_argument("--dist_timeout", type=count, default=600, help="seconds after which a silent rank ends the job")
    return g


def parser():
    p = new_parser("train_pretrain.py", "Pretrain a MiniMind causal language model.")
    p.may_be_empty = ("sample_prompts",)  # the model begins by itself

    g = output_flags(p, str(ROOT / "out"), "MiniMind-Pretrain")
    g.add_argument(
        "--save_weight",
        type=file_prefix,
        default="pretrain",
        help="prefix of the weight file: {prefix}_{hidden}[_moe].pth",
    )
    g.add_argument(
        "--sample_prompts", nargs="+", default=[], help="continue these at every evaluation and at the end; or a file"
    )

    g = p.add_argument_group("model")
    g.add_argument("--generation", choices=("minimind2", "minimind3"), default="minimind2", help="whose architecture")
    g.add_argument("--hidden_size", type=count, default=512, help="width")
    g.add_argument("--num_hidden_layers", type=layers, default=8, help="blocks")
    g.add_argument("--num_attention_heads", type=count, default=8, help="query heads")
    g.add_argument("--num_key_value_heads", type=count, help="key and value heads (default: the generation's)")
    p.switch(g, "--use_moe", False, "mixture of experts in place of the dense MLP")
    g.add_argument(
        "--init_scheme",
        choices=("default", "zero_out"),
        default="default",
        help="zero_out: o_proj and down_proj begin at 0",
    )
    g.add_argument("--from_weight", default="none", help="start from out/{name}_{hidden}[_moe].pth, or from a path")
    g.add_argument("--tokenizer_path", default=str(ROOT / "model"), help="folder of a Hugging Face tokenizer")

    g = p.add_argument_group("data")
    g.add_argument(
        "--data_path",
        nargs="+",
        help=".jsonl, .json, .csv, .txt, source code, .parquet, .arrow and so on, a folder or a glob (dataset/README.md "
        "lists the kinds); several with shares as a.jsonl:0.7 b.jsonl:0.3 "
        "(default: dataset/pretrain_hq.jsonl, or the embedded corpus where that is absent)",
    )
    data_flags(p, g)
    g.add_argument("--max_seq_len", type=row_length, default=512, help="positions in a row, in tokens")
    p.switch(g, "--pack", True, "documents share rows; 0: one padded document a row, as in MiniMind")
    g.add_argument(
        "--long_documents", choices=("split", "truncate"), default="split", help="what becomes of those beyond a row"
    )
    p.switch(
        g, "--parse_special_tokens", False, "<|im_start|> and the like inside a text become special tokens, not text"
    )

    g = p.add_argument_group("training")
    g.add_argument("--epochs", type=count, default=1, help="passes over the data")
    update_flags(p, g, batch_size=32, accumulation_steps=8, learning_rate=5e-4)
    g.add_argument("--lr_schedule", choices=tuple(SCHEDULES), default="minimind", help="of the rate over the run")
    g.add_argument("--warmup_iters", type=size, default=0, help="linear warm-up, in micro-batches")
    optimizer_flags(g)

    g = p.add_argument_group("validation")
    g.add_argument("--val_path", help="validation documents: a file, a folder or a glob")
    g.add_argument("--val_fraction", type=fraction, default=0.0, help="share of the documents held out, by their hash")
    p.switch(g, "--allow_val_overlap", False, "train although all documents of --val_path are trained too")
    g.add_argument("--eval_interval", type=size, default=500, help="micro-batches between evaluations; 0: at the end")

    g = machine_flags(p)
    p.switch(g, "--ddp", False, "for old launch lines; torchrun decides")
    g.add_argument("--local_rank", type=int, default=-1, help="for old launch lines; torchrun decides")
    return p


def parse(p, argv):
    """What every trainer's flags say."""
    args = p.parse_args(argv)
    if args.use_wandb and args.tracker not in ("none", "wandb"):
        p.error(f"--use_wandb and --tracker {args.tracker} exclude each other: drop one")
    if args.use_wandb:
        args.tracker = "wandb"
    return args


def parse_args(argv=None):
    p = parser()
    args = parse(p, argv)
    if args.val_path and args.val_fraction:
        p.error("--val_path and --val_fraction exclude each other: drop one")
    return args


def warnings_of(args, cases):
    """A line for each setting that was given and cannot do what it is there for. cases: (name, applies, why)."""
    return [f"warning: --{name} {getattr(args, name)} has no effect: {why}" for name, applies, why in cases if applies]


def common_warnings(args, ranks, default):
    """warnings_of the flags that all trainers share. default: name -> what the parser takes by itself."""
    several, no_project = ranks.world_size > 1, args.tracker in ("none", "tensorboard")
    renamed = args.wandb_project != default("wandb_project")
    muon_lr = getattr(args, "muon_lr", None) != default("muon_lr")  # fine-tuning has no such flag
    cases = [
        ("muon_lr", muon_lr and args.optimizer == "adamw", "--optimizer is adamw"),
        ("device", ":" in (args.device or "") and several, "each rank takes the device of its local rank"),
        ("wandb_project", renamed and no_project, f"--tracker is {args.tracker}"),
    ]
    return warnings_of(args, cases)


def ignored_settings(args, ranks, corpus, steps):
    """Lines on the settings that cannot do what they are there for. steps: micro-batches of the run."""
    default = parser().get_default
    from_file = args.from_weight != "none"
    torchrun = "torchrun's environment decides, or there is none"
    evaluated = args.eval_interval != default("eval_interval")
    cases = [
        ("local_rank", args.local_rank not in (-1, ranks.local_rank), torchrun),
        ("init_scheme", args.init_scheme != "default" and from_file, "the weights come from a file"),
        ("eval_interval", evaluated and not corpus.val_store, "no validation data"),
        ("allow_val_overlap", args.allow_val_overlap and not args.val_path, "no --val_path"),
    ]
    lines = warnings_of(args, cases) + common_warnings(args, ranks, default)
    if args.warmup_iters >= steps:
        lines.append(
            f"warning: --warmup_iters {args.warmup_iters}: the run has {counted(steps, 'micro-batch', 'micro-batches')}, so its rate only rises"
        )
    return lines
