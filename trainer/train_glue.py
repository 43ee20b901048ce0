"""Fine-tune an encoder on the GLUE tasks and show its table.

    python trainer/train_glue.py --task rte --data_dir glue_data                  # of train_electra.py's discriminator
    python trainer/train_glue.py --task all --data_dir glue_data --num_seeds 5    # all that are there, with deviations
    python trainer/train_glue.py --task cola --data_dir glue_data --from_scratch  # what is it without pretraining?
    torchrun --nproc_per_node 2 trainer/train_glue.py --task mnli --data_dir glue_data

A step is an update here. Results go to {out_dir}/{task}/seed_{seed}/, their summary to {out_dir}/eval_results.json.
`--help` lists the flags.
"""

import argparse
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

from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from dataset.encoder import load_tokenizer
from dataset.glue_dataset import TASKS, GlueAssembler, GluePlan, SentenceEncoder, cached_features, read_features
from dataset.loader import UpdateSchedule
from trainer.arguments import common_warnings, warnings_of
from trainer.checkpoint import Checkpoints, remove_temporaries
from trainer.engine import Engine
from trainer.glue_arguments import parse_args, parser
from trainer.glue_model import (
    Layers,
    find_model,
    init_model,
    layer_groups,
    metrics,
    objective,
    rates,
    save_model,
    weights_digest,
)
from trainer.glue_scores import Evaluation, line_of, look_back, read_json, show_table, summary, write_json
from trainer.loop import Run
from trainer.optim import ENCODER_SCHEDULES, build_adamw
from trainer.report import Reporter, describe
from trainer.runtime import UserError, compile_blocks, on_main, pick_dtype, run_cli, seed_everything, user_errors
from trainer.session import carry_out, launch, make_folder


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


class Data(NamedTuple):
    """The files of a task, as GlueAssemblers."""

    name: str
    task: Any
    key: str  # changes with the training file, the tokenizer and the length
    train: Any
    dev: dict  # {suffix of the metrics' names: ...}
    test: dict  # {leaderboard's name: ...}


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
        tasks = [read_task(job, name, Path(place)) for name, place in folders.items()]  # faults show before hours pass
        on_main(ranks, lambda: make_room(args, out, folders))
    for line in filter(None, (precision_notice, *notices(args, ranks))):
        say(line)
    seeds = range(args.seed, args.seed + (args.num_seeds if args.do_train else 1))
    for data in tasks:
        results = {}
        for seed in seeds:
            exit_code, results[seed] = one_run(job, data, out / data.name / f"seed_{seed}", seed)
            if exit_code:
                return exit_code
        of_task = {"metrics": summary([r["results"] for r in results.values()]), "seeds": results}
        on_main(ranks, lambda data=data, of_task=of_task: write_json(out / data.name / "eval_results.json", of_task))
    on_main(ranks, lambda: show_table(out, say))
    return 0


def notices(args, ranks):
    default = parser().get_default
    cases = [
        ("num_seeds", args.num_seeds > 1 and not args.do_train, "--do_train is 0, and one evaluation is like another"),
        (
            "eval_interval",
            bool(args.eval_interval) and not args.evaluate_during_training,
            "no evaluation while training",
        ),
        ("evaluate_during_training", args.evaluate_during_training and not args.do_eval, "--do_eval is 0"),
        ("eval_all_checkpoints", args.eval_all_checkpoints and not args.do_eval, "--do_eval is 0"),
    ]
    return warnings_of(args, cases) + common_warnings(args, ranks, default)


# -------------------------------------------------------------------------------------------------- data


def task_folders(args, say):
    """{task: folder} of --task below --data_dir. Errors: UserError where there is none."""
    top = Path(args.data_dir).expanduser()
    if args.task != "all":
        task = TASKS[args.task]
        below = top / task.folder
        if not below.is_dir() and not any((top / file).exists() for _, file in (("", "train.tsv"), *task.dev)):
            raise UserError(f"--data_dir {top}: neither a folder {task.folder} nor its train.tsv is in there")
        return {args.task: below if below.is_dir() else top}
    found = {name: top / task.folder for name, task in TASKS.items() if (top / task.folder).is_dir()}
    if not found:
        wanted = ", ".join(task.folder for task in TASKS.values())
        raise UserError(f"--data_dir {top}: no folder of a task is in there ({wanted})")
    if absent := [TASKS[name].folder for name in TASKS if name not in found]:
        say(f"not in {top}, so left out: {', '.join(absent)}")
    return found


def read_task(job, name, folder):
    """The Data of a task; the files that this command needs must be there, those of the test may be absent."""
    args, task = job.args, TASKS[name]

    def read(file, labelled=True):
        options = (args.max_seq_len, args.cache_dir, labelled, args.overwrite_cache, job.say)
        path = Path(on_main(job.ranks, lambda: str(cached_features(folder / file, task, job.encoder, *options))))
        features = read_features(path)
        if features.skipped:
            job.say(f"{folder / file}: skipped {int(features.skipped):,} lines with too few fields")
        return GlueAssembler(features, job.encoder, args.max_seq_len), path.stem

    training, key = read("train.tsv") if args.do_train else (None, "")
    dev = {suffix: read(file)[0] for suffix, file in task.dev} if args.do_eval else {}
    test = {}
    for target, file in task.test if args.do_predict else ():
        if (folder / file).exists():
            test[target] = read(file, labelled=False)[0]
        else:
            job.say(f"{folder / file} is not there: no predictions {target}.tsv")
    return Data(name, task, key, training, dev, test)


def earlier_results(args, out, names):
    """What an earlier command has left of these tasks and is to be replaced. Errors: UserError where it said nothing."""
    if args.from_resume:
        return []
    for name in names:
        earlier = [*out.glob(f"{name}/seed_*/*"), *out.glob(f"{name}/eval_results.json")]
        if earlier and not args.overwrite_output_dir:
            raise UserError(
                f"--out_dir: {out / name} holds results already: name another folder, replace them with "
                "--overwrite_output_dir 1, or go on where they stop with --from_resume 1"
            )
    return [path for name in names for what in ("seed_*", "eval_results.json") for path in out.glob(f"{name}/{what}")]


def make_room(args, out, names):
    for path in earlier_results(args, out, names):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in names:
        make_folder(out / name)


# -------------------------------------------------------------------------------------------------- a run


def one_run(job, data, folder, seed):
    """Train and evaluate once: (exit code, what {folder}/eval_results.json holds then)."""
    args, ranks = run_args(job, data, seed), job.ranks
    settings = {name: getattr(args, name) for name in SETTINGS}
    earlier = on_main(ranks, lambda: args.from_resume and read_json(folder / "eval_results.json"))
    if earlier and earlier["settings"] == settings:
        job.say(f"{data.name}, seed {seed}: done before, {line_of(earlier['results'])}")
        return 0, earlier
    job.say(f"--- {data.name}, seed {seed}")
    seed_everything(seed)  # the same on all ranks, so that all begin with the same weights
    with user_errors():
        model, new = init_model(args, data.task, job.model_folder, job.encoder.vocab_size)
        make_folder(folder)
    start = weights_digest(model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.to(job.device).train()
    seed_everything(seed, ranks.rank)
    groups = layer_groups(model, args.weight_decay, args.layer_decay)
    optimizer = build_adamw(groups, args.learning_rate, eps=1e-6)
    options = {"device": job.device, "dtype": job.dtype, "ranks": ranks, "grad_clip": args.grad_clip, "n_sums": 4}
    engine = Engine(model, optimizer, objective(data.task, model), **options)

    result = {"task": data.name, "seed": seed, "updates": 0, "settings": settings, "results": {}}
    evaluation = Evaluation(engine, data.task, data.dev, args.batch_size, job.signals)
    if args.do_train:
        stem, written = folder / f"{data.name}_{folder.name}", {"model": folder / "model"}
        run = new_run(job, args, data, stem, engine, evaluation, start)
        exit_code = carry_out(run, stem, written, lambda: prepare(run, job, data, new))
        if exit_code:
            return exit_code, None
        result["updates"] = run.progress.update
    stop_signal = look_back(args, data, folder, evaluation, result, job.say)
    if stop_signal:
        job.say(f"stopped by signal {stop_signal}; the same command with --from_resume 1 evaluates what is trained")
        return 128 + stop_signal, None
    on_main(ranks, lambda: write_json(folder / "eval_results.json", result))
    return 0, result


# What a finished run must have been made with to count as done
SETTINGS = (
    "model_path", "from_scratch", "dropout", "max_seq_len", "epochs", "max_steps", "batch_size", "accumulation_steps", "grad_clip",
    "learning_rate", "layer_decay", "warmup_share", "weight_decay", "do_train", "do_eval", "do_predict",
    "eval_all_checkpoints",
)  # fmt: skip


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


def new_run(job, args, data, stem, engine, evaluation, start):
    folder = stem.parent
    checkpoints, reporter = Checkpoints(f"{stem}_resume", args.keep_checkpoints), Reporter(job.ranks.is_main)
    if job.ranks.is_main:
        remove_temporaries(stem, checkpoints.folder)
    of_epochs = args.epochs * schedule(args, job.ranks, data).n_updates
    total = min(of_epochs, args.max_steps or of_epochs)
    warmup = int(args.warmup_share * total)

    def save(weights, update):
        if update >= total:
            save_model(folder / "model", engine.model, job.tokenizer, weights)
        if args.save_steps and update and update % args.save_steps == 0:
            save_model(folder / f"checkpoint-{update}", engine.model, job.tokenizer, weights)

    run = Run(
        args=args,
        ranks=job.ranks,
        signals=job.signals,
        reporter=reporter,
        engine=engine,
        checkpoints=checkpoints,
        plan=lambda epoch: GluePlan(data.train.features, args.seed, epoch),
        assembler=data.train,
        learning_rate=lambda *_: args.learning_rate * SCHEDULE(run.progress.update, total, warmup),
        metrics=lambda sums: metrics(data.task, sums),
        save_weights=save,
        validate=None,
        epochs=args.epochs,
        max_updates=total if total < of_epochs else float("inf"),
        save_at=frozenset(range(args.save_steps, total, args.save_steps)) if args.save_steps else frozenset(),
        shown=("train_acc", "grad_norm"),
        command=job.command,
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


SCHEDULE = ENCODER_SCHEDULES["separate_linear"]


def new_weights(names):
    return f"but a new {', '.join(sorted({name.split('.')[0] for name in names}))}" if names else "with its head"


def prepare(run, job, data, new):
    """Say what the run will do, and make it fast."""
    args, model, say, plan = run.args, run.engine.model, run.reporter.say, run.plan(run.progress.epoch)
    config, lengths = model.config, data.train.features.lengths
    parameters = sum(p.numel() for p in model.parameters())
    embeddings = sum(p.numel() for name, p in model.named_parameters() if "embeddings." in name)
    lines = [
        f"model: {type(model).__name__}, {parameters / 1e6:.2f} M parameters, {config.num_hidden_layers} layers of width "
        f"{config.hidden_size}, "
        + ("random weights" if args.from_scratch else f"from {job.model_folder}, {new_weights(new)}"),
        f"data: {data.task.folder}, {plan.n_rows:,} examples of {lengths.mean():.0f} tokens in the mean, {plan.T} at most",
    ]
    fields = {**config.to_diff_dict(), "parameters": parameters}
    describe(run, plan, job.dtype, lines, fields, plan.n_rows)
    if args.seed == job.args.seed:  # the other seeds' are the same
        say(rates(run.engine.optimizer.param_groups, args))
    tokens = lengths.mean() * min(
        plan.n_rows * run.epochs, run.max_updates * schedule(args, job.ranks, data).rows_per_update
    )
    flops = 6 * (parameters - embeddings) * tokens / job.ranks.world_size
    compile_blocks(Layers(model), args.use_compile, job.device, say, None, flops)


if __name__ == "__main__":
    run_cli(main)
