"""What the files of launch/ hand to torchrun and to the trainer. Reference: the parsers of both. faults/test_two_nodes.py runs them."""

import json
import os
import subprocess
import sys
import time

import pytest
from torch.distributed.run import get_args_parser

from tests.helpers import ROOT
from trainer.pretrain.settings import PretrainSettings

# It writes a line with its name and arguments, and what is set of some variables, and ends with the exit code that it is told.
STAND_IN = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
kept = {{key: os.environ[key] for key in ("HEAD", "PORT", "NODES", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT") if key in os.environ}}
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([name, sys.argv[1:], kept]) + "\\n")
print(os.environ.get("SAID_BY_" + name, ""))
sys.exit(int(os.environ.get("CODE_OF_" + name, "0")))
"""
FLAGS = ["--data_path", "my text.jsonl", "--batch_size", "4"]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="scripts for a POSIX shell")


@pytest.fixture
def run(tmp_path):
    """run(file, **variables): start a file of launch/ with FLAGS. Returns (the process, [(program, arguments, variables)])."""
    for name in ("torchrun", "srun", "scontrol"):
        program = tmp_path / name
        program.write_text(STAND_IN.format(python=sys.executable), encoding="utf-8")
        program.chmod(0o755)

    def start(file, **variables):
        calls = tmp_path / "calls"
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), **variables}
        command = ["sh", f"launch/{file}", *FLAGS]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30)
        lines = calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []
        return ended, [json.loads(line) for line in lines]

    return start


def test_c10d(run):
    ended, calls = run("c10d.sh", HEAD="node0:29400", NODES="1:2", PROCESSES="8")
    assert ended.returncode == 0, ended.stderr
    ((_, arguments, variables),) = calls
    launcher = get_args_parser().parse_args(arguments)
    assert (launcher.nnodes, launcher.nproc_per_node, launcher.max_restarts) == ("1:2", "8", 3)
    assert (launcher.rdzv_backend, launcher.rdzv_endpoint) == ("c10d", "node0:29400")
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "110" and launcher.rdzv_id == "minimind"
    assert (ROOT / launcher.training_script).is_file()
    settings = PretrainSettings.parse(launcher.training_script_args)
    assert settings.from_resume
    assert settings.data_path == ["my text.jsonl"] and settings.batch_size == 4


def test_static(run):
    ended, calls = run("static.sh", HEAD="node0", PORT="29500", NODES="2", NODE="1", TRAINER="trainer/train_sft.py")
    assert ended.returncode == 0, ended.stderr
    ((_, arguments, variables),) = calls
    assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "110"
    launcher = get_args_parser().parse_args(arguments)
    assert (launcher.nnodes, launcher.node_rank, launcher.nproc_per_node) == ("2", 1, "gpu")
    assert (launcher.master_addr, launcher.master_port) == ("node0", 29500)
    assert launcher.training_script == "trainer/train_sft.py"


@pytest.mark.parametrize("file, missing", [("c10d.sh", "HEAD"), ("static.sh", "NODE")])
def test_a_variable_that_is_missing_is_named(run, file, missing):
    variables = {"HEAD": "node0:29400", "NODES": "2", "PORT": "29500", "NODE": "0"}
    del variables[missing]
    ended, calls = run(file, **variables)
    assert ended.returncode == 2 and not calls
    assert missing in ended.stderr and ended.stderr.count("\n") == 1


JOB_OF_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2"}

# (exit code of the launchers, seconds since the start, seconds that are left or what Slurm tells of the end, whether the job goes
# into the queue again)
ENDINGS = [
    (0, 9000, 100, False),
    (1, 9000, 100, True),
    (1, 9000, 10_000, False),
    # A wrong flag in a job of three minutes: it would come back for ever.
    (1, 20, 160, False),
    (2, 9000, 100, False),
    # Without a time limit.
    (143, 9000, "Unknown", False),
]


@pytest.mark.parametrize("code, age, seconds_left, again", ENDINGS)
def test_a_job_of_slurm_that_ends_at_its_time_limit_goes_into_the_queue_again(run, code, age, seconds_left, again):
    end = seconds_left if isinstance(seconds_left, str) else slurm_time_in(seconds_left)
    told = f"   StartTime={slurm_time_in(-age)} EndTime={end} Deadline=N/A"
    ended, calls = run("slurm.sbatch", **JOB_OF_SLURM, CODE_OF_srun=str(code), SAID_BY_scontrol=told)
    assert ended.returncode == (0 if again else code), ended.stderr
    ((_, arguments, variables),) = [call for call in calls if call[0] == "srun"]
    assert arguments[-len(FLAGS) :] == FLAGS
    assert variables["PORT"] == "20007" and variables["NODES"] == "2"
    assert (["requeue", "7"] in [call[1] for call in calls]) == again


def slurm_time_in(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def test_slurm_gives_whole_nodes():
    """sbatch reads the options above the first command. Without them a task gets one processor."""
    options = set()
    for line in (ROOT / "launch" / "slurm.sbatch").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        options.add(line.removeprefix("#SBATCH "))
    assert options >= {"--exclusive", "--mem=0", "--ntasks-per-node=1", "--signal=TERM@120", "--requeue"}
