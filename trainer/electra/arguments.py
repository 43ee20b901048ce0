"""The flags of train_electra.py."""

import argparse
from pathlib import Path

from common.flags import fraction, inner_share, positive
from model.electra.sizes import MASK_STYLES, POSITION_INITS, SAMPLING, SHORTEST, SIZES
from trainer.arguments import (
    count,
    data_flags,
    layers,
    machine_flags,
    new_parser,
    optimizer_flags,
    output_flags,
    parse,
    size,
    update_flags,
)
from trainer.optim.schedules import ENCODER_SCHEDULES

WARM_UP = 10_000  # updates
ROOT = Path(__file__).resolve().parents[2]


def example_length(text: str) -> int:
    value = positive(int)(text)
    if value < SHORTEST:
        raise argparse.ArgumentTypeError(f"{text} must be at least {SHORTEST} for two segments")
    return value


def percents(text):
    values = [float(part) for part in text.split(",")]
    if not all(0 < value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: percents of the run, above 0 and at most 100, as in 25,50,100")
    return values


def parser():
    p = new_parser("train_electra.py", "Pretrain an ELECTRA (generator and discriminator).")
    g = output_flags(p, str(ROOT / "out"), "MiniMind-ELECTRA", save_interval=1000)
    g.add_argument(
        "--save_percents",
        type=percents,
        default=[6.25, 12.5, 25.0, 50.0, 100.0],
        help="of the run, at which both networks are written",
    )

    g = p.add_argument_group("model (default: the size's)")
    g.add_argument("--size", choices=SIZES, default="small", help="published configuration")
    g.add_argument("--hidden_size", type=count, help="width of the discriminator")
    g.add_argument("--num_hidden_layers", type=layers, help="of each network")
    g.add_argument("--num_attention_heads", type=count, help="of the discriminator")
    g.add_argument("--intermediate_size", type=count, help="FFN width of the discriminator")
    g.add_argument("--embedding_size", type=count, help="of both networks")
    g.add_argument("--generator_divisor", type=count, help="what width, heads and FFN of the generator are divided by")
    g.add_argument("--model_path", help="start from generator/ and discriminator/ in this folder, whose sizes count")
    std = "standard deviation of the random weights; narrow networks learn far sooner with about 1 / sqrt(width)"
    g.add_argument("--init_std", type=positive(float), default=0.02, help=std)
    positions = "the position embeddings before training; sinusoidal: attention finds the neighbours sooner"
    g.add_argument("--position_init", choices=POSITION_INITS, default="normal", help=positions)
    g.add_argument("--dropout", type=fraction, default=0.1, help="of hidden states and attention")

    g = p.add_argument_group("data")
    g.add_argument(
        "--data_path",
        nargs="+",
        help="as train_pretrain.py's, without shares; in .txt and source code a blank line ends a document "
        "(default: the embedded corpus)",
    )
    data_flags(p, g)
    g.add_argument("--vocab_path", help="vocab.txt or a tokenizer folder (default: one trained on the data)")
    p.switch(g, "--lower_case", True, "lower-case the text (for a vocab.txt; a folder knows by itself)")
    g.add_argument("--max_seq_len", type=example_length, help="positions of an example (default: the size's)")
    g.add_argument("--mask_share", type=inner_share, help="of the positions (default: the size's)")
    g.add_argument(
        "--mask_style", choices=MASK_STYLES, default="electra", help="electra: 85 %% [MASK]; bert: 80/10/10 %%"
    )

    g = p.add_argument_group("training (batch, rate and steps: default the size's)")
    g.add_argument("--max_steps", type=count, help="updates")
    update_flags(p, g, batch_size=None, accumulation_steps=1, learning_rate=None)
    g.add_argument("--lr_schedule", choices=ENCODER_SCHEDULES, default="original_linear", help="of the rate")
    g.add_argument(
        "--warmup_steps", type=size, help=f"updates of warm-up (default: {WARM_UP}, at most a tenth of the run)"
    )
    optimizer_flags(g)
    p.switch(g, "--adam_bias_correction", True, "0: Adam's moments as they are, as the original code takes them")
    g.add_argument("--sampling", choices=SAMPLING, default="fp32_gumbel", help="how the generator's tokens are drawn")
    g.add_argument("--gen_smooth", type=fraction, default=0.0, help="label smoothing of the generator")
    g.add_argument(
        "--disc_smooth",
        type=fraction,
        default=0.0,
        help="label of an original token in the discriminator's loss; a replaced one stays 1",
    )
    machine_flags(p)
    return p


def parse_args(argv=None):
    p = parser()
    args = parse(p, argv)
    for name in ("max_steps", "max_seq_len", "learning_rate", "mask_share"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(SIZES[args.size], name))
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "embedding_size", "generator_divisor")  # fmt: skip
    if args.model_path and (given := [name for name in sizes if getattr(args, name) is not None]):
        p.error(f"--model_path decides the networks: drop --{given[0]}")
    return args
