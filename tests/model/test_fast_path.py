"""Every fast path against the plain code: block attention against SDPA, the compiled micro-batch against the eager one."""

import functools

import pytest
import torch
import torch.nn.functional as F

from model.backend import CompiledBackend, CompiledFlexBackend, compiled_backend
from model.config import ModelConfig
from model.fast import flex_attention
from model.fast.block_attention import block_attention
from model.masks import additive_mask, dense_mask, first_keys
from model.model_minimind import Block, rope_tables
from tests.helpers import a_document_a_row
from tests.model.test_training_losses import batches, gradients, tiny
from tests.trainer.machine.simulated_cuda import simulated_cuda
from trainer.machine import compiling

GPU = torch.device("cuda", 0)
WITH_A_MASK = "attention: PyTorch's own with a mask, which is slower"
# Triton's
OutOfResources = type("OutOfResources", (Exception,), {})
NOT_HERE = "OutOfResources: out of resource: shared memory, Required: 131072"


@pytest.mark.parametrize("T, heads, groups", [(32, 4, 2), (37, 3, 3), (3, 4, 1)])
def test_block_attention_is_sdpa(T, heads, groups):
    """Values and gradients against F.scaled_dot_product_attention with a bool mask, fp32 at 1e-5; ragged blocks too."""
    torch.manual_seed(0)
    document_ids = (torch.rand(2, T) < 0.2).long().cumsum(1)
    document_ids[1, -T // 4 :] = -1
    first = first_keys(ModelConfig(), torch.arange(T), document_ids)
    q, k, v = (torch.randn(2, n, T, 8, requires_grad=True) for n in (heads, groups, groups))
    weights = torch.randn(2, heads, T, 8)
    ours = block_attention(q, k, v, additive_mask(first, torch.float32))
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(first), enable_gqa=True)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    both = [torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (ours, theirs)]
    torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "works, dropout, line",
    [
        (True, 0.0, "attention: FlexAttention, which skips the blocks of other documents"),
        (False, 0.0, f"{WITH_A_MASK}; FlexAttention does not work here ({NOT_HERE})"),
        (True, 0.1, f"{WITH_A_MASK}: the faster ones have no dropout"),
    ],
)
def test_attention_on_a_gpu_is_what_works_and_a_line_says_so(works, dropout, line, monkeypatch):
    """It is tried with the model's heads, the run's precision and its number of positions."""
    calls = []

    def attend(q, k, v, mask):
        calls.append((q.dtype, tuple(q.shape)))
        if not works:
            raise OutOfResources("out of resource: shared memory, Required: 131072\nReducing block sizes may help")
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    monkeypatch.setattr(flex_attention, "flex_attend", attend)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    config = tiny(hidden_size=192, num_attention_heads=2, num_key_value_heads=1, dropout=dropout).config
    with simulated_cuda():
        backend = compiled_backend(config, GPU, (4, 511), torch.float16)
    assert calls == ([] if dropout else [(torch.float16, (1, 2, 511, 96))])
    assert type(backend) is (CompiledFlexBackend if works and not dropout else CompiledBackend)
    assert backend.notice == line


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_flex_backend_gives_the_plain_losses(monkeypatch):
    """Losses at 1e-5, without gradients: FlexAttention has none on a CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    model, batch = tiny(), batches()[0]
    backend = CompiledFlexBackend((2, 24), on_gpu=True)
    with torch.no_grad():
        plain = model.training_losses(*batch)
        monkeypatch.setattr(model, "_backend", lambda x: backend)
        torch.testing.assert_close(model.training_losses(*batch), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_takes_tf32_only_where_fp32_was_asked_for(dtype):
    """In half precision the router's products alone are in fp32, and they stay exact."""
    with simulated_cuda():
        torch.set_float32_matmul_precision("medium")
        compiling.compile_blocks(tiny("minimind2_moe").compile_training, "0", GPU, (2, 24), dtype=dtype)
        assert torch.get_float32_matmul_precision() == ("high" if dtype is torch.float32 else "highest")


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize(
    "kind, on_gpu, recomputes",
    [
        ("minimind2", False, False),
        pytest.param("minimind3_moe", True, False, marks=pytest.mark.slow),
        pytest.param("minimind3_moe", False, True, marks=pytest.mark.slow),
    ],
)
def test_the_fast_path_gives_the_plain_losses_and_gradients(kind, on_gpu, recomputes, monkeypatch):
    """fp32 at 1e-5, packed rows with padding. On a GPU the position tables and the last norm are compiled too."""
    # Without code generation: the graphs are traced and run by eager kernels.
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    batch = batches()[0]
    model = tiny(kind, router_aux_loss_coef=0.1)
    keys = list(model.state_dict())
    plain = model.training_losses(*batch)
    sum(plain).backward()
    plain_gradients = gradients(model)
    if recomputes:
        model.gradient_checkpointing_enable()
    model.compile_training(tuple(batch[0].shape))
    backend = model.compiled_backend
    assert not backend.on_gpu
    backend.on_gpu = on_gpu
    fast = model.training_losses(*batch)
    sum(fast).backward()
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(gradients(model), plain_gradients, atol=1e-5, rtol=1e-5)
    assert list(model.state_dict()) == keys
    assert list(backend._compiled) == ([rope_tables, Block.compute, model.model.norm] if on_gpu else [Block.compute])


def test_what_stays_eager(monkeypatch):
    """Another shape, no gradients, eval mode and generate call nothing compiled, so that nothing compiles anew."""
    model, calls = tiny(), []
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: lambda *args, **kw: calls.append(f) or f(*args, **kw))
    model.compile_training((2, 12))
    ids = torch.randint(3, 61, (2, 12))
    model.training_losses(ids, ids, *a_document_a_row(ids))
    assert len(calls) == 3  # two blocks and one chunk of logits
    model.training_losses(ids[:1], ids[:1], *a_document_a_row(ids[:1]))
    model.training_losses(ids[:, :8], ids[:, :8], *a_document_a_row(ids[:, :8]))
    with torch.no_grad():
        model.training_losses(ids, ids, *a_document_a_row(ids))
    model(ids, labels=ids)
    model.eval()
    model.training_losses(ids, ids, *a_document_a_row(ids))
    model.generate(ids, max_new_tokens=3, do_sample=False)
    assert len(calls) == 3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_expert_slots_are_what_the_router_chose_without_padding(checkpointing):
    """Against a bincount of the router's choice, of the last micro-batch alone; the backward pass counts nothing anew."""
    model = tiny("minimind2_moe")
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    ids, targets, document_ids, position_ids = batches()[0]
    model.training_losses(ids, targets, document_ids, position_ids)[0].backward()
    seen = []
    for layer in model.model.layers:
        route = layer.mlp.route
        layer.mlp.route = lambda tokens, route=route: seen.append(route(tokens)) or seen[-1]
    loss, _ = model.training_losses(ids, targets, document_ids, position_ids)
    kept = document_ids.flatten() >= 0
    counts = torch.stack([torch.bincount(chosen[kept].flatten(), minlength=4) for _, _, chosen in seen])
    torch.testing.assert_close(model.expert_slots(), counts.float())
    assert not any("slots" in key for key in model.state_dict())


def test_use_compile_auto_asks_for_a_long_run_and_a_compiler(monkeypatch):
    monkeypatch.setattr(compiling, "failure_to_compile", lambda device_type: None)
    model, cpu, notices = tiny(), torch.device("cpu"), []

    def compiled(choice, flops, width=compiling.WIDE_ON_CPU):
        model.compiled_backend = None
        options = (cpu, (2, 24), flops, torch.float32, width)
        notices.extend(compiling.compile_blocks(model.compile_training, choice, *options))
        return model.compiled_backend is not None

    enough = compiling.COMPILE_SECONDS * compiling.PRODUCT_RATE["cpu"] * torch.get_num_threads()
    assert compiled("auto", enough) and not compiled("auto", 0.9 * enough)
    assert compiled("1", 0) and not compiled("0", enough) and not notices
    # Narrow networks are slower by the operation, so that fewer of them take as long; wide ones are not quicker.
    half = compiling.WIDE_ON_CPU // 2
    assert compiled("auto", enough / 2, half) and not compiled("auto", 0.4 * enough, half)
    assert not compiled("auto", 0.9 * enough, 10 * half)
    monkeypatch.setattr(compiling, "failure_to_compile", lambda device_type: "no C++ compiler")
    assert not compiled("auto", enough) and not compiled("1", 0) and len(notices) == 2


def train(compiled, updates, dtype=torch.bfloat16, kind="minimind2"):
    """Losses of some updates on one repeated set of packed batches, and the weights afterwards."""
    model = tiny(kind, hidden_size=64)
    if compiled:
        torch._dynamo.reset()
        model.compile_training((2, 24))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    torch.manual_seed(3)
    rows = torch.randint(3, 61, (updates, 2, 25))
    rows[:, :, 1::2] = rows[:, :, 0:-1:2]  # something to learn: every other token repeats the one before
    _, _, document_ids, position_ids = batches()[0]
    for row in rows:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss, aux_loss = model.training_losses(row[:, :-1], row[:, 1:], document_ids, position_ids)
        (loss / 48 + aux_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / 48)
    return torch.tensor(losses), model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["minimind2", "minimind3_moe"])
def test_50_bf16_updates_follow_the_plain_ones_and_repeat_to_the_bit(kind):
    """Losses within 0.5 % of the eager run; a second compiled run has the same bits."""
    plain, _ = train(False, 50, kind=kind)
    fast, weights = train(True, 50, kind=kind)
    again, weights_again = train(True, 50, kind=kind)
    assert plain[-1] < plain[0] - 0.2
    torch.testing.assert_close(fast, plain, rtol=0.005, atol=0)
    assert torch.equal(fast, again)
    assert all(torch.equal(weights[key], weights_again[key]) for key in weights)
