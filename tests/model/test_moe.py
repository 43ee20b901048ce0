"""The mixture of experts against its plain loop and against the formulas of the two public generations."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model import moe
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM


def layer(**fields):
    torch.manual_seed(0)
    net = moe.MoEFeedForward(MiniMindConfig(hidden_size=32, num_attention_heads=4, use_moe=True, **fields))
    for parameter in net.parameters():
        parameter.data.normal_(0, 0.2)
    return net


def run(net, x, grouped, monkeypatch):
    if not grouped:
        monkeypatch.setattr(moe, "can_group", lambda experts, tokens: False)
    x = x.clone().requires_grad_()
    out, aux_loss = net(x, torch.zeros(x.shape[0] * x.shape[1], dtype=torch.long), 1)
    (out.sin().sum() + aux_loss).backward()
    grads = {name: p.grad for name, p in net.named_parameters()} | {"x": x.grad}
    net.zero_grad(set_to_none=True)
    monkeypatch.undo()
    return out, grads


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n_shared_experts": 2, "num_experts": 5, "num_experts_per_tok": 3},
        {"generation": "minimind3"},
        {"norm_topk_prob": False},
    ],
)
def test_grouped_products_equal_the_loop(fields, monkeypatch):
    """Values and gradients, fp32 at 1e-5."""
    net, x = layer(**fields), torch.randn(3, 11, 32)
    assert moe.can_group(net.experts, x)
    grouped, looped = run(net, x, True, monkeypatch), run(net, x, False, monkeypatch)
    torch.testing.assert_close(grouped, looped, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grouped", [True, False])
def test_experts_without_tokens_get_a_zero_gradient(grouped, monkeypatch):
    net, x = layer(num_experts=6, num_experts_per_tok=1), torch.randn(1, 3, 32)  # 3 tokens reach at most 3 experts
    chosen = set(net.route(x[0])[2].flatten().tolist())
    out, grads = run(net, x, grouped, monkeypatch)
    assert out.isfinite().all()
    for e in range(6):
        for name in ("gate_proj", "up_proj", "down_proj"):
            grad = grads[f"experts.{e}.{name}.weight"]
            assert grad is not None and grad.isfinite().all() and bool(grad.abs().sum() > 0) == (e in chosen)


@pytest.mark.parametrize(
    "fields", [{}, {"generation": "minimind3"}, {"generation": "minimind3", "num_experts_per_tok": 2}]
)
def test_the_router_learns_from_the_lm_loss(fields):
    """Also the top-1 router of minimind3, whose weight is 1 in value: the gradient goes through."""
    net, x = layer(**fields, router_aux_loss_coef=0.0), torch.randn(2, 9, 32)
    out, aux_loss = net(x, torch.zeros(18, dtype=torch.long), 1)
    out.sin().sum().backward()
    assert aux_loss.item() == 0 and net.gate.weight.grad.abs().max() > 1e-4
    if net.config.generation == "minimind3":
        torch.testing.assert_close(net.route(x[0])[1].sum(-1), torch.ones(9))


def test_expert_outputs_keep_the_precision_of_the_run():
    """fp32 in, fp32 out: values that fp16 cannot hold come through; under autocast the products are bfloat16."""
    net, x = layer(), torch.randn(1, 5, 32)
    with torch.no_grad():
        for expert in (*net.experts, *net.shared_experts):
            expert.down_proj.weight.mul_(1e6)
    out, _ = net(x)
    assert out.dtype == torch.float32 and out.abs().max() > 70000
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = net(x)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, out, rtol=0.05, atol=0.02 * out.abs().max().item())


@pytest.mark.parametrize("kind", [{}, {"seq_aux": False}, {"generation": "minimind3"}])
def test_no_host_synchronisation_per_expert(kind):
    """Forward and backward run on fake tensors, which have no values: anything read on the host would raise there."""
    config = MiniMindConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, use_moe=True, **kind
    )
    with FakeTensorMode():
        model = MiniMindForCausalLM(config).train()
        ids = torch.zeros(2, 8, dtype=torch.long)
        for document_ids in (None, torch.zeros(2, 8, dtype=torch.long)):
            with torch.autocast("cpu", torch.bfloat16):
                loss, aux_loss = model.training_losses(ids, ids, document_ids)
            (loss + aux_loss).backward()
    assert model.model.layers[0].mlp.experts[0].up_proj.weight.grad.shape == (model.config.moe_intermediate_size, 32)


def naive_aux(net, x, documents):
    """The public formulas, document by document: lists of [n, H]."""
    config, losses = net.config, []
    groups = documents if config.seq_aux else [torch.cat(documents)]
    for tokens in groups:
        scores, _, chosen = net.route(tokens)
        counts = torch.bincount(chosen.flatten(), minlength=config.num_experts).float()
        if config.generation == "minimind2":  # share of the routed slots * experts
            load = counts / chosen.numel() * config.num_experts
            losses.append((load * scores.mean(0)).sum() * config.aux_loss_alpha)
        else:  # mean one-hot count
            losses.append(
                (counts / len(tokens) * scores.mean(0)).sum() * config.num_experts * config.router_aux_loss_coef
            )
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"seq_aux": False},
        {"generation": "minimind3", "num_experts_per_tok": 2},
        {"generation": "minimind3", "num_experts_per_tok": 1},
    ],
)
def test_auxiliary_losses_are_the_public_formulas_without_padding(kind):
    """Two packed rows with padding against one document at a time."""
    config = MiniMindConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, use_moe=True, **kind
    )
    torch.manual_seed(0)
    model = MiniMindForCausalLM(config)
    net, x = model.model.layers[0].mlp, torch.randn(2, 10, 32)
    document_ids = torch.tensor([[0] * 3 + [1] * 5 + [-1] * 2, [0] * 6 + [-1] * 4])
    documents = [x[0, :3], x[0, 3:8], x[1, :6]]
    _, aux_loss = net(x, *model.segments(2, 10, document_ids, x.device))
    torch.testing.assert_close(aux_loss, naive_aux(net, x, documents), atol=1e-6, rtol=1e-5)
    _, aux_loss = net(x, *model.segments(2, 10, None, x.device))
    torch.testing.assert_close(aux_loss, naive_aux(net, x, list(x)), atol=1e-6, rtol=1e-5)


def test_forward_in_train_mode_counts_no_left_padding_in_the_auxiliary_loss():
    config = MiniMindConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, use_moe=True)
    model = MiniMindForCausalLM(config).train()
    ids = torch.randint(3, 64, (1, 7))
    padded, mask = torch.cat((torch.zeros(1, 4, dtype=torch.long), ids), 1), torch.tensor([[0] * 4 + [1] * 7])
    out = model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    torch.testing.assert_close(out.aux_loss, model(ids).aux_loss, atol=1e-6, rtol=1e-5)
    assert model.eval()(ids).aux_loss.item() == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_the_router_is_fp32_in_both_directions_under_autocast(compiled, monkeypatch):
    """Values and gradients against the router without autocast; bf16 products would be off in the third digit."""
    net, x, slope = layer(), torch.randn(64, 32), torch.randn(64, 4)

    def gradients(route, **autocast):
        tokens = x.clone().requires_grad_()
        net.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, **autocast):
            scores = route(tokens)[0]
        (scores * slope).sum().backward()
        return scores, tokens.grad, net.gate.weight.grad

    torch._dynamo.reset()
    route = torch.compile(net.route, backend="aot_eager", fullgraph=True) if compiled else net.route
    found, reference = gradients(route), gradients(net.route, enabled=False)
    torch.testing.assert_close(found, reference, atol=1e-6, rtol=1e-5)
    assert all(tensor.dtype == torch.float32 for tensor in found)
