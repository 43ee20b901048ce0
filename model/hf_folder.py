"""Reading a Hugging Face folder (config.json and .safetensors) as a MiniMind: no code is run, pickles are not read.

Names and shapes of all tensors are compared with those of the model that config.json speaks of before that is built. Its
weights are filled in one tensor at a time: at most the model and its largest matrix are in memory.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from common.files import read_object
from model.config import MiniMindConfig
from model.config_bounds import CONFIG, read_checked
from model.hf_format import StateDict, config_from_hf, must_be_zero, own_tensors
from model.pth_format import EMBEDDINGS, HEAD, ModelT, check_tensors
from model.weight_files import TABLES, head_of, kind_of

WEIGHTS_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# A hundred bytes for each tensor. The largest published mixtures have some ten thousand tensors.
MOST_INDEX_BYTES = 1 << 24
DTYPES = ("F32", "F16", "BF16")


def read_config(folder: Path) -> MiniMindConfig:
    """The config of the MiniMind that computes what the model in `folder` does.

    Errors: ValueError, one line, for a folder that has none, and for what MiniMind computes otherwise.
    """
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(f"{folder}: no {CONFIG}; a folder of Hugging Face's save_pretrained or a download is wanted")
    theirs = read_checked(folder)
    try:
        return config_from_hf(theirs)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{path}: {str(error)[:250]}") from None


def load_folder(
    model_class: type[ModelT], folder: Path, config: MiniMindConfig, files: list[Path] | None = None
) -> ModelT:
    """The weights in `folder` -> model_class in fp32 and eval mode. config: as read_config gives it.

    files: as checked_files has given them for this config; None: they are looked at now.
    Errors: ValueError, one line, for files that are damaged or not of such a model.
    """
    files = files or checked_files(model_class, folder, config)
    model = model_class(config)
    own = model.state_dict()
    # A tied head may be stored. It must be equal to the embeddings, which may come later.
    stored_head: torch.Tensor | None = None
    for path in files:
        for name, tensor in tensors_of(path):
            if config.tie_word_embeddings and name == HEAD:
                stored_head = tensor
                continue
            for own_name, part in own_tensors(name, tensor, config).items():
                own[own_name].copy_(part)
    if stored_head is not None and not torch.equal(stored_head, own[EMBEDDINGS]):
        raise ValueError(f"{folder}: tie_word_embeddings is true, but {HEAD} is not {EMBEDDINGS}")
    return model.eval()


def checked_files(model_class: type[PreTrainedModel], folder: Path, config: MiniMindConfig) -> list[Path]:
    """The files of weights in a folder, whose lists of tensors are those of a model of `config`; no weight is read.

    Errors: ValueError, one line.
    """
    files = weight_files(folder)
    listed = list_tensors(files)
    found: StateDict = {}
    for name, tensor in listed.items():
        if not must_be_zero(name):
            found.update(own_tensors(name, tensor, config))
    if config.tie_word_embeddings and EMBEDDINGS in found:
        found.setdefault(HEAD, found[EMBEDDINGS])
    check_tensors(found, config, folder, model_class)
    if config.use_moe and config.generation == "minimind2":
        # Where a gate is missing, transformers draws it at random, and the model is not the one that is computed here.
        for layer in range(config.num_hidden_layers):
            gate = f"model.layers.{layer}.mlp.shared_expert_gate.weight"
            if gate not in listed:
                raise ValueError(f"{folder}: missing keys: {gate}")
    return files


def weight_files(folder: Path) -> list[Path]:
    """The .safetensors of a folder, as transformers finds them: one, or those that an index names. Errors: ValueError.

    Links are followed, since the cache of Hugging Face's downloads consists of them.
    """
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX
    if not index.exists():
        raise ValueError(
            f"{folder}: neither {WEIGHTS_FILE} nor {INDEX}; pickles such as pytorch_model.bin are not read, since they could run "
            "code: load them with transformers where you trust them, and save_pretrained writes .safetensors"
        )
    weight_map = read_object(index, MOST_INDEX_BYTES).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    for name in names:
        # No file of another folder is read.
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index}: {str(name)[:60]!r} is not the name of a file in the same folder")
        if not (folder / name).exists():
            raise ValueError(f"{folder / name}: no such file, and {INDEX} names it: the download is not complete")
    if not names:
        raise ValueError(f"{index}: no weight_map, which tells the file of each tensor")
    return [folder / name for name in sorted(names)]


def opened(path: Path) -> Any:
    """The reader of a .safetensors, a context. Errors: ValueError for what is none, or is cut off."""
    head = head_of(path)
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:120] if head[8:9] == b"{" else kind_of(head)
        raise ValueError(f"{path}: not a readable .safetensors, or not all of it ({reason})") from None


def list_tensors(files: list[Path]) -> StateDict:
    """{name of each tensor in the files: an empty one of its shape}, on the device "meta", which needs no memory.

    Errors: ValueError for a kind of number that is none of DTYPES.
    """
    listed: StateDict = {}
    for path in files:
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                if TABLES.search(name):
                    continue
                stored = file.get_slice(name)
                if stored.get_dtype() not in DTYPES:
                    raise ValueError(f"{path}: {name[:80]} is {stored.get_dtype()}; {', '.join(DTYPES)} are read")
                listed[name] = torch.empty(stored.get_shape(), device="meta")
    return listed


def tensors_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight in fp32) of each tensor of a file, one after the other; those that must be zero are left out.

    Errors: ValueError for numbers that are not finite, and for some that are not zero and must be.
    """
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - it is no dict
            if TABLES.search(name):
                continue
            stored = file.get_tensor(name)
            if not torch.isfinite(stored).all():
                raise ValueError(f"{path}: {name[:80]} has numbers that are NaN or infinite: the file is damaged")
            why = must_be_zero(name)
            if why is None:
                yield name, stored.to(torch.float32)
            elif stored.any():
                raise ValueError(f"{path}: {name} is not zero: {why}")
