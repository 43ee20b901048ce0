"""launch/ on rented machines: engines where their packages are installed; everywhere their variables, simulated, with a real torchrun."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

from tests.faults.harness import rank_environments
from tests.helpers import ROOT, SMALL, command_line, flags, wait_until
from tests.launch.test_launch_files import pytestmark  # noqa: F401 - a POSIX shell
from trainer.saving.checkpoint import Checkpoints

LAUNCH = ROOT / "launch"
DSTACK, SKY = (yaml.safe_load((LAUNCH / name).read_text()) for name in ("dstack.yml", "skypilot.yaml"))
TRAINJOB, RUNTIME = yaml.safe_load_all((LAUNCH / "kubeflow.yaml").read_text())
# The recipes of the page, as programs
RAY, HF_JOB = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8"), re.DOTALL)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
# {engine: (the command of a node, what the engine sets)}
ENGINES = {
    "dstack": (
        DSTACK["commands"][-1].replace("${{ run.args }}", "$FLAGS"),
        "DSTACK_MASTER_NODE_IP={head} DSTACK_NODES_NUM={nodes} DSTACK_NODE_RANK={rank} DSTACK_GPUS_PER_NODE=1",
    ),
    # The first line activates an environment, which is not there.
    "skypilot": (
        SKY["run"].partition("\n")[2],
        "SKYPILOT_NODE_IPS={head}\n192.0.2.1 SKYPILOT_NUM_NODES={nodes} SKYPILOT_NODE_RANK={rank} SKYPILOT_NUM_GPUS_PER_NODE=1",
    ),
    "kubeflow": (
        shlex.join(TRAINJOB["spec"]["trainer"]["command"]) + " $FLAGS",
        "PET_MASTER_ADDR={head} PET_MASTER_PORT={port} PET_NNODES={nodes} PET_NODE_RANK={rank} PET_NPROC_PER_NODE=1",
    ),
}


@pytest.fixture
def start(tmp_path):
    """start(engine, rank, nodes, flags, repository): the Popen of a node, in a process group of its own; tmp_path/{rank} gets its output."""
    port = rank_environments(1)[0]["MASTER_PORT"]

    def run(engine, rank, nodes, words, folder=ROOT):
        command, variables = ENGINES[engine]
        pairs = variables.format(head="127.0.0.1", port=port, nodes=nodes, rank=rank).split(" ")
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        own = {"PATH": path, "FLAGS": shlex.join(words), **dict(pair.split("=") for pair in pairs)}
        line, log = ["sh", "-c", command.replace("29500", port)], (tmp_path / str(rank)).open("w")
        streams = {"stdout": log, "stderr": subprocess.STDOUT}
        return subprocess.Popen(line, cwd=folder, env={**os.environ, **own}, process_group=0, **streams)

    return run


def copy_of_repository(folder):
    for name in ("common", "dataset", "launch", "model", "scripts", "trainer"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def assert_ends_undisturbed(words, out, launcher=(), **variables):
    """The weights in `out` are those of an undisturbed run, bit for bit."""
    whole = command_line([*words, "--out_dir", out / "whole"], launcher, **variables)
    assert whole.returncode == 0, whole.stderr
    assert (out / "pretrain_16.pth").read_bytes() == (out / "whole" / "pretrain_16.pth").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_nodes_train_together(start, engine, data, tmp_path):
    words = flags(data_path=data, epochs=1, out_dir=tmp_path / "out")
    nodes = [start(engine, rank, 2, words) for rank in range(2)]
    assert [node.wait(300) for node in nodes] == [0, 0], (tmp_path / "0").read_text()
    assert "x 2 ranks" in (tmp_path / "0").read_text() and (tmp_path / "out" / "pretrain_16.pth").is_file()


@pytest.mark.slow
def test_after_a_preemption_skypilots_command_goes_on_on_a_fresh_machine(start, data, tmp_path):
    """The bucket alone is left of the first one."""
    bucket, log = tmp_path / "bucket", tmp_path / "0"
    words = flags(data_path=data, epochs=4, save_interval=2)
    given = ("skypilot", 0, 1, [*words, "--out_dir", str(bucket)])
    first = start(*given, copy_of_repository(tmp_path / "first"))
    wait_until(Checkpoints(f"{bucket}/pretrain_16_resume").paths, 120, log.read_text)
    os.killpg(first.pid, signal.SIGKILL)
    shutil.rmtree(tmp_path / "first")
    assert start(*given, copy_of_repository(tmp_path / "second")).wait(300) == 0, log.read_text()
    assert "resumed from" in log.read_text()
    assert_ends_undisturbed(words, bucket)


@pytest.mark.slow
def test_the_script_of_hugging_face_jobs_trains_and_uploads(data, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "code"), "zip", copy_of_repository(tmp_path / "code"))
    (tmp_path / "hf_job.py").write_text(HF_JOB)
    for name in ("uv", "hf"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n')
        (tmp_path / name).chmod(0o755)
    words = [sys.executable, "hf_job.py", archive, "me/tiny", *flags(data_path=data, epochs=1)]
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=tmp_path, env={**os.environ, **own}, check=True)
    assert {"model.safetensors", "README.md"} <= {*os.listdir(tmp_path / "minimind" / "out" / "hf")}
    _, create, upload = (tmp_path / "calls").read_text().splitlines()
    assert (create, upload) == ("hf repos create me/tiny --private --exist-ok", "hf upload me/tiny out/hf")
    for line in (create, upload):
        told = command_line(["--help"], ["-m", "huggingface_hub.cli.hf", *line.split()[1:-1]], script="--help")
        assert told.returncode == 0, told.stderr


def test_the_header_for_hugging_face_jobs(tmp_path):
    """Read by their command line, which submits nothing."""
    (tmp_path / "hf_job.py").write_text(HF_JOB)
    command = ["-m", "huggingface_hub.cli.hf", "jobs", "uv", "run", "--dry-run"]
    told = command_line(["minimind.zip"], command, script=tmp_path / "hf_job.py", HF_HUB_OFFLINE="1").stdout
    assert "flavor   l4x1 (from script)" in told and "secrets  HF_TOKEN" in told, told


def test_dstack_reads_its_file(monkeypatch):
    configurators = pytest.importorskip("dstack._internal.cli.services.configurators")
    monkeypatch.chdir(ROOT)
    _, task = configurators.load_apply_configuration("launch/dstack.yml")
    assert (LAUNCH / task.repos[0].local_path).resolve() == ROOT
    words = type("Arguments", (), {"run_args": ["--data_path", "/data/my text.jsonl"]})
    configurators.TaskConfigurator._interpolate_commands(None, task.commands, words)
    assert task.commands[-1].endswith("sh launch/static.sh --data_path '/data/my text.jsonl'")


def test_skypilot_reads_its_file():
    sky = pytest.importorskip("sky")
    told = {"DATA": str(ROOT / "docs"), "BUCKET": "my-runs", "FLAGS": "--budget 1h"}
    task = sky.Task.from_yaml_config(dict(SKY), env_overrides=list(told.items()))
    assert task.file_mounts == {"/data": told["DATA"]} and task.envs == told
    ((path, bucket),) = task.storage_mounts.items()
    assert (path, bucket.name, bucket.mode.value) == ("/out", "my-runs", "MOUNT_CACHED")


@pytest.mark.parametrize("resource", [TRAINJOB, RUNTIME], ids=lambda resource: resource["kind"])
def test_kubeflow_knows_each_field_of_its_file(resource):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    parsed = getattr(models, f"TrainerV1alpha1{resource['kind']}").from_dict(resource)
    assert parsed.to_dict() == resource


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ray_train_starts_lost_workers_again(data, tmp_path):
    """Two workers, of which one is killed. Reference: torchrun."""
    pytest.importorskip("ray.train")
    words, log, threads = flags(data_path=data, epochs=8, save_interval=2), tmp_path / "log", {"OMP_NUM_THREADS": "1"}
    values = {"data_path": str(data), "epochs": 8, "save_interval": 2, **SMALL, "out_dir": str(tmp_path)}
    recipe = RAY.replace("num_workers=8, use_gpu=True", "num_workers=2")
    recipe = re.sub(r"(FLAGS = os.getcwd\(\), )\{.*\}", lambda found: f"{found[1]}{values}", recipe)
    (tmp_path / "ray_train.py").write_text(recipe)
    # Else they wait for any other process of the machine.
    environment = {**os.environ, **threads, "RAY_worker_niceness": "0", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
    command = [sys.executable, str(tmp_path / "ray_train.py")]
    ray = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)
    try:
        wait_until(Checkpoints(f"{tmp_path}/pretrain_16_resume").paths, 400, log.read_text)
        os.kill(int(re.search(r"pid=(\d+)\) world_rank=1", log.read_text())[1]), signal.SIGKILL)
        assert ray.wait(400) == 0, log.read_text()
    finally:
        # The cluster ends with it.
        ray.terminate()
    assert "resumed from" in log.read_text()
    assert_ends_undisturbed(words, tmp_path, TORCHRUN, **threads)
