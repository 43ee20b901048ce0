"""What several test files need."""

import contextlib
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.training import REFERENCE

ROOT = Path(__file__).resolve().parents[1]
# Golden files, public tokenizers and corpora, which the repository does not hold; docs/corpora.md tells what they are.
SHARED = REFERENCE
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason=f"no reference material at {SHARED} (MINIMIND_REFERENCE)")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran", "over", "far", "hills", "and", "rain", "fell"]
SMALL = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_seq_len": 24, "batch_size": 2,
    "accumulation_steps": 2, "log_interval": 1, "num_workers": 0, "device": "cpu", "dtype": "float32", "use_compile": 0,
    "dist_timeout": 60, "report": 0,
}  # fmt: skip


def tiny_model(seed=0, **fields):
    """A MiniMindForCausalLM of two layers of width 32 over 97 tokens, in train mode; `fields` override its config."""
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(seed)
    return MiniMindForCausalLM(MiniMindConfig(**{**sizes, "intermediate_size": 48, **fields})).train()


def write_weights(stem, **fields):
    """A tiny_model's .pth, with its .json beside it; returns its path as a flag takes it."""
    from trainer.saving.weights import save_pth

    model = tiny_model(**fields)
    save_pth(model.state_dict(), model.config.to_dict(), stem)
    return f"{stem}.pth"


def a_document_a_row(ids):
    """The document_ids and position_ids of rows that are one document each."""
    return torch.zeros_like(ids), torch.arange(ids.shape[1]).expand_as(ids)


def batches_of(assembler, plan, schedule, rank=0, num_workers=0):
    """Yields (update, micro-batch within it, batch) of one epoch; the loader's processes end with the iterator."""
    from dataset.loader import Loader

    loader = Loader(assembler, rank, num_workers)
    try:
        for update, batches in loader.updates(plan.recipe, schedule):
            for micro_batch, batch in enumerate(batches):
                yield update, micro_batch, batch
    finally:
        loader.close()


def steps_of(schedule, rank):
    """[(update, micro-batch within it, lo, hi)] of one rank from start_row to the end of the epoch."""
    steps = []
    for update in range(schedule.first_update, schedule.n_updates):
        steps += [(update, micro, lo, hi) for micro, (lo, hi) in enumerate(schedule.slices(update, rank))]
    return steps


def write_records(path, records):
    """A jsonl file of these dicts; returns its path as a flag takes it."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def write_texts(path, texts):
    """A jsonl file of these texts; returns its path as a flag takes it."""
    return write_records(path, [{"text": text} for text in texts])


def change_json(path, **changes):
    """Change fields of a JSON object in a file; None takes a field out."""
    fields = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}), encoding="utf-8")


def copy_tokenizer(folder, **changes):
    """The repository's tokenizer in a folder, with these fields of its config changed; returns the folder."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "model" / name, folder)
    change_json(folder / "tokenizer_config.json", **changes)
    return folder


def swap_entries(folder):
    """Two entries of the vocabulary change places: the tokenizer has the same size, and fits no weights. Returns the folder."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_corpus(path, n_documents=40, seed=0):
    """A jsonl file of documents of 1 to 30 made-up words; returns its path."""
    generator = random.Random(seed)
    texts = (generator.choices(WORDS, k=generator.randint(1, 30)) for _ in range(n_documents))
    write_texts(path, map(" ".join, texts))
    return path


def flags(**changes):
    """The argument list of a run that takes a fraction of a second, with these flags changed; None drops a flag."""
    return argument_list({**SMALL, **changes})


def argument_list(settings):
    """{flag: value}, or a list of values, as the words of a command line, without those that are None."""
    words = []
    for name, value in settings.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def train(**changes):
    """Call the trainer's main in this process; returns its Trainer (engine, progress, ...) after it has finished."""
    from trainer import train_pretrain

    return trainer_of(train_pretrain.main, flags(**changes))


def trainer_of(main, arguments):
    """The Trainer of a command that is run in this process."""
    with trainers_that_fit() as trainers:
        assert main(arguments) == 0
    return trainers[0]


@contextlib.contextmanager
def trainers_that_fit():
    """The list of the Trainers whose `fit` is called within the block."""
    from trainer.loop import Trainer

    trainers = []
    with before_calls(Trainer, "fit", trainers.append):
        yield trainers


@contextlib.contextmanager
def before_update(number, act):
    """Within the block act() is called before the update of this number, the first one being 1."""
    from trainer.engine import Engine

    numbers = itertools.count(1)
    with before_calls(Engine, "update", lambda *_: act() if next(numbers) == number else None):
        yield


def before_calls(owner, name, act):
    """A patch of a function, or of a method: act(its arguments) is called before each of its calls."""
    function = getattr(owner, name)

    def acting(*given, **named):
        act(*given)
        return function(*given, **named)

    return mock.patch.object(owner, name, acting)


def records(run, key="loss"):
    """The lines that have `key` of a run's metrics file, or of any jsonl file: "loss" for log lines, "val_loss" ..., None: all."""
    path = run.reporter.file.name if hasattr(run, "reporter") else run
    lines = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if key is None or key in line]


def losses(run):
    return [record["loss"] for record in records(run)]


@contextlib.contextmanager
def stopped_after(update):
    """Runs within the block stop for a signal once they have done so many updates: the ranks learn of one with the next update."""
    from trainer.loop import Trainer

    after_update = Trainer.after_update

    def stopping(trainer, *args):
        stop_request = after_update(trainer, *args)
        if trainer.progress.update == update - 1:
            trainer.signals.signum = 15
        return stop_request

    with mock.patch.object(Trainer, "after_update", stopping):
        yield


def assert_same_weights(one, other):
    """Two Trainers, bit for bit."""
    for ours, theirs in zip(one.engine.parameters, other.engine.parameters, strict=True):
        assert torch.equal(ours, theirs)


def command_line(arguments, launcher=(), cwd=None, script=ROOT / "trainer" / "train_pretrain.py", **environment):
    """Run a trainer in a process of its own, as a user does; returns the CompletedProcess."""
    command = [sys.executable, *launcher, str(script), *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def run_program(program, *arguments, cwd=ROOT, **environment):
    """Run a text of Python in a process of its own; returns the CompletedProcess."""
    return command_line([program, *arguments], cwd=cwd, script="-c", **environment)


def complaint(capsys, main, arguments):
    """The one line on stderr with which a command ends that its user can mend; the exit code is 2."""
    from trainer.machine.command_line import run_cli

    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run_cli(lambda: main(arguments))
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error.rstrip("\n")


def wait_until(condition, seconds=60, explain=lambda: "it has not happened"):
    """What `condition()` gives as soon as it is true."""
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, explain()
        time.sleep(0.01)
    return found


def is_running(pid):
    """True if a process exists, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_ranks(function, *args, world_size=2, timeout_s=400):
    """function(*args) on `world_size` Gloo processes as torchrun would start them; returns what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        # The ranks are forked from a process that has imported the trainers once, where the system can fork.
        method = "forkserver" if hasattr(os, "fork") else "spawn"
        torch.multiprocessing.set_forkserver_preload(["torch._dynamo", "trainer.train_pretrain"])
        given = (function, args, world_size, folder)
        context = torch.multiprocessing.start_processes(_rank, given, world_size, join=False, start_method=method)
        try:
            give_up = time.monotonic() + timeout_s
            while not context.join(timeout=1):
                assert time.monotonic() < give_up, f"the ranks have not finished within {timeout_s} s"
        finally:
            for process in context.processes:
                process.kill()
        return [torch.load(Path(folder, str(rank)), weights_only=True) for rank in range(world_size)]


def _rank(rank, function, args, world_size, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    os.environ["RANKS_FOLDER"] = folder
    torch.save(function(*args), Path(folder, str(rank)))


def new_port(name):
    """Agree with the other ranks on a free port for the process group `name`: every group needs one of its own."""
    place = Path(os.environ["RANKS_FOLDER"], name)
    if os.environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place.with_suffix(".tmp").write_text(str(free.getsockname()[1]))
        place.with_suffix(".tmp").rename(place)
    while not place.exists():
        time.sleep(0.01)
    os.environ["MASTER_PORT"] = place.read_text()


@contextlib.contextmanager
def process_group(name, timeout_s=60):
    """The Ranks of a process group on the CPU, which lasts as long as the block."""
    from trainer.machine.ranks import init_distributed_mode

    new_port(name)
    ranks, _ = init_distributed_mode("cpu", timeout_s=timeout_s)
    try:
        yield ranks
    finally:
        torch.distributed.destroy_process_group()
