"""A start of the trainer on a machine with one GPU, and on a Mac, as simulated_cuda.py plays them. Reference: the run on the CPU."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from model import backend as backends
from model import model_minimind, moe
from model.fast import experts as ways
from model.fast import flex_attention
from tests.faults.harness import rank_environments
from tests.helpers import assert_same_weights, flags, losses, records, train, trainers_that_fit, write_corpus
from tests.trainer.machine.simulated_cuda import simulated_cuda, simulated_mps
from trainer import engine, snapshot, train_pretrain
from trainer.budget import planner
from trainer.machine import compiling, measure
from trainer.machine import ranks as ranks_module

COMPILED_RUN = {"dtype": "float32", "use_compile": 1, "batch_size": 5, "lr_schedule": "constant", "num_workers": 0}


def test_pretraining_starts_and_ends_there(tmp_path):
    data = write_corpus(tmp_path / "corpus.jsonl", 12)
    with simulated_cuda() as cuda:
        run = train(data_path=data, out_dir=tmp_path / "gpu", device=None)
    assert run.engine.device == torch.device("cuda", 0)
    assert cuda.chosen[0] == 0 and cuda.mode.asked > 0
    assert run.progress.update > 0
    start = records(next((tmp_path / "gpu").glob("*.metrics.jsonl")), None)[0]
    assert start["machine"]["gpu"] == "Simulated GPU"
    assert losses(run) == losses(train(data_path=data, out_dir=tmp_path / "cpu"))


def test_a_card_without_bfloat16_trains_in_float16(data, tmp_path, capsys):
    """As a T4."""
    with simulated_cuda(capability=(7, 5)):
        run = train(data_path=data, out_dir=tmp_path, device=None, dtype="bfloat16", max_updates=2)
    assert run.engine.dtype is torch.float16 and run.engine.scaler.is_enabled()
    assert run.progress.update == 2
    line = "this GPU has no native bfloat16: training in float16 with a gradient scaler instead"
    assert line in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_within_a_budget_reaches_its_first_update_there(tmp_path, monkeypatch, capsys):
    """By the rate of products and of updates that are measured there."""
    devices = []

    def rate_of_small_products(device, dtype, sizes=None):
        """Those for a GPU take a CPU a minute."""
        devices.append(device)
        return measure.product_rate(device, dtype, sizes=[64])

    update = engine.Engine.update

    def first_update(running, *arguments):
        update(running, *arguments)
        # Not one of those that are measured before.
        if trainers:
            raise ArithmeticError("the first update")

    monkeypatch.setattr(planner, "product_rate", rate_of_small_products)
    monkeypatch.setattr(engine.Engine, "update", first_update)
    data = write_corpus(tmp_path / "corpus.jsonl", 300)
    free = {"batch_size": None, "accumulation_steps": None, "device": None, "max_seq_len": 64}
    with simulated_cuda() as cuda, trainers_that_fit() as trainers, pytest.raises(ArithmeticError):
        train_pretrain.main(flags(**free, data_path=data, out_dir=tmp_path / "gpu", budget="10m"))
    assert devices == [torch.device("cuda", 0)] and cuda.chosen[0] == 0
    (run,) = trainers
    assert run.engine.device == torch.device("cuda", 0)
    assert "expected validation loss" in capsys.readouterr().out


@pytest.fixture
def compiled(monkeypatch):
    """Compiled runs on a simulated GPU take the code of a GPU: the compiler gives functions back as they are, FlexAttention, without
    gradients on a CPU, is SDPA with its mask. Gives each micro-batch's backend and shape, how many tensors were pinned, `by_rule`."""
    seen = SimpleNamespace(backends=[], shapes=[], pinned=0, by_rule=False)

    def attend(q, k, v, mask):
        B, _, T, _ = q.shape
        rows = torch.arange(B).view(B, 1, 1, 1)
        positions = torch.arange(T)
        visible = mask.mask_mod(rows, None, positions.unsqueeze(1), positions)  # [B, 1, T, T]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)

    def for_a_gpu(config, device, shape, dtype):
        return backends.compiled_backend(config, torch.device("cuda", 0), shape, dtype)

    backend_of = model_minimind.MiniMindLM._backend

    def noted(model, x):
        backend = backend_of(model, x)
        seen.backends.append(type(backend).__name__)
        seen.shapes.append(tuple(x.shape[:2]))
        return backend

    pinned_like = snapshot.pinned_like

    def counted(tensor):
        copy = pinned_like(tensor)
        seen.pinned += copy.is_pinned_here
        return copy

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(compiling, "failure_to_compile", lambda device_type: None)
    monkeypatch.setattr(compiling, "choose_kernels_by_rule", lambda: setattr(seen, "by_rule", True))
    monkeypatch.setattr(flex_attention, "flex_attend", attend)
    monkeypatch.setattr(backends, "flex_attend", attend)
    monkeypatch.setattr(model_minimind, "compiled_backend", for_a_gpu)
    monkeypatch.setattr(model_minimind.MiniMindLM, "_backend", noted)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: torch.cuda.is_available()))
    monkeypatch.setattr(snapshot, "pinned_like", counted)
    return seen


# Dense, and experts in the loop, as on a GPU without grouped products
@pytest.mark.parametrize("use_moe, optimizer", [(0, "adamw"), pytest.param(1, "muon", marks=pytest.mark.slow)])
def test_a_compiled_run_compiles_every_micro_batch(compiled, use_moe, optimizer, tmp_path, monkeypatch, capsys):
    """The last one of an epoch too. References: the plain run on the CPU, to rounding; the run that was not stopped, bit for bit."""
    data = write_corpus(tmp_path / "corpus.jsonl", 20)
    flags = {"data_path": data, "use_moe": use_moe, "optimizer": optimizer, **COMPILED_RUN}
    plain = train(**{**flags, "out_dir": tmp_path / "cpu", "device": "cpu", "use_compile": 0, "epochs": 2})
    rows = plain.job.plan(0).n_rows
    assert rows % 5 and set(compiled.backends) == {"Backend"} and (rows % 5, 24) in compiled.shapes
    assert not compiled.pinned
    on_cpu = len(compiled.backends)

    monkeypatch.setattr(moe, "choose_mix", lambda experts, tokens: ways.looped_experts)
    capsys.readouterr()
    with simulated_cuda():
        whole = train(**flags, out_dir=tmp_path / "whole", device=None, epochs=2)
        assert "attention: FlexAttention, which skips the blocks of other documents" in capsys.readouterr().out
        train(**flags, out_dir=tmp_path / "parts", device=None, epochs=1)
        resumed = train(**flags, out_dir=tmp_path / "parts", device=None, epochs=2, from_resume=1)
    assert compiled.by_rule
    assert set(compiled.backends[on_cpu:]) == {"CompiledFlexBackend"} and set(compiled.shapes[on_cpu:]) == {(5, 24)}
    assert compiled.pinned > 0
    # Muon makes much of little, since it scales each gradient up.
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-3)
    assert [record["tokens"] for record in records(whole)] == [record["tokens"] for record in records(plain)]
    assert_same_weights(resumed, whole)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_rank_of_torchrun_takes_its_own_gpu(monkeypatch, local_rank):
    """Two ranks on two GPUs: NCCL where this PyTorch has it, otherwise Gloo, as on Windows."""
    for name, value in rank_environments(2)[local_rank].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks_module, "rendezvous_store", lambda *_: None)
    for nccl, backend in ((True, "nccl"), (False, "gloo")):
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda nccl=nccl: nccl)
        init = mock.Mock()
        monkeypatch.setattr(torch.distributed, "init_process_group", init)
        with simulated_cuda(gpus=2) as cuda:
            ranks, device = ranks_module.init_distributed_mode()
        assert device == torch.device("cuda", local_rank) and cuda.chosen == [local_rank]
        assert init.call_args.args == (backend,)
        assert init.call_args.kwargs["device_id"] == (device if nccl else None)


def test_pretraining_starts_ends_and_goes_on_on_a_mac(data, tmp_path):
    options = {"data_path": data, "dtype": "float32", "val_fraction": 0.2, "use_moe": 1}
    with simulated_mps() as mode:
        run = train(**options, out_dir=tmp_path / "mac", device=None)
        losses_there = losses(run)
        again = train(**options, out_dir=tmp_path / "mac", device=None, epochs=2, from_resume=1)
    assert run.engine.device.type == "mps" and mode.asked > 0
    assert again.progress.epoch == 2
    # Sums for the log are in float32 there.
    on_cpu = train(**options, out_dir=tmp_path / "cpu", device="cpu")
    assert losses_there == pytest.approx(losses(on_cpu), rel=1e-5)
