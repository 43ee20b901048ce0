"""Pretrain an ELECTRA: generator and discriminator, as two Hugging Face models that train_glue.py fine-tunes.

    python trainer/train_electra.py --data_path corpus.jsonl --vocab_path vocab.txt           # the small one
    python trainer/train_electra.py --max_steps 2000 --hidden_size 128 --num_hidden_layers 4 --batch_size 32  # on a CPU
    torchrun --nproc_per_node 2 trainer/train_electra.py --size base                          # data parallel

Without `--data_path` it trains on the documentation inside the installed Python, without `--vocab_path` on a WordPiece
vocabulary of its own data. A step is an update here, as in the paper. `--help` lists the flags; docs/electra.md explains
data, masking and what comes out.
"""

import argparse
import math
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports; main() sets its own
if __package__ in (None, ""):  # run by path: trainer/ would come first and could shadow a dependency
    sys.path[0] = str(ROOT)
if __name__ == "__main__":  # --help and wrong flags are answered before torch is imported, which takes seconds
    from trainer.electra.arguments import parse_args

    parse_args()

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from common.errors import UserError, user_errors
from common.files import atomic_folder
from common.notices import announce
from common.packages import loader_reason
from common.wording import counted
from dataset.corpus import repeated_sources
from dataset.electra.electra_dataset import ElectraAssembler, ElectraPlan, Examples
from dataset.embedded_corpus import build_embedded_corpus
from dataset.store.check import TokenCheck
from dataset.store.token_store import open_or_build
from dataset.tokenizing.encoder import LineEncoder
from dataset.tokenizing.vocabulary import check_known, check_size
from dataset.tokenizing.wordpiece import entries, load_wordpiece, save_wordpiece, train_wordpiece, wordpiece
from model.electra.model_electra import ElectraPretrainer, configs, flops_per_token
from model.electra.sizes import SIZES
from trainer.arguments import common_warnings, warnings_of
from trainer.electra.arguments import WARM_UP, parse_args, parser
from trainer.electra.loss import N_SUMS, metrics, objective
from trainer.engine import Engine
from trainer.machine.command_line import run_cli
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import pick_dtype
from trainer.machine.measure import product_rate
from trainer.machine.random_state import seed_everything
from trainer.machine.ranks import on_main
from trainer.optim.build import build_optimizer
from trainer.optim.schedules import ENCODER_SCHEDULES
from trainer.reporting.reporter import describe
from trainer.saving.places import check_kinds
from trainer.session import carry_out, claim, launch, new_run
from trainer.train_tokenizer import Source, draw_sample

OWN_ENTRIES = 8192  # of a vocabulary that is trained on the data


def main(argv=None):
    """Run the trainer with the given flags (default: the command line's); returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return launch(train, "trainer/train_electra.py", parse_args(argv), argv)


def train(args, ranks, device, signals, command=""):
    """Set everything up, train, and show what came out."""
    if args.batch_size is None:  # of a rank and micro-batch: together they make the published one
        args.batch_size = max(1, SIZES[args.size].batch_size // (args.accumulation_steps * ranks.world_size))
    dtype, precision_notice = pick_dtype(args.dtype, device)
    seed_everything(args.seed)  # the same on all ranks, so that all begin with the same weights
    folder = Path(args.out_dir) / f"electra_{args.size}"
    stem = folder / folder.name
    with user_errors():
        claim(ranks, stem)
        on_main(ranks, lambda: check_kinds(stem, folders=[folder / name for name in NETWORKS]))
        data_path = args.data_path or [str(build_embedded_corpus(ROOT / "dataset" / "python_docs.jsonl"))]
        tokenizer = open_vocabulary(args, data_path, folder, ranks)
        encoder = LineEncoder(tokenizer)
        options = {
            "cache_dir": args.cache_dir,
            "text_field": args.text_field,
            "text_suffixes": args.text_suffixes,
            "skip_bad_lines": args.skip_bad_lines,
        }
        store = open_or_build(data_path, encoder, progress=ranks.is_main, **options)
        what = f"--data_path {data_path[0]}" + (f", --vocab_path {args.vocab_path}" if args.vocab_path else "")
        check_known(store.tokens, tokenizer.unk_token_id, what, (encoder.sep_id,))
        model = init_model(args, tokenizer)
        examples = Examples(store, args.max_seq_len, encoder.sep_id, args.seed, tokenizer.unk_token_id)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.to(device).train()
    seed_everything(args.seed, ranks.rank)

    adam = {"eps": 1e-6, "bias_correction": args.adam_bias_correction}
    optimizer = build_optimizer(model, args.learning_rate, args.weight_decay, args.optimizer, args.muon_lr, **adam)
    options = {"grad_clip": args.grad_clip, "n_sums": N_SUMS}
    engine = Engine(model, optimizer, objective(model), device=device, dtype=dtype, ranks=ranks, **options)

    run = new_run(
        stem,
        args,
        ranks,
        signals,
        engine,
        command,
        plan=lambda epoch: ElectraPlan(examples, args.mask_share, args.seed, epoch),
        assembler=ElectraAssembler(store, tokenizer, args.max_seq_len, args.mask_share, args.mask_style, args.seed),
        learning_rate=lambda *_: rate(args, run.progress.update),
        metrics=metrics,
        token_check=TokenCheck([store]) if ranks.local_rank == 0 else None,
        save_weights=None,
        max_updates=args.max_steps,
        save_at=frozenset(save_points(args)),
        shown=("mlm_loss", "disc_loss", "gen_acc", "disc_acc", "disc_auc", "grad_norm", "updates_per_second"),
        identity={
            "tokenizer": encoder.fingerprint[:16],
            "data": store.fingerprint[:16],  # as this tokenizer reads it
            "architecture": architecture(model),
            "row layout": {name: getattr(args, name) for name in ("max_seq_len", "seed", "mask_share", "mask_style")},
            "optimizer": f"{args.optimizer}, adam_bias_correction {args.adam_bias_correction}",
        },
    )
    run.save_weights = lambda weights, update: save_at_percent(args, folder, model, tokenizer, weights, update)

    def begin():
        if not args.vocab_path:
            on_main(ranks, lambda: save_wordpiece(tokenizer, folder / OWN))
        prepare(run, store, examples, dtype, precision_notice)

    outputs = {name: folder / name for name in NETWORKS}
    replaced = sorted(folder.glob("percent_*"))
    return carry_out(run, stem, outputs, begin, replaced, begun=[folder / OWN])


NETWORKS = ("discriminator", "generator")
# The fields of a config that decide which weights fit, what they compute and how `--from_scratch` begins
ARCHITECTURE = (
    "vocab_size", "embedding_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "hidden_dropout_prob", "position_init",
)  # fmt: skip


def architecture(model):
    """{field: [generator's value, discriminator's]} of those fields of ARCHITECTURE that the configs have."""
    pair = model.generator.config, model.discriminator.config
    return {name: [getattr(config, name, None) for config in pair] for name in ARCHITECTURE if hasattr(pair[1], name)}


OWN = "vocabulary"  # folder of the vocabulary that is trained where none is given


def open_vocabulary(args, data_path, folder, ranks):
    """The tokenizer of --vocab_path, or --model_path's, or a WordPiece one that is trained on the data; a resume finds
    that of its start."""
    if args.vocab_path:
        return load_wordpiece(args.vocab_path, args.lower_case)
    if args.from_resume and (folder / OWN / "vocab.txt").exists():
        return load_wordpiece(folder / OWN)
    if args.model_path:  # its embeddings are of this vocabulary and no other
        return model_vocabulary(args)

    def train_it():
        sources = [Source(path, args.text_field, args.skip_bad_lines, args.text_suffixes) for path in data_path]
        announce(f"no --vocab_path: training a WordPiece vocabulary of {OWN_ENTRIES:,} entries on the data")
        sample = draw_sample(sources, [1.0] * len(sources), 60e6)
        return entries(train_wordpiece(sample, OWN_ENTRIES, args.lower_case))

    return wordpiece(on_main(ranks, train_it), args.lower_case)


def model_vocabulary(args: argparse.Namespace) -> PreTrainedTokenizerBase:
    """The tokenizer beside --model_path's discriminator. Errors: UserError where there is none."""
    check_networks(args)
    place = Path(args.model_path, "discriminator")
    try:
        return load_wordpiece(place)
    except ValueError as error:
        raise UserError(
            f"--model_path {args.model_path} needs its vocabulary: name it by --vocab_path ({error})"
        ) from error


def init_model(args, tokenizer):
    """Fresh networks, or those of --model_path. Errors: ValueError where flags, folder and tokenizer do not fit."""
    options = {"sampling": args.sampling, "gen_smooth": args.gen_smooth, "disc_smooth": args.disc_smooth}
    if args.model_path:
        model = load_networks(args, tokenizer, options)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = args.dropout
        return model
    changes = {
        "width": args.hidden_size,
        "layers": args.num_hidden_layers,
        "heads": args.num_attention_heads,
        "ffn": args.intermediate_size,
        "embedding": args.embedding_size,
        "divisor": args.generator_divisor,
    }
    init = {"init_std": args.init_std, "position_init": args.position_init}
    pair = configs(SIZES[args.size], len(tokenizer), tokenizer.pad_token_id, args.max_seq_len, **init, **changes)
    for config in pair:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = args.dropout
    return ElectraPretrainer.from_configs(*pair, **options)


def check_networks(args: argparse.Namespace) -> None:
    for name in NETWORKS:
        if not Path(args.model_path, name, "config.json").is_file():
            raise UserError(
                f"--model_path {args.model_path}: no {name}/config.json there; train_electra.py leaves a folder with "
                "both networks"
            )


def load_networks(args, tokenizer, options):
    what = f"--model_path {args.model_path}"
    check_networks(args)
    try:
        model = ElectraPretrainer.from_pretrained(args.model_path, **options)
    except Exception as error:  # each loader raises its own kinds
        raise UserError(f"{what}: no model can be loaded from there ({loader_reason(error)})") from error
    check_size(len(tokenizer), model.discriminator.config.vocab_size, what)
    for network in (model.generator, model.discriminator):
        for name, least in (("vocab_size", len(tokenizer)), ("max_position_embeddings", args.max_seq_len)):
            if getattr(network.config, name) < least:
                raise UserError(f"{what}: {name} is {getattr(network.config, name)}, {least} is wanted")
        network.config.hidden_dropout_prob = network.config.attention_probs_dropout_prob = args.dropout
    return model


def rate(args, update):
    """The learning rate of the update that comes after `update` others."""
    warmup = min(WARM_UP, args.max_steps // 10) if args.warmup_steps is None else args.warmup_steps
    return args.learning_rate * ENCODER_SCHEDULES[args.lr_schedule](update, args.max_steps, warmup)


def save_points(args):
    """{updates: percent} of --save_percents; the end is always one."""
    return {max(1, round(args.max_steps * p / 100)): p for p in (*args.save_percents, 100.0)}


def save_at_percent(args, folder, model, tokenizer, weights, update):
    """Write both networks if `update` is one of --save_percents: the last ones to `folder`, earlier ones below it."""
    percent = 100.0 if update >= args.max_steps else save_points(args).get(update)
    if percent is None:
        return
    target = folder if percent == 100 else folder / f"percent_{percent:g}"
    target.mkdir(exist_ok=True)
    for name in NETWORKS:
        disable_progress_bar()
        own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
        with atomic_folder(target / name, target / f"{folder.name}.{name}.tmp") as temporary:
            getattr(model, name).save_pretrained(temporary, state_dict=own)
            save_wordpiece(tokenizer, temporary)


def prepare(run, store, examples, dtype, precision_notice):
    """Say what the run will do, and make it fast."""
    args, ranks, model, device, say = run.args, run.ranks, run.engine.model, run.engine.device, run.reporter.say
    plan = run.plan(run.progress.epoch)
    pair = model.generator.config, model.discriminator.config
    per_token = flops_per_token(*pair, args.max_seq_len, args.mask_share)
    run.flops_per_token = per_token / plan.fill  # of a token; the products take the padding too
    updates_per_epoch = math.ceil(plan.n_rows / (args.batch_size * args.accumulation_steps * ranks.world_size))
    run.epochs = math.ceil(args.max_steps / updates_per_epoch)
    parameters = sum(p.numel() for p in model.parameters())
    lines = [
        *repeated_sources(args.data_path or [], args.text_suffixes),
        *store.bad_lines.report(),
        f"model: ELECTRA {args.size}, {parameters / 1e6:.2f} M parameters, {counted(pair[1].num_hidden_layers, 'layer')} of width "
        f"{pair[1].hidden_size} (generator {pair[0].hidden_size}), {pair[0].vocab_size:,} entries, "
        f"{per_token / 1e6:.1f} MFLOP per position",
        f"data: {counted(len(store), 'document')}, {int(examples.lengths.sum()):,} positions in {counted(plan.n_rows, 'example')} of "
        f"{plan.T} ({plan.fill:.1%} full), {float((examples.second == 0).mean()):.0%} of one segment",
    ]
    fields = {**pair[1].to_diff_dict(), "generator": pair[0].to_diff_dict(), "parameters": parameters}
    describe(run, plan, dtype, lines, fields, len(store))
    for line in filter(None, (precision_notice, *notices(args, ranks))):
        say(line)
    positions = args.max_steps * args.batch_size * args.accumulation_steps * plan.T  # of a rank
    flops = per_token * positions
    # What is recomputed would draw other dropout masks than the compiled forward pass has drawn.
    choice = "0" if args.gradient_checkpointing else args.use_compile
    compile_blocks(model, choice, device, say, (args.batch_size, plan.T), flops)
    if flops > 1e13:  # tens of seconds: a shorter run is not kept waiting for it
        run.product_rate = product_rate(device, dtype, sizes=[2048] if device.type == "cpu" else None)


def notices(args, ranks):
    """Lines on settings that do not do what they seem to."""
    default = parser().get_default
    unused = args.warmup_steps is not None and args.lr_schedule == "one_cycle"
    recomputed = args.use_compile == "1" and args.gradient_checkpointing
    init_std, position_init = (
        args.model_path and getattr(args, name) != default(name) for name in ("init_std", "position_init")
    )
    cases = [
        ("warmup_steps", unused, "--lr_schedule one_cycle has its own"),
        ("use_compile", recomputed, "--gradient_checkpointing recomputes layers without it"),
        ("init_std", init_std, "the weights come from --model_path"),
        ("position_init", position_init, "the weights come from --model_path"),
    ]
    lines = warnings_of(args, cases)
    highest = max(rate(args, args.max_steps * i // 1000) for i in range(1000)) / args.learning_rate
    if highest < 0.5:
        lines.append(
            f"warning: with --warmup_steps {args.warmup_steps} the rate is never above {highest:.0%} of --learning_rate"
        )
    size = SIZES[args.size]
    rows = args.batch_size * args.accumulation_steps * ranks.world_size
    if args.max_steps == size.max_steps and rows != size.batch_size:
        lines.append(
            f"note: an update has {counted(rows, 'example')}, in the published run of this size {size.batch_size}"
        )
    return lines + common_warnings(args, ranks, default)


if __name__ == "__main__":
    run_cli(main)
