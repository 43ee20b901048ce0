"""All trainers, in processes that lack packages which only some users need, or what Windows does not have."""

import json

import pytest

from tests.chats import write_chats
from tests.encoders.electra.test_command import flags as electra_flags
from tests.encoders.electra.test_examples import write_lines, write_vocab
from tests.encoders.glue.glue_helpers import arguments, make_place
from tests.helpers import flags, run_program, write_corpus

# torch and transformers too look for packages that they can do without.
PACKAGES = "wandb zstandard pyarrow fastokens rensa matplotlib sklearn scipy gguf pandas fsspec"
WITHOUT_PACKAGES = """
from importlib.machinery import PathFinder
found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in missing else found(name, path, target)

PathFinder.find_spec = find_spec
"""

# What Windows lacks: of os, of signal, of time, and whole modules. The standard library itself needs some others here.
POSIX = {
    "os": [
        "fork", "forkpty", "getuid", "geteuid", "getgid", "sysconf", "posix_fadvise", "memfd_create", "sched_getaffinity",
        "sched_setaffinity", "mkfifo", "killpg", "getpgid", "setsid", "chown", "uname", "nice", "getloadavg",
    ],
    "signal": ["SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE", "setitimer", "pthread_sigmask"],
    "time": ["clock_gettime", "CLOCK_BOOTTIME"],
    "multiprocessing.context": ["ForkProcess"],
}  # fmt: skip
WITHOUT_POSIX = """
# Whatever the libraries take from POSIX they take now: on Windows they have other code.
import multiprocessing.popen_spawn_posix, multiprocessing.resource_tracker, multiprocessing.util
import filelock, matplotlib.figure, torch, tqdm, transformers
import torch.distributed, torch.utils.data
from sklearn import metrics
from scipy import stats
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertTokenizer, ElectraForPreTraining

for module, names in missing.items():
    for name in names:
        delattr(importlib.import_module(module), name)
for name in ("fcntl", "resource", "pwd", "grp", "termios", "readline"):
    sys.modules[name] = None
sys.platform = "win32"
"""


@pytest.fixture
def train_all(tmp_path):
    """A function that takes something away, runs every trainer, pretraining twice, and gives what was printed."""
    data = write_corpus(tmp_path / "data.jsonl")
    out = tmp_path / "out"
    chats = {"data_path": write_chats(tmp_path / "chats.jsonl"), "max_seq_len": 64, "out_dir": out}
    electra = {"vocab_path": write_vocab(tmp_path / "vocab.txt"), "out_dir": tmp_path / "electra", "max_steps": 3}
    electra["data_path"] = write_lines(tmp_path / "lines.jsonl")[0]
    place = make_place(tmp_path / "place")
    pretrain = {"data_path": data, "out_dir": out, "report": 1, "val_fraction": 0.2, "cpu_processes": "auto"}

    def train(take_away, missing, **glue):
        commands = [
            ("train_pretrain", flags(**pretrain)),
            ("train_pretrain", flags(**pretrain, epochs=2, from_resume=1)),
            ("train_sft", flags(**chats, cpu_processes="auto")),
            ("train_electra", electra_flags(**electra)),
            ("train_glue", arguments(place, tmp_path / "glue", epochs=1, **glue)),
        ]
        program = f"""import importlib, json, sys
missing, commands = json.loads(sys.argv[1])
{take_away}
for trainer, words in commands:
    print("ended", trainer, importlib.import_module("trainer." + trainer).main(words))
"""
        ended = run_program(program, json.dumps([missing, commands], default=str))
        assert ended.returncode == 0, ended.stderr
        assert [ended.stdout.count(f"ended {name} 0") for name, _ in commands] == [2, 2, 1, 1, 1]
        assert "resumed from" in ended.stdout and (out / "pretrain_16.pth").is_file()
        return ended.stdout

    return train


@pytest.mark.slow
def test_the_trainers_train_without_packages_that_only_some_need(train_all):
    said = train_all(WITHOUT_PACKAGES, PACKAGES.split(), do_eval=0, do_predict=1)
    assert "pip install matplotlib, then python scripts/report.py" in said


@pytest.mark.slow
def test_the_trainers_train_without_what_windows_lacks(train_all):
    assert "report: " in train_all(WITHOUT_POSIX, POSIX)
