"""What a checkpoint must hold before anything of it is taken over.

A digest shows that a file is the one that was written. It does not show that the right thing was written: a fault of a
disk or of memory before the digest was made, or a file that somebody else has made, passes it. So a resume looks at all
that it is going to use, and changes nothing of the run until all of it is good. What is wrong is told in a few words.
"""

import math
import random
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.errors import BadContentError
from dataset.mixed_plan import Move
from trainer.optim.build import KEPT

if TYPE_CHECKING:
    from trainer.loop import Trainer

LARGEST_COUNT = 2**53
# Of settings and the like, which are compared and printed: a nest of references could be walked through for ever
DEEPEST = 6
MOST_ITEMS = 100_000
# How often the clock may move the end of a run, and how many times as long it may get
MOST_MOVES = 10_000
MOST_LONGER = 1000


def require(holds: bool, what: str) -> None:
    """Errors: BadContentError with `what` is wrong, unless it holds."""
    if not holds:
        raise BadContentError(what)


# ------------------------------------------------------------------------------------- whatever the run


def check_form(state: Any) -> None:
    """Errors: BadContentError unless `state` has the fields of resume.state_dict, each of its kind."""
    require(isinstance(state, dict), f"it holds a {type(state).__name__}, not the state of a run")
    kinds: dict[str, type] = {
        "model": dict,
        "engine": dict,
        "progress": dict,
        "ranks": list,
        "identity": dict,
        "settings": dict,
        "tracker_ids": dict,
    }
    for name, kind in kinds.items():
        require(name in state, f"{name} is missing")
        require(isinstance(state[name], kind), f"{name} is a {type(state[name]).__name__}, not a {kind.__name__}")
    for name in ("identity", "settings", "tracker_ids"):
        _check_plain(state[name], name)
    # The resume computes with them.
    for name in ("batch_size", "accumulation_steps"):
        value = state["settings"].get(name)
        require(_is_count(value) and value > 0, f"settings: {name} is {_short(value)}")
    # Not there in a checkpoint of an earlier version.
    rows = state["settings"].get("rows_per_update", 0)
    require(_is_count(rows), f"settings: rows_per_update is {_short(rows)}")
    require(_is_number(state.get("seconds")) and state["seconds"] >= 0, f"seconds is {_short(state.get('seconds'))}")
    n_ranks = len(state["ranks"])
    require(n_ranks > 0, "ranks is empty")
    # Not there in a checkpoint of an earlier version.
    sharing = state.get("sharing", 1)
    require(_is_count(sharing) and sharing > 0 and n_ranks % sharing == 0, f"sharing is {_short(sharing)}")


def _check_plain(value: Any, name: str) -> None:
    """Text, numbers, and lists and dicts of them, in a bounded amount."""
    # A list of what is still to be looked at, instead of a function that calls itself: a nesting of a million levels
    # would end the process.
    waiting = [(value, 0)]
    seen = 0
    while waiting:
        item, depth = waiting.pop()
        seen += 1
        require(seen <= MOST_ITEMS and depth <= DEEPEST, f"{name} is nested too deep or too large")
        if isinstance(item, dict):
            require(all(isinstance(key, str) for key in item), f"{name} has a key that is no text")
            waiting.extend((below, depth + 1) for below in item.values())
        elif isinstance(item, (list, tuple)):
            waiting.extend((below, depth + 1) for below in item)
        else:
            plain = item is None or isinstance(item, (str, int, float, bool))
            require(plain, f"{name} holds a {type(item).__name__}")


# ------------------------------------------------------------------------------------------ for one run


def check_fit(state: dict[str, Any], trainer: "Trainer", update: int, of_parts: bool = False) -> None:
    """Errors: BadContentError unless the run can take all of `state` over.

    state: passed check_form, and is of this run's data, model and optimiser. update: the one that the file is named for.
    of_parts: the state is that of a folder of parts, whose sharded tensors have no numbers yet; parts.py looks at these.
    """
    # From the cheap to the dear.
    check_progress(state["progress"], trainer.progress, update)
    check_weights(state["model"], trainer.engine.model.state_dict(), of_parts)
    check_engine(state["engine"], trainer.engine, update, of_parts)
    for number, of_rank in enumerate(state["ranks"]):
        check_rank(of_rank, f"rank {number}", len(trainer.engine.sums), trainer.device.type)
    check_place(state["progress"], trainer)


def check_place(progress: dict[str, Any], trainer: "Trainer") -> None:
    """Errors: BadContentError unless the plan has the row that comes next. progress: passed check_progress."""
    row, epoch = progress["row"], progress["epoch"]
    moves = progress.get("moves", [])
    # A plan is not made for a row that every epoch has.
    if not row and not moves:
        return
    n_rows = trainer.job.plan(epoch).n_rows
    if moves:
        furthest = max(move["end"] for move in moves)
        require(furthest <= MOST_LONGER * n_rows, f"progress: the end is at row {furthest}, and {n_rows} were planned")
        n_rows = moves[-1]["end"]
        require(epoch > 0 or row >= moves[-1]["row"], f"progress: row is {row}, and the end was moved after it")
    require(row < n_rows, f"progress: row is {row}, and the epoch has {n_rows}")


def check_progress(progress: dict[str, Any], own: Any, update: int) -> None:
    """`own`: the run's Progress, for its fields."""
    known = {field.name for field in fields(own)}
    unknown = sorted(set(map(str, progress)) - known)
    require(not unknown, f"progress has an unknown field {unknown[:1]}")
    for name in ("epoch", "row", "update", "tokens"):
        require(_is_count(progress.get(name)), f"progress: {name} is {_short(progress.get(name))}")
    # Any: `require` proves what they are, which a type checker does not see.
    step: Any = progress.get("step")
    skipped: Any = progress.get("skipped", 0)
    require(_is_count(skipped), f"progress: skipped is {_short(skipped)}")
    require(
        progress["update"] == update, f"progress: update is {progress['update']}, and the file's name says {update}"
    )
    # An update has a micro-batch or more, an epoch an update or more.
    require(_is_count(step) and step >= update - 1, f"progress: step is {_short(step)} after {update} updates")
    require(progress["epoch"] <= update, f"progress: epoch is {progress['epoch']} after {update} updates")
    norm = progress.get("grad_norm")
    require(norm is None or isinstance(norm, float), f"progress: grad_norm is {_short(norm)}")
    best = progress.get("best_val_loss", math.inf)
    require(isinstance(best, float) and not math.isnan(best), f"progress: best_val_loss is {_short(best)}")
    check_moves(progress.get("moves", []))
    due = progress.get("evaluation_due", False)
    require(isinstance(due, bool), f"progress: evaluation_due is {_short(due)}")


def check_moves(moves: Any) -> None:
    """Errors: BadContentError unless `moves` are what Moves are made of, each behind the one before it."""
    require(isinstance(moves, list) and len(moves) <= MOST_MOVES, f"progress: moves is {_short(moves)}")
    before = 0
    for move in moves:
        require(
            isinstance(move, dict) and set(move) == {field.name for field in fields(Move)},
            "progress: a move has other fields",
        )
        for name in ("row", "fall_row", "end"):
            require(_is_count(move[name]), f"progress: {name} of a move is {_short(move[name])}")
        progress = move["fall_progress"]
        require(_is_number(progress) and 0 <= progress <= 1, f"progress: fall_progress of a move is {_short(progress)}")
        require(before <= move["row"] <= move["fall_row"] <= move["end"], "progress: the rows of a move do not rise")
        before = move["row"]
    require(not moves or moves[0]["row"] == 0, "progress: the first move is not that of the start")


def check_weights(weights: dict[str, Any], own: dict[str, torch.Tensor], of_parts: bool = False) -> None:
    """`own`: the state dict that they are to replace. of_parts: see check_fit."""
    missing = sorted(own.keys() - weights.keys())
    require(not missing, f"model: {len(missing)} weights are missing, {missing[:1]}")
    strange = sorted(map(str, weights.keys() - own.keys()))
    require(not strange, f"model: {len(strange)} weights are unknown, {strange[:1]}")
    for name, tensor in own.items():
        _check_tensor(weights[name], f"model: {name}", tensor.shape, tensor.dtype, of_parts)
        if tensor.is_floating_point() and not weights[name].is_meta:
            require(bool(torch.isfinite(weights[name]).all()), f"model: {name} has numbers that are NaN or infinite")


def check_engine(state: dict[str, Any], engine: Any, update: int, of_parts: bool = False) -> None:
    """`engine`: the run's own, which is to go on from the state. of_parts: see check_fit."""
    for name in ("optimizer", "scaler"):
        require(isinstance(state.get(name), dict), f"engine: {name} is a {type(state.get(name)).__name__}")
    skipped: Any = state.get("skipped")
    of_numbers = isinstance(skipped, list) and len(skipped) == 2 and all(_is_number(n) and n >= 0 for n in skipped)
    require(of_numbers, f"engine: skipped is {_short(skipped)}")
    _check_scaler(state["scaler"])
    applied = update - skipped[0]
    optimizer = engine.optimizer
    # Muon with AdamW: two optimisers behind one interface.
    together = getattr(optimizer, "optimizers", None)
    if together is None:
        _check_optimizer(state["optimizer"], optimizer, applied, of_parts)
        return
    parts: Any = state["optimizer"].get("optimizers")
    require(isinstance(parts, list) and len(parts) == len(together), "optimizer: another number of optimisers")
    require(len(state["optimizer"]) == 1, "optimizer: an entry is unknown")
    for part, own in zip(parts, together, strict=True):
        require(isinstance(part, dict), f"optimizer: a {type(part).__name__} in place of a dict")
        _check_optimizer(part, own, applied, of_parts)


def _check_scaler(scaler: dict[str, Any]) -> None:
    """The state of a gradient scaler; empty: of a run that had none."""
    if not scaler:
        return
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval"):
        value: Any = scaler.get(name)
        require(_is_number(value) and value > 0, f"engine: the scaler's {name} is {_short(value)}")
    tracker = scaler.get("_growth_tracker")
    require(_is_count(tracker), f"engine: the scaler's _growth_tracker is {_short(tracker)}")


def _check_optimizer(state: dict[str, Any], own: torch.optim.Optimizer, applied: float, of_parts: bool) -> None:
    """applied: updates that changed the weights; without one an optimiser may have nothing to keep. of_parts: see check_fit."""
    groups: Any = state.get("param_groups")
    of_parameter: Any = state.get("state")
    strange = sorted(map(str, state.keys() - {"param_groups", "state"}))
    require(not strange, f"optimizer: an entry {strange[:1]} is unknown")
    mine = own.state_dict()["param_groups"]
    require(isinstance(groups, list) and len(groups) == len(mine), "optimizer: another number of groups")
    for group, my_group in zip(groups, mine, strict=True):
        require(isinstance(group, dict), "optimizer: a group is no dict")
        params = group.get("params")
        of_numbers = isinstance(params, list) and all(map(_is_count, params))
        require(of_numbers and params == my_group["params"], "optimizer: a group has other parameters")
        # Rates and the like. The run has its own and does not take these over, but reads them.
        options = {str(name): value for name, value in group.items() if name != "params"}
        _check_plain(options, "optimizer: a group")
    require(isinstance(of_parameter, dict), "optimizer: its state is no dict")
    # Every update so far was skipped, or there was none.
    if not of_parameter and applied <= 0:
        return
    parameters = [parameter for group in own.param_groups for parameter in group["params"]]
    complete = of_parameter.keys() == set(range(len(parameters)))
    require(complete, "optimizer: it does not have a state for each parameter")
    moments, counts = KEPT[type(own)]
    for i, parameter in enumerate(parameters):
        kept = of_parameter[i]
        whole = isinstance(kept, dict) and kept.keys() == {*moments, *counts}
        require(whole, f"optimizer: parameter {i} has not the entries {', '.join((*counts, *moments))}")
        for name in counts:
            count = kept[name]
            _check_tensor(count, f"optimizer: {name} of parameter {i}", torch.Size(), torch.float32)
            good = math.isfinite(count.item()) and count.item() >= 0
            require(good, f"optimizer: {name} of parameter {i} is {count.item()}")
        for name in moments:
            what = f"optimizer: {name} of parameter {i}"
            _check_tensor(kept[name], what, parameter.shape, parameter.dtype, of_parts)
            has_nan = not kept[name].is_meta and bool(torch.isnan(kept[name]).any())
            require(not has_nan, f"{what} has numbers that are NaN")


def check_rank(state: Any, name: str, n_sums: int, device_type: str) -> None:
    """What a rank keeps for itself: its sums for the log, and its random states, tried on generators of their own."""
    require(isinstance(state, dict), f"{name} is a {type(state).__name__}")
    sums: Any = state.get("sums")
    rng: Any = state.get("rng")
    right = isinstance(sums, list) and len(sums) == n_sums and all(map(_is_number, sums))
    require(right, f"{name}: sums are not {n_sums} numbers")
    require(isinstance(rng, dict), f"{name}: rng is a {type(rng).__name__}")
    kinds: dict[str, Callable[[Any], Any]] = {
        "torch": torch.Generator().set_state,
        "python": random.Random().setstate,
        "numpy": _try_numpy,
    }
    for kind, try_it in kinds.items():
        try:
            try_it(rng[kind])
        except Exception:
            # What a library says of a state that is none is of no use to a reader.
            raise BadContentError(f"{name}: the random state of {kind} is none") from None
    for kind in ("cuda", "mps"):
        require(kind in rng, f"{name}: no random state of {kind}")
        state = rng[kind]
        if state is None:
            continue
        _check_tensor(state, f"{name}: the random state of {kind}", None, torch.uint8)
        # Of the device that this run has, the state must fit; one of another kind is kept for nothing.
        if kind == device_type:
            backend = torch.cuda if kind == "cuda" else torch.mps
            wanted = backend.get_rng_state().shape
            _check_tensor(state, f"{name}: the random state of {kind}", wanted, torch.uint8)


def _try_numpy(state: Any) -> None:
    """Set the state on a generator of its own. Whatever it raises: it is no state."""
    kind, keys, position, has_gauss, gauss = state
    # NumPy itself takes any position, and reads beyond its table.
    require(_is_count(position) and position <= 624, "position")
    require(has_gauss in (0, 1) and _is_number(gauss), "gauss")
    np.random.RandomState().set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))


# ------------------------------------------------------------------------------------------------ pieces


def _check_tensor(
    value: Any, what: str, shape: torch.Size | None, dtype: torch.dtype, may_be_empty: bool = False
) -> None:
    """A block of numbers of its own in memory; shape None: any. may_be_empty: or a tensor without content."""
    require(isinstance(value, torch.Tensor), f"{what} is a {type(value).__name__}")
    has_place = value.device.type == "cpu" or (may_be_empty and value.is_meta)
    plain = value.layout is torch.strided and not value.is_quantized and has_place
    require(plain, f"{what} is no plain tensor")
    require(value.dtype == dtype, f"{what} is {value.dtype}, not {dtype}")
    require(shape is None or value.shape == shape, f"{what} is {list(value.shape)}, not {list(shape or ())}")
    require(_has_own_memory(value), f"{what} claims more numbers than it has")


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether each number has a place of its own, in whatever order the dimensions lie in memory."""
    if not tensor.numel():
        return True
    expected = 1
    # From the dimension whose neighbours are nearest to the one whose are farthest: each stride must be the product of
    # the sizes before it.
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _is_count(value: Any) -> bool:
    """A whole number from 0. True and False are no numbers here, though Python counts them among its integers."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_COUNT


def _is_number(value: Any) -> bool:
    """A finite number."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_COUNT


def _short(value: Any) -> str:
    """A value as an error line can show it."""
    if isinstance(value, (int, float, str, bool)) or value is None:
        return repr(value)[:40]
    return f"a {type(value).__name__}"
