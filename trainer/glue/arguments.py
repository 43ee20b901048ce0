"""The flags of train_glue.py."""

import argparse
from pathlib import Path

from common.flags import fraction, positive
from dataset.glue.glue_tasks import TASKS
from trainer.arguments import (
    common_warnings,
    count,
    machine_flags,
    new_parser,
    output_flags,
    parse,
    size,
    update_flags,
    warnings_of,
)

ROOT = Path(__file__).resolve().parents[2]


# The flags that only training reads
TRAINING_FLAGS = ("epochs", "max_steps", "learning_rate", "weight_decay", "warmup_share", "layer_decay", "save_steps")


def example_length(text: str) -> int:
    value = positive(int)(text)
    if value < 5:
        raise argparse.ArgumentTypeError(f"{text} must be at least 5, for two sentences: CLS a SEP b SEP")
    return value


def parser():
    p = new_parser("train_glue.py", "Fine-tune an encoder on GLUE.")
    g = output_flags(p, str(ROOT / "out" / "glue"), "MiniMind-GLUE", save_interval=500)
    g.add_argument(
        "--save_steps", type=size, default=0, help="updates between models kept in checkpoint-{update}; 0: none"
    )
    p.switch(g, "--overwrite_output_dir", False, "replace the results in --out_dir")

    g = p.add_argument_group("model")
    g.add_argument(
        "--model_path",
        default=str(ROOT / "out" / "electra_small" / "discriminator"),
        help="folder of save_pretrained, or a Hugging Face name that is in the local cache",
    )
    p.switch(g, "--from_scratch", False, "random weights of that folder's config: what pretraining is worth")

    g.add_argument("--dropout", type=fraction, help="of hidden states and attention (default: the model's)")

    g = p.add_argument_group("data")
    g.add_argument("--task", choices=(*TASKS, "all"), required=True, help="all: every one whose folder is there")
    g.add_argument("--data_dir", required=True, help="the benchmark's folder (with CoLA, SST-2 ...), or the task's own")
    g.add_argument("--max_seq_len", type=example_length, default=128, help="positions of an example")
    g.add_argument("--cache_dir", help="folder for features (default: .glue_cache beside the data)")
    p.switch(g, "--overwrite_cache", False, "make the features anew")

    g = p.add_argument_group("training")
    p.switch(g, "--do_train", True, "0: evaluate the model of --model_path as it is")
    g.add_argument("--epochs", type=count, help="passes over the data (default: 3, of RTE and STS-B 10)")
    g.add_argument("--max_steps", type=count, help="updates of a run; they override --epochs")
    update_flags(p, g, batch_size=32, accumulation_steps=1, learning_rate=1e-4)
    g.add_argument("--num_seeds", type=count, default=1, help="runs of each task, of seeds --seed, --seed + 1 ...")
    g.add_argument("--warmup_share", type=fraction, default=0.1, help="of the run, for the warm-up")
    g.add_argument(
        "--layer_decay",
        type=positive(float),
        default=0.8,
        help="what the rate is multiplied with from layer to layer, head to embeddings",
    )

    g = p.add_argument_group("evaluation")
    p.switch(g, "--do_eval", True, "evaluate on the development files")
    p.switch(g, "--do_predict", False, "write predictions for the test files, as the leaderboard wants them")
    p.switch(g, "--evaluate_during_training", False, "evaluate while training, too")
    g.add_argument("--eval_interval", type=count, help="micro-batches between evaluations (default: those of an epoch)")
    p.switch(g, "--eval_all_checkpoints", False, "evaluate the models of --save_steps too, at the end")
    machine_flags(p, num_workers=0)
    return p


def parse_args(argv=None):
    p = parser()
    args = parse(p, argv)
    if args.eval_all_checkpoints and not args.save_steps:
        p.error("--eval_all_checkpoints 1 needs --save_steps N, which keeps the models to evaluate")
    if args.seed + args.num_seeds > 2**32:
        p.error(f"--seed {args.seed} --num_seeds {args.num_seeds}: the last seed would be beyond 2**32")
    if not (args.do_train or args.do_eval or args.do_predict):
        p.error("--do_train 0, --do_eval 0 and --do_predict 0 leave nothing to do")
    return args


def notices(args, ranks):
    """Lines on the settings that cannot do what they are there for."""
    default = parser().get_default
    evaluated = args.evaluate_during_training
    compiled = args.use_compile == "1"
    untrained = [
        (name, not args.do_train and getattr(args, name) != default(name), "--do_train is 0") for name in TRAINING_FLAGS
    ]
    cases = [
        *untrained,
        ("epochs", bool(args.epochs and args.max_steps), f"--max_steps {args.max_steps} overrides it"),
        ("num_seeds", args.num_seeds > 1 and not args.do_train, "--do_train is 0, and one evaluation is like another"),
        ("eval_interval", bool(args.eval_interval) and not evaluated, "no evaluation while training"),
        ("evaluate_during_training", evaluated and not args.do_eval, "--do_eval is 0"),
        ("eval_all_checkpoints", args.eval_all_checkpoints and not args.do_eval, "--do_eval is 0"),
        ("use_compile", compiled and args.gradient_checkpointing, "--gradient_checkpointing 1 goes without compiling"),
    ]
    return warnings_of(args, cases) + common_warnings(args, ranks, default)
