"""A start on a machine with one GPU, by all trainers, from the flags to the updates. No card is needed: see
simulated_cuda.py. Reference: the same run on the CPU."""

import json

import pytest
import torch

from common.errors import UserError
from tests.dataset.electra.test_electra_dataset import write_lines
from tests.helpers import losses, train, write_corpus
from tests.trainer.glue.glue_helpers import fine_tune, make_place
from tests.trainer.machine.simulated_cuda import REAL_SET_DEVICE, set_device, simulated_cuda
from tests.trainer.test_train_electra import train as train_electra
from tests.trainer.test_train_electra import write_vocab
from trainer.machine import ranks as ranks_module


def test_the_simulated_set_device_refuses_what_the_real_one_refuses():
    for refuse in (REAL_SET_DEVICE, lambda device: set_device(device, [])):
        with pytest.raises(ValueError, match="Expected a torch.device with a specified index"):
            refuse(torch.device("cuda"))


@pytest.mark.parametrize("device", [None, "cuda", "cuda:0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_pretraining_starts_and_ends_there(tmp_path, device, dtype):
    data = write_corpus(tmp_path / "corpus.jsonl", 12)
    with simulated_cuda() as cuda:
        run = train(data_path=data, out_dir=tmp_path / "gpu", device=device, dtype=dtype)
    assert run.engine.device == torch.device("cuda", 0)
    assert cuda.chosen[0] == 0 and cuda.mode.asked > 0
    assert run.progress.update > 0
    start = json.loads(next((tmp_path / "gpu").glob("*.metrics.jsonl")).read_text().splitlines()[0])
    assert start["machine"]["gpu"] == "Simulated GPU"
    if dtype == "float32":
        on_cpu = train(data_path=data, out_dir=tmp_path / "cpu", device="cpu", dtype=dtype)
        assert losses(run) == losses(on_cpu)


def test_a_run_goes_on_there(tmp_path):
    data = write_corpus(tmp_path / "corpus.jsonl", 12)
    with simulated_cuda():
        train(data_path=data, out_dir=tmp_path, device=None, dtype="float32")
        run = train(data_path=data, out_dir=tmp_path, device=None, dtype="float32", from_resume=1, epochs=2)
    assert run.progress.epoch == 2


@pytest.mark.parametrize("device", [None, "cuda"])
def test_electra_starts_and_ends_there(tmp_path, device):
    data, vocabulary = write_lines(tmp_path / "data.jsonl")[0], write_vocab(tmp_path / "vocab.txt")
    with simulated_cuda() as cuda:
        run = train_electra(data_path=data, vocab_path=vocabulary, out_dir=tmp_path / "out", device=device, max_steps=2)
    assert run.engine.device == torch.device("cuda", 0) and cuda.chosen[0] == 0
    assert run.progress.update == 2


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_fine_tuning_starts_and_ends_there(tmp_path, device):
    place = make_place(tmp_path / "glue")
    with simulated_cuda() as cuda:
        fine_tune(place, tmp_path / "gpu", device=device, epochs=1)
    assert cuda.chosen[0] == 0 and cuda.mode.asked > 0


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_rank_of_torchrun_takes_its_own_gpu(monkeypatch, local_rank):
    """Two ranks on two GPUs: NCCL where this PyTorch has it, otherwise Gloo, as on Windows."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2, **place}.items():
        monkeypatch.setenv(name, str(value))
    asked = {}
    monkeypatch.setattr(ranks_module, "rendezvous_store", lambda timeout: None)
    monkeypatch.setattr(ranks_module, "end_with_launcher", lambda: None)
    for nccl, backend in ((True, "nccl"), (False, "gloo")):
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda nccl=nccl: nccl)
        monkeypatch.setattr(
            torch.distributed, "init_process_group", lambda name, **options: asked.update(options, backend=name)
        )
        with simulated_cuda(gpus=2) as cuda:
            ranks, device = ranks_module.init_distributed_mode()
        assert device == torch.device("cuda", local_rank) and cuda.chosen == [local_rank]
        assert asked["backend"] == backend
        assert asked["device_id"] == (device if nccl else None)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, **place}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ranks_module, "end_with_launcher", lambda: None)
    with simulated_cuda(gpus=1), pytest.raises(UserError, match="more processes than this machine has GPUs"):
        ranks_module.init_distributed_mode()
