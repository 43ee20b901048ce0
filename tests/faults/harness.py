"""Runs of the trainer as processes of their own, and what is left of them: checkpoints, metrics, ledgers."""

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from dataset.tokenizing.byte_level_bpe import CHAT_TEMPLATE
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import ROOT, argument_list, write_texts
from trainer.saving.checkpoint import Checkpoints, load_checkpoint, verified

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "max_seq_len": 32, "batch_size": 2,
    "accumulation_steps": 2, "epochs": 2, "save_interval": 6, "log_interval": 1, "num_workers": 0, "device": "cpu",
    "dtype": "float32", "dist_timeout": 60, "use_compile": 0, "report": 0,
}  # fmt: skip
TIMES = ("tokens_per_second", "updates_per_second", "epoch_Time", "eta", "memory", "flops_utilisation")


def make_tokenizer(folder):
    """A byte-level tokenizer of 259 entries: small models, quick starts."""
    tokenizer = small_tokenizer("<|im_start|>", "<|im_end|>", "<|endoftext|>", vocab_size=259)
    # Fine-tuning wants it.
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return Path(folder)


def make_corpus(path, n_documents=60, seed=0):
    """Documents of 6 to 28 characters, each beginning with its number, so that no two are alike."""
    generator = random.Random(seed)
    texts = [generator.choices("abcdefgh ", k=generator.randint(2, 24)) for _ in range(n_documents)]
    return Path(write_texts(path, [f"{i:03d} {''.join(text)}" for i, text in enumerate(texts)]))


def rising(folder):
    """Settings of a run whose validation loss rises: its letters are not in what is trained."""
    path = Path(folder) / "valid.jsonl"
    path.write_text('{"text": "XYZ"}\n')
    return {"val_path": path, "learning_rate": 0.02}


class ForkServer:
    """The process of tests/faults/server.py."""

    def __init__(self, tokenizer):
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.faults.server", str(tokenizer)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
        assert self.process.stdout.readline() == "ready\n"

    def fork(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


class Process:
    """One forked run. `wait` gives its exit code, the negative signal number of one that was killed."""

    def __init__(self, server, trainer, log, arguments, environment, hooks, cwd):
        self.log = log
        words = {"arguments": arguments, "environment": environment, "hooks": hooks or {}}
        self.pid = server.fork(trainer=trainer, log=str(log), cwd=str(cwd), **words)

    out = property(lambda self: self._read("out"))
    err = property(lambda self: self._read("err"))

    def _read(self, stream):
        path = Path(f"{self.log}.{stream}")
        return path.read_text() if path.exists() else ""

    def running(self):
        return not Path(f"{self.log}.status").exists()

    def kill(self, signum=signal.SIGKILL):
        if self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def wait(self, timeout=120):
        end = time.monotonic() + timeout
        while self.running():
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"still running after {timeout} s\n{self.out}\n{self.err}")
            time.sleep(0.005)
        return int(Path(f"{self.log}.status").read_text())

    def until(self, condition, timeout=60):
        """Poll until the condition holds; whether it did before the run was over."""
        end = time.monotonic() + timeout
        while not condition():
            if not self.running():
                return False
            assert time.monotonic() < end, f"{self.out}\n{self.err}"
            time.sleep(0.0005)
        return True


class Lab:
    """A corpus and a folder for runs of a trainer. `start` begins one, `run` waits for it too."""

    trainer = "train_pretrain"
    prefix = "pretrain"

    def __init__(self, folder, server, tokenizer, corpus, **settings):
        self.folder, self.server, self.tokenizer, self.corpus = Path(folder), server, tokenizer, corpus
        self.settings, self.count = settings, 0

    def flags(self, name, **changes):
        return argument_list({
            "data_path": self.corpus, "tokenizer_path": self.tokenizer, "cache_dir": self.corpus.parent / "cache",
            "out_dir": self.folder / name, **SMALL, **self.settings, **changes,
        })  # fmt: skip

    def start(self, name, hooks=None, environment=None, **changes):
        self.count += 1
        log = self.folder / f"{name}.{self.count}"
        environment = {"FAULTS_ATTEMPT": str(self.count), **(environment or {})}
        return Process(self.server, self.trainer, log, self.flags(name, **changes), environment, hooks, self.folder)

    def run(self, name, expect=0, **options):
        process = self.start(name, **options)
        code = process.wait()
        assert code == expect, f"exit code {code}\n{process.out}\n{process.err}"
        return process

    def start_ranks(self, name, world_size=2, hooks=None, hooks_of_rank=None, **changes):
        """One process per rank, joined as torchrun would join them."""
        processes, attempt = [], {"FAULTS_ATTEMPT": f"{self.count + 1} together"}
        for rank, environment in enumerate(rank_environments(world_size)):
            own = {**(hooks or {}), **(hooks_of_rank or {}).get(rank, {})}
            processes.append(self.start(name, own, {**attempt, **environment}, **changes))
        return processes

    def run_ranks(self, name, world_size=2, expect=0, **options):
        if world_size == 1:
            return [self.run(name, expect, **options)]
        processes = self.start_ranks(name, world_size, **options)
        for process in processes:
            code = process.wait()
            assert code == expect, f"exit code {code}\n" + "\n".join(p.out + p.err for p in processes)
        return processes

    def finish(self, whole=None, world_size=1, **options):
        """Resume "run" to its end: that of the undisturbed run, of this Lab or of another one; no temporaries are left."""
        self.run_ranks("run", world_size, from_resume=1, **options)
        assert self.result("run") == (whole or self).result("whole")
        assert self.leftovers("run") == []

    def stem(self, name):
        moe = "_moe" if self.settings.get("use_moe") else ""
        return self.folder / name / f"{self.prefix}_{self.settings.get('hidden_size', SMALL['hidden_size'])}{moe}"

    def checkpoints(self, name):
        """Newest first."""
        return Checkpoints(f"{self.stem(name)}_resume").paths()

    def state(self, name):
        return load_checkpoint(self.checkpoints(name)[0])

    def result(self, name):
        """What two runs must have in common to the last bit: final model and optimiser, half-precision file, metrics."""
        newest = self.checkpoints(name)[0]
        assert verified(newest)
        state = load_checkpoint(newest)
        progress = {**state["progress"], "log_seconds": 0.0}
        return {
            "state": digest([state["model"], state["engine"], progress, state["ranks"]]),
            "half": digest(torch.load(f"{self.stem(name)}.pth", weights_only=True)),
            "best": self.best(name),
            "metrics": self.metrics(name),
        }

    def best(self, name):
        """Digest of the weights of the lowest validation loss; None: there are no such files."""
        path = Path(f"{self.stem(name)}.best.pth")
        assert path.is_file() == path.with_suffix(".json").is_file()
        return digest(torch.load(path, weights_only=True)) if path.is_file() else None

    def metrics(self, name):
        """The metrics file as dicts, without times and without what each start has noted about itself."""
        lines = map(json.loads, Path(f"{self.stem(name)}.metrics.jsonl").read_text().splitlines())
        lasting = (line for line in lines if "settings" not in line)
        return [{key: value for key, value in line.items() if key not in TIMES} for line in lasting]

    def log_lines(self, name):
        # A fresh start moves or removes that of the run before, perhaps just now.
        with contextlib.suppress(FileNotFoundError):
            return Path(f"{self.stem(name)}.metrics.jsonl").read_bytes().count(b'"loss": ')
        return 0

    def is_saving(self, name):
        """True if a checkpoint is half written."""
        return any(self.stem(name).parent.rglob("update_*.pt.*.tmp"))

    def leftovers(self, name):
        return [str(path) for path in (self.folder / name).rglob("*.tmp")]

    def ledger(self, path):
        """{update: (sorted pieces, cross-entropy sum)} of all ranks. A line replaces those of earlier attempts from its number on."""
        files = Path(path).parent.glob(f"{Path(path).name}.*")
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        updates = {}
        for line in sorted(lines, key=lambda line: line["time"]):
            later = [number for number in updates if number >= line["update"]]
            for number in later:
                if updates[number][0]["attempt"] != line["attempt"]:
                    del updates[number]
            updates.setdefault(line["update"], []).append(line)
        ledger = {}
        for number, done in sorted(updates.items()):
            pieces = sorted(tuple(piece) for line in done for piece in line["pieces"])
            ledger[number] = pieces, sum(line["loss"] for line in done)
        return ledger

    def documents(self):
        """The inputs of every document, in the order of the file."""
        from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer

        encoder = DocumentEncoder(load_tokenizer(self.tokenizer))
        texts = [json.loads(line)["text"] for line in self.corpus.read_text().splitlines()]
        return [tuple(ids[:-1]) for ids in encoder.encode(texts)]

    def check_ledger(self, path, epochs):
        """Every document exactly once in every epoch. An update never spans two epochs."""
        found, wanted, epoch = [], sorted(self.documents()), 0
        for pieces, _ in self.ledger(path).values():
            found += pieces
            if len(found) >= len(wanted):
                assert sorted(found) == wanted
                found, epoch = [], epoch + 1
        assert (found, epoch) == ([], epochs)


def rank_environments(world_size):
    """The variables that torchrun sets for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(world_size)]


def start_torchrun(lab, name, hooks, *launcher, **changes):
    """Popen of a real torchrun of two ranks with hooks planted, in a session of its own; output and errors in one stream."""
    environment = {**os.environ, "FAULT_HOOKS": json.dumps(hooks), "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *launcher,
        str(ROOT / "tests" / "faults" / "launch.py"), *lab.flags(name, **changes),
    ]  # fmt: skip
    return subprocess.Popen(
        command, env=environment, cwd=lab.folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def digest(value):
    """SHA-256 over nested containers of tensors and plain values."""
    sha = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
            sha.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for name in sorted(value, key=str):
                sha.update(str(name).encode())
                add(value[name])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            sha.update(repr(value).encode())

    add(value)
    return sha.hexdigest()


def seeded_random(name):
    """A random.Random of FAULTS_SEED (default: today's day number), which is printed so that a failure can be repeated."""
    seed = os.environ.get("FAULTS_SEED", str(int(time.time() // 86400)))
    print(f"{name}: FAULTS_SEED={seed}")
    return random.Random(f"{seed} {name}")
