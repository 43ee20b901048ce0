"""The mixture of experts against its plain loop and against the formulas of the two public generations."""

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from model import moe
from model.fast import experts as ways
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

MORE = {"n_shared_experts": 2, "num_experts": 5, "num_experts_per_tok": 3}
WAYS = {"looped": ways.looped_experts, "grouped": ways.grouped_experts}


def layer(**fields):
    torch.manual_seed(0)
    net = moe.MoEFeedForward(MiniMindConfig(hidden_size=32, num_attention_heads=4, use_moe=True, **fields))
    for parameter in net.parameters():
        parameter.data.normal_(0, 0.2)
    return net


def run(net, x, way):
    """(output, gradients) of the layer with its experts computed in one of WAYS."""
    x = x.clone().requires_grad_()
    with mock.patch.object(moe, "choose_mix", lambda experts, tokens: WAYS[way]):
        out, aux_loss = net(x, torch.zeros(x.shape[0] * x.shape[1], dtype=torch.long), 1)
    (out.sin().sum() + aux_loss).backward()
    grads = {name: p.grad for name, p in net.named_parameters()} | {"x": x.grad}
    net.zero_grad(set_to_none=True)
    return out, grads


@pytest.mark.parametrize("fields", [{}, MORE, {"generation": "minimind3"}, {"norm_topk_prob": False}])
def test_grouped_products_equal_the_loop(fields):
    """Values and gradients, fp32 at 5e-5."""
    net, x = layer(**fields), torch.randn(3, 11, 32)
    torch.testing.assert_close(run(net, x, "grouped"), run(net, x, "looped"), atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"use_moe": True}])
def test_an_adapter_counts_in_all_products(fields):
    """As MiniMind's LoRA, which replaces `forward`. References: merged weights; few tokens, which take the loop."""
    adapted = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_attention_heads=4, vocab_size=64, **fields)).eval()
    merged, ids = copy.deepcopy(adapted), torch.randint(64, (2, 12))
    compiled = torch.compile(adapted, backend="eager")
    compiled(ids)
    for linear, other in zip(adapted.model.layers[-1].modules(), merged.model.layers[-1].modules(), strict=True):
        if isinstance(linear, torch.nn.Linear):
            other.weight.data.mul_(1.5)
            linear.forward = lambda x, linear=linear: 1.5 * F.linear(x, linear.weight)
    with torch.no_grad():
        for model in (adapted, compiled):
            torch.testing.assert_close(model(ids).logits, merged(ids).logits, atol=2e-5, rtol=2e-5)


def test_grouped_products_in_half_precision():
    """Under autocast; reference: the loop in fp32. The products round at the 9th bit."""
    net, x = layer(num_experts_per_tok=1), torch.randn(2, 40, 32)
    out, grads = run(net, x, "looped")
    with torch.autocast("cpu", torch.bfloat16):
        ours, our_grads = run(net, x, "grouped")
    for found, reference in [(ours, out), *((our_grads[name], grads[name]) for name in grads)]:
        assert found.dtype == torch.float32
        assert (found - reference).norm() < 0.03 * reference.norm()


@pytest.mark.slow
def test_no_compiled_kernel_looks_up_the_gradients_of_tokens():
    """One that also sums over a row is wrong on a GPU: see `_token_gradients`."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(layer(), backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    with torch.autocast("cpu", torch.bfloat16):
        run(compiled, torch.randn(3, 11, 32), "grouped")
    assert "minimind.token_gradients" in graphs[-1], "the backward pass"


@pytest.mark.parametrize("way", WAYS)
def test_experts_without_tokens_get_a_zero_gradient(way, monkeypatch):
    """Also where new memory is NaN, as with deterministic algorithms: a grouped product leaves rows behind its last offset."""
    net, x = layer(num_experts=6, num_experts_per_tok=1), torch.randn(1, 3, 32)  # 3 tokens reach at most 3 experts
    chosen = set(net.route(x[0])[2].flatten().tolist())
    out, grads = run(net, x, way)
    # The trainers turn it off.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        torch.testing.assert_close(run(net, x, way), (out, grads), atol=0, rtol=0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.isfinite().all()
    for e in range(6):
        for name in ("gate_proj", "up_proj", "down_proj"):
            grad = grads[f"experts.{e}.{name}.weight"]
            assert grad is not None and grad.isfinite().all() and bool(grad.abs().sum() > 0) == (e in chosen)


# T4, H100, B300, RTX 5090
@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (10, 3), (12, 0)])
def test_the_way_follows_from_the_gpu_and_the_precision(capability):
    net = layer()
    has_kernel = capability[0] in (9, 10)
    with FakeTensorMode(), mock.patch.object(torch.cuda, "get_device_capability", lambda index: capability):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            tokens = torch.empty(20, 32, device="cuda", dtype=dtype)
            grouped = has_kernel and dtype is torch.bfloat16
            assert moe.choose_mix(net.experts, tokens) is (ways.grouped_experts if grouped else ways.looped_experts)
        with torch.no_grad():
            few = torch.empty(ways.FEW_TOKENS, 32, device="cuda")
            assert moe.choose_mix(net.experts, few) is ways.looped_experts
        with mock.patch.object(torch.version, "hip", "7.0"):
            assert not ways.has_grouped_kernel(0)


# grouped_mm needs rows of whole 16 bytes.
@pytest.mark.parametrize("dtype, size", [(torch.float32, 4), (torch.bfloat16, 8), (torch.float16, 0)])
def test_the_way_on_a_cpu(dtype, size):
    for width in (16, 20, 22):
        way = "grouped" if size and width % size == 0 else "looped"
        assert moe.choose_mix(layer(moe_intermediate_size=width).experts, torch.randn(20, 32, dtype=dtype)) is WAYS[way]


@pytest.mark.parametrize("generation, K", [("minimind2", 2), ("minimind3", 1), ("minimind3", 2)])
def test_the_router_learns_from_the_lm_loss(generation, K):
    """Also the top-1 router of minimind3, whose weight is 1 in value: the gradient goes through."""
    net = layer(generation=generation, num_experts_per_tok=K, router_aux_loss_coef=0.0)
    x = torch.randn(2, 9, 32)
    out, aux_loss = net(x, torch.zeros(18, dtype=torch.long), 1)
    out.sin().sum().backward()
    assert aux_loss.item() == 0 and net.gate.weight.grad.abs().max() > 1e-4
    if generation == "minimind3":
        torch.testing.assert_close(net.route(x[0])[1].sum(-1), torch.ones(9))


def test_the_auxiliary_loss_of_a_gpu_is_that_of_a_cpu():
    """A GPU multiplies score by score, since it would add up a segment's scores in random order; value and gradient."""
    torch.manual_seed(0)
    N, E, n_segments = 60, 4, 7
    scores = torch.randn(N, E).softmax(dim=-1).requires_grad_()
    chosen = scores.topk(2).indices
    segments = torch.randint(-1, 5, (N,))  # with padding, and two segments without tokens
    found = []
    for way in (moe._by_segments, moe._by_tokens):
        with mock.patch.object(moe, "_by_segments", way):
            loss = moe.balance_loss(scores, chosen, segments, n_segments)
        found.append((loss, *torch.autograd.grad(loss, scores)))
    torch.testing.assert_close(*found, atol=1e-7, rtol=1e-6)
    assert not found[1][1][segments < 0].any()


def test_the_router_is_fp32_in_both_directions_under_autocast():
    """Values and gradients against the router without autocast; bf16 products would be off in the third digit."""
    net, x, slope = layer(), torch.randn(64, 32), torch.randn(64, 4)

    def gradients(route, **autocast):
        tokens = x.clone().requires_grad_()
        net.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, **autocast):
            scores = route(tokens)[0]
        (scores * slope).sum().backward()
        return scores, tokens.grad, net.gate.weight.grad

    found, reference = gradients(net.route), gradients(net.route, enabled=False)
    torch.testing.assert_close(found, reference, atol=1e-6, rtol=1e-5)
    assert all(tensor.dtype == torch.float32 for tensor in found)
