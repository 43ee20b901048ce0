"""The base of our optimisers."""

import inspect

import torch


class BareOptimizer(torch.optim.Optimizer):
    """torch.optim.Optimizer without the wrappers that keep torch.compile out of its methods: nothing compiles these, and the
    first call of each imports torch._dynamo, which takes as long as torch itself."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
