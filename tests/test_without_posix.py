"""The trainers on a system without what Windows does not have, as far as Linux can play it: calls, signals and modules are
taken away after the libraries are imported. Reference: a run that goes through, and goes on."""

import pytest

from tests.all_trainers import run_program, write_inputs
from tests.helpers import flags
from tests.trainer.glue.glue_helpers import arguments
from tests.trainer.test_train_electra import flags as electra_flags

# What is taken away: of os, of signal, of time, and whole modules. The standard library itself needs some others here.
MISSING = {
    "os": [
        "fork", "forkpty", "getuid", "geteuid", "getgid", "sysconf", "posix_fadvise", "memfd_create", "sched_getaffinity",
        "sched_setaffinity", "mkfifo", "killpg", "getpgid", "setsid", "chown", "uname", "nice", "getloadavg",
    ],
    "signal": ["SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE", "setitimer", "pthread_sigmask"],
    "time": ["clock_gettime", "CLOCK_BOOTTIME"],
}  # fmt: skip
MODULES = ["fcntl", "resource", "pwd", "grp", "termios", "readline"]

PROGRAM = """
import importlib, json, sys
# Whatever the libraries take from POSIX they take now: on Windows they have other code.
import multiprocessing.popen_spawn_posix, multiprocessing.resource_tracker, multiprocessing.util
import filelock, matplotlib.figure, torch, tqdm, transformers
import torch.distributed, torch.utils.data
from sklearn import metrics
from scipy import stats
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertTokenizer, ElectraForPreTraining

missing, modules, commands = json.loads(sys.argv[1])
for module, names in missing.items():
    for name in names:
        delattr(importlib.import_module(module), name)
for name in modules:
    sys.modules[name] = None
sys.platform = "win32"

for trainer, arguments in commands:
    code = importlib.import_module("trainer." + trainer).main(arguments)
    print("ended", trainer, code)
"""


@pytest.mark.slow
def test_the_trainers_train_without_what_windows_lacks(tmp_path):
    data, chats, electra, place = write_inputs(tmp_path)
    options = {
        "data_path": data,
        "out_dir": tmp_path / "out",
        "report": 1,
        "val_fraction": 0.2,
        "cpu_processes": "auto",
    }
    commands = [
        ("train_pretrain", flags(**options)),
        ("train_pretrain", flags(**options, epochs=2, from_resume=1)),
        ("train_sft", flags(**chats, cpu_processes="auto")),
        ("train_electra", electra_flags(**electra, max_steps=3)),
        ("train_glue", arguments(place, tmp_path / "glue", epochs=1)),
    ]
    ended = run_program(PROGRAM, [MISSING, MODULES, commands])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ended train_pretrain 0") == 2
    assert "resumed from" in ended.stdout and "report: " in ended.stdout
    assert "ended train_sft 0" in ended.stdout
    assert "ended train_electra 0" in ended.stdout and "ended train_glue 0" in ended.stdout
