"""Fine-tune an encoder on the GLUE tasks and show its table.

    python trainer/train_glue.py --task rte --data_dir glue_data                  # of train_electra.py's discriminator
    python trainer/train_glue.py --task all --data_dir glue_data --num_seeds 5    # all that are there, with deviations
    python trainer/train_glue.py --task cola --data_dir glue_data --from_scratch  # what is it without pretraining?
    torchrun --nproc_per_node 2 trainer/train_glue.py --task mnli --data_dir glue_data

A step is an update here. Results go to {out_dir}/{task}/seed_{seed}/, their summary to {out_dir}/eval_results.json.
`--help` lists the flags.
"""

import argparse
import math
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports; main() sets its own
if __package__ in (None, ""):  # run by path: trainer/ would come first and could shadow a dependency
    sys.path[0] = str(ROOT)
if __name__ == "__main__":  # --help and wrong flags are answered before torch is imported, which takes seconds
    from trainer.glue.arguments import parse_args

    parse_args()

from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from common.errors import user_errors
from common.wording import counted
from dataset.glue.glue_dataset import GlueAssembler, GluePlan
from dataset.loader import UpdateSchedule
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.sentence_encoder import SentenceEncoder
from model.checkpointing import recompute_layers
from trainer.engine import Engine
from trainer.glue.arguments import notices, parse_args
from trainer.glue.files import check_place, earlier_results, make_room, read_task, seeds, task_folders
from trainer.glue.model import (
    Layers,
    check_models,
    compiled_shape,
    find_model,
    init_model,
    layer_groups,
    metrics,
    objective,
    rates,
    save_model,
    weights_digest,
)
from trainer.glue.padding import is_known
from trainer.glue.scores import Evaluation, line_of, look_back, read_json, show_table, summary, write_json
from trainer.machine.command_line import run_cli
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import pick_dtype
from trainer.machine.random_state import seed_everything
from trainer.machine.ranks import on_main
from trainer.optim.build import build_adamw
from trainer.optim.schedules import ENCODER_SCHEDULES
from trainer.reporting.reporter import Reporter, describe
from trainer.saving.places import check_kinds
from trainer.session import carry_out, claim, launch, make_folder, new_run


def main(argv=None):
    """Run the trainer with the given flags (default: the command line's); returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return launch(train, "trainer/train_glue.py", parse_args(argv), argv)


class Job(NamedTuple):
    """What all runs of a command share."""

    args: Any
    ranks: Any
    device: Any
    dtype: Any
    signals: Any
    command: str
    say: Any
    model_folder: Path
    tokenizer: Any
    encoder: Any


def train(args, ranks, device, signals, command=""):
    """Fine-tune on every task with every seed, and show the table."""
    set_verbosity_error()  # its table of weights that are not in the folder: `prepare` says it in a word
    disable_progress_bar()
    dtype, precision_notice = pick_dtype(args.dtype, device)
    say, out = Reporter(ranks.is_main).say, Path(args.out_dir)
    with user_errors():
        folders = on_main(ranks, lambda: task_folders(args, say))
        on_main(ranks, lambda: earlier_results(args, out, folders) and None)  # before anything takes time
        folder = on_main(ranks, lambda: find_model(args.model_path))
        tokenizer = load_tokenizer(folder)
        job = Job(args, ranks, device, dtype, signals, command, say, folder, tokenizer, SentenceEncoder(tokenizer))
        on_main(ranks, lambda: check_place(args, out, folders, folder))
        tasks = [read_task(job, name, Path(place)) for name, place in folders.items()]  # faults show before hours pass
        found = [d.task for d in tasks]
        checked = on_main(ranks, lambda: check_models(args, found, folder, job.encoder.vocab_size, dtype))
        job = job._replace(dtype=checked.dtype)
        claim(ranks, *(out / name for name in folders))
        on_main(ranks, lambda: make_room(args, out, folders))
    for line in filter(None, (precision_notice, *checked.lines, *notices(args, ranks))):
        say(line)
    for data in tasks:
        results = {}
        for seed in seeds(args):
            exit_code, results[seed] = one_run(job, data, out / data.name / f"seed_{seed}", seed)
            if exit_code:
                return exit_code
        of_task = {"metrics": summary([r["results"] for r in results.values()]), "seeds": results}
        on_main(ranks, lambda data=data, of_task=of_task: write_json(out / data.name / "eval_results.json", of_task))
    on_main(ranks, lambda: show_table(out, say))
    return 0


# -------------------------------------------------------------------------------------------------- a run


def one_run(job, data, folder, seed):
    """Train and evaluate once: (exit code, what {folder}/eval_results.json holds then)."""
    args, ranks, stem = run_args(job, data, seed), job.ranks, folder / f"{data.name}_{folder.name}"
    settings = {name: getattr(args, name) for name in SETTINGS}
    earlier, changed, trained = on_main(ranks, lambda: done_before(args, folder, settings))
    if earlier and not changed:
        job.say(f"{data.name}, seed {seed}: done before, {line_of(earlier['results'])}")
        return 0, earlier
    job.say(f"--- {data.name}, seed {seed}")
    if earlier and args.do_train:
        again = (
            "what is trained is evaluated again" if trained else "a finished run has no checkpoint, so it begins anew"
        )
        job.say(f"done before with another {', '.join(f'--{name}' for name in changed)}: {again}")
    seed_everything(seed)  # the same on all ranks, so that all begin with the same weights
    with user_errors():
        model, new = init_model(args, data.task, job.model_folder, job.encoder.vocab_size)
        make_folder(folder)
        on_main(ranks, lambda: check_kinds(stem, folders=[folder / "model"]))
    start = weights_digest(model)
    if trained:
        model.load_state_dict(load_file(folder / WEIGHTS))
    if args.gradient_checkpointing:
        recompute_layers(model)
    model.to(job.device).train()
    seed_everything(seed, ranks.rank)
    groups = layer_groups(model, args.weight_decay, args.layer_decay)
    optimizer = build_adamw(groups, args.learning_rate, eps=1e-6)
    options = {"device": job.device, "dtype": job.dtype, "ranks": ranks, "grad_clip": args.grad_clip, "n_sums": 4}
    engine = Engine(model, optimizer, objective(data.task, model), **options)

    result = {"task": data.name, "seed": seed, "updates": 0, "settings": settings, "results": {}}
    evaluation = Evaluation(engine, data.task, data.dev, args.batch_size, job.signals)
    if trained:
        result["updates"] = earlier.get("updates", 0)
    elif args.do_train:
        run = task_run(job, args, data, stem, engine, evaluation, start)
        replaced = [folder / "eval_results.json", *folder.glob("checkpoint-*[0-9]")]
        written = {"model": folder / "model"}
        exit_code = carry_out(run, stem, written, lambda: prepare(run, job, data, new), replaced)
        if exit_code:
            return exit_code, None
        result["updates"] = run.progress.update
    stop_signal = look_back(args, data, folder, evaluation, result, job.say)
    if stop_signal:
        job.say(f"stopped by signal {stop_signal}; the same command with --from_resume 1 evaluates what is trained")
        return 128 + stop_signal, None
    on_main(ranks, lambda: write_results(stem, result))
    return 0, result


def done_before(args, folder, settings):
    """What an earlier command left in {folder}/eval_results.json or None, the settings that differ, and whether its
    model is the one that the new ones would train."""
    earlier = read_json(folder / "eval_results.json", "settings", "results") if args.from_resume else None
    if not earlier:
        return None, [], False
    changed = [name for name in SETTINGS if earlier["settings"].get(name) != settings[name]]
    trained = args.do_train and EVALUATION.issuperset(changed) and (folder / WEIGHTS).is_file()
    return earlier, changed, trained


def write_results(stem, result):
    write_json(stem.parent / "eval_results.json", result)
    if result["settings"]["do_train"]:  # nobody goes on from its checkpoints: they are three times the model, per seed
        shutil.rmtree(f"{stem}_resume", ignore_errors=True)


WEIGHTS = Path("model", "model.safetensors")
# What a finished run must have been made with to count as done
SETTINGS = (
    "model_path", "from_scratch", "dropout", "max_seq_len", "epochs", "max_steps", "batch_size", "accumulation_steps", "grad_clip",
    "learning_rate", "layer_decay", "warmup_share", "weight_decay", "do_train", "do_eval", "do_predict",
    "eval_all_checkpoints",
)  # fmt: skip
EVALUATION = {"do_eval", "do_predict", "eval_all_checkpoints"}  # those that change nothing of the training


def run_args(job, data, seed):
    """The flags of one run: its seed, its epochs, and how often it is evaluated."""
    args = argparse.Namespace(**{**vars(job.args), "seed": seed})
    args.epochs = args.epochs or data.task.epochs
    if not args.evaluate_during_training:
        args.eval_interval = 0  # at the end alone
    elif args.do_train:
        args.eval_interval = args.eval_interval or schedule(args, job.ranks, data).n_steps
    return args


def schedule(args, ranks, data):
    return UpdateSchedule(len(data.train.features.first), args.batch_size, args.accumulation_steps, ranks.world_size)


def task_run(job, args, data, stem, engine, evaluation, start):
    folder = stem.parent

    def save(weights, update):
        # In the checkpoints' thread: `weights` are the last ones only where the run stands at `update` still.
        if run.finished and update == run.progress.update:
            save_model(folder / "model", engine.model, job.tokenizer, weights)
        if args.save_steps and update and update % args.save_steps == 0:
            save_model(folder / f"checkpoint-{update}", engine.model, job.tokenizer, weights)

    run = new_run(
        stem,
        args,
        job.ranks,
        job.signals,
        engine,
        job.command,
        plan=lambda epoch: GluePlan(data.train.features, args.seed, epoch),
        assembler=data.train,
        learning_rate=lambda epoch, n_rows, first_row, _: rate(run, epoch, n_rows, first_row),
        metrics=lambda sums: metrics(data.task, sums),
        save_weights=save,
        validate=None,
        epochs=args.epochs,
        max_updates=args.max_steps or math.inf,
        save_at=range(args.save_steps, sys.maxsize, args.save_steps) if args.save_steps else (),
        shown=("train_acc", "grad_norm", "updates_per_second"),
        identity={
            "tokenizer": job.encoder.fingerprint[:16],
            "data": data.key,  # as this tokenizer reads it, cut to --max_seq_len
            "model (--model_path, --from_scratch)": start,
            "row layout": {"seed": args.seed},
            "optimizer": f"adamw, layer_decay {args.layer_decay}",
        },
    )
    if args.do_eval:
        run.validate = lambda: evaluation(run.progress.update)
    return run


def rate(run, epoch, n_rows, first_row):
    """The learning rate of an update that begins at a row. Progress is counted in updates where --max_steps ends the
    run, and in rows elsewhere: batches of another size after a resume then lead to the same end."""
    done, total = run.progress.update, run.max_updates
    if total == math.inf:
        done, total = epoch * n_rows + first_row, run.epochs * n_rows
    factor = ENCODER_SCHEDULES["separate_linear"](done, total, int(run.args.warmup_share * total))
    return run.args.learning_rate * max(0.0, factor)


def new_weights(names):
    return f"but a new {', '.join(sorted({name.split('.')[0] for name in names}))}" if names else "with its head"


def prepare(run, job, data, new):
    """Say what the run will do, and make it fast."""
    args, model, say, plan = run.args, run.engine.model, run.reporter.say, run.plan(0)
    if args.max_steps:  # they decide, as in the benchmark's own script; the epochs are those that it takes
        run.epochs = math.ceil(args.max_steps / schedule(args, job.ranks, data).n_updates)
    config, lengths = model.config, data.train.features.lengths
    parameters = sum(p.numel() for p in model.parameters())
    embeddings = sum(p.numel() for name, p in model.named_parameters() if "embeddings." in name)
    lines = [
        f"model: {type(model).__name__}, {parameters / 1e6:.2f} M parameters, {counted(config.num_hidden_layers, 'layer')} of width "
        f"{config.hidden_size}, "
        + ("random weights" if args.from_scratch else f"from {job.model_folder}, {new_weights(new)}"),
        f"data: {data.task.folder}, {counted(plan.n_rows, 'example')} of {lengths.mean():.0f} tokens in the mean, {plan.T} at most",
    ]
    fields = {**config.to_diff_dict(), "parameters": parameters}
    describe(run, plan, job.dtype, lines, fields, plan.n_rows)
    if args.seed == job.args.seed:  # the other seeds' are the same
        say(rates(run.engine.optimizer.param_groups, args))
    rows = min(plan.n_rows * run.epochs, run.max_updates * schedule(args, job.ranks, data).rows_per_update)
    flops = 6 * (parameters - embeddings) * rows / job.ranks.world_size  # per position of a row
    # Compiled batches have one shape, the longest example's. What that adds is taken off what compiling saves: by
    # compile_blocks' figures the plain code takes 2.4 times the time of its products, the compiled one 1.4 times.
    full = GlueAssembler(data.train.features, job.encoder, args.max_seq_len, full=True)
    saved = flops * (2.4 * plan.width(args.batch_size) - 1.4 * full.width)
    choice = args.use_compile if is_known(model) and not args.gradient_checkpointing else "0"
    compile_blocks(Layers(model), choice, job.device, say, (args.batch_size, full.width), saved)
    if compiled_shape(model):
        run.assembler = full


if __name__ == "__main__":
    run_cli(main)
