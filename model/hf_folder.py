"""Reading a Hugging Face folder (config.json and .safetensors) as a MiniMind: no code is run, nothing believed unchecked.

It may come from anybody. So the small files are read up to a bound, then names and shapes of all tensors are compared with
those of the model that config.json speaks of, and only then is that model built. Its weights are filled in one tensor at a
time: at most the model and its largest matrix are in memory.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from common.files import MOST_CONFIG_BYTES, read_object
from common.flags import LARGEST
from model.config import MiniMindConfig
from model.hf_format import StateDict, fields_from_hf, must_be_zero, own_tensors
from model.pth_format import EMBEDDINGS, HEAD, check_shapes, check_sizes
from model.weight_files import TABLES, head_of, kind_of

if TYPE_CHECKING:
    from model.model_minimind import MiniMindForCausalLM

CONFIG = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# A hundred bytes for each tensor. The largest published mixtures have some ten thousand tensors.
MOST_INDEX_BYTES = 1 << 24
# The list of tensors at the beginning of a .safetensors
MOST_HEADER_BYTES = 1 << 24
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What other libraries and older versions of transformers leave in a folder
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")


def read_config(folder: Path) -> MiniMindConfig:
    """The config of the MiniMind that computes what the model in `folder` does.

    Errors: ValueError, one line, for a folder that has none, and for what MiniMind computes otherwise.
    """
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(f"{folder}: no {CONFIG}; a folder of Hugging Face's save_pretrained or a download is wanted")
    theirs = read_object(path, MOST_CONFIG_BYTES)
    try:
        return MiniMindConfig(**fields_from_hf(theirs))
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from None


def load_folder(
    model_class: "type[MiniMindForCausalLM]",
    folder: Path,
    config: MiniMindConfig,
    files: list[Path] | None = None,
) -> "MiniMindForCausalLM":
    """The weights in `folder` -> model_class in fp32 and eval mode. config: as read_config gives it.

    files: as checked_files has given them for this config; None: they are looked at now.
    Errors: ValueError, one line, for files that are damaged or not of such a model.
    """
    if files is None:
        files = checked_files(model_class, folder, config)
    model = model_class(config)
    own = model.state_dict()
    is_tied = config.tie_word_embeddings
    stored_head: torch.Tensor | None = None
    for path in files:
        for name, tensor in tensors_of(path):
            if is_tied and name == HEAD:
                # It must be equal to the embeddings, which may come later.
                stored_head = tensor
                continue
            for own_name, part in own_tensors(name, tensor, config).items():
                own[own_name].copy_(part)
    if stored_head is not None and not torch.equal(stored_head, own[EMBEDDINGS]):
        raise ValueError(f"{folder}: tie_word_embeddings is true, but {HEAD} is not {EMBEDDINGS}")
    return model.eval()


def checked_files(model_class: "type[MiniMindForCausalLM]", folder: Path, config: MiniMindConfig) -> list[Path]:
    """The files of weights in a folder, whose lists of tensors are those of a model of `config`; no weight is read.

    Errors: ValueError, one line.
    """
    files = weight_files(folder)
    check_listed(list_tensors(files), config, folder, model_class)
    return files


def weight_files(folder: Path) -> list[Path]:
    """The .safetensors of a folder, as transformers finds them. Errors: ValueError.

    Links are followed, since the cache of Hugging Face's downloads consists of them.
    """
    only_file = folder / WEIGHTS_FILE
    if only_file.exists():
        return [only_file]
    index = folder / INDEX
    if index.exists():
        return shards(index)
    for name in PICKLES:
        if (folder / name).exists():
            raise ValueError(
                f"{folder}: its weights are in {name}, a pickle, which is not read here because it could run code; load it "
                "with transformers where you trust it, and save_pretrained writes .safetensors"
            )
    some = sorted(path.name for path in folder.glob("*.safetensors"))
    if some:
        raise ValueError(f"{folder}: neither {WEIGHTS_FILE} nor {INDEX}, which tells what {some[0]} and the like are")
    raise ValueError(f"{folder}: no weights; {WEIGHTS_FILE} is wanted, or {INDEX} and the files that it names")


def shards(index: Path) -> list[Path]:
    """The files that an index names, in the order of their names. Errors: ValueError."""
    weight_map = read_object(index, MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: no weight_map, which tells the file of each tensor")
    names = set()
    for name in weight_map.values():
        # With a folder in it, it could be any file of the machine.
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name, re.ASCII):
            raise ValueError(f"{index}: {str(name)[:60]!r} is not the name of a .safetensors file in the same folder")
        names.add(name)
    paths = [index.parent / name for name in sorted(names)]
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such file, and {INDEX} names it: the download is not complete")
    return paths


def opened(path: Path) -> Any:
    """The reader of a .safetensors, a context. Errors: ValueError for what is none, or is cut off."""
    try:
        head = head_of(path)
        # Eight bytes hold the length of the list of tensors, which begins after them.
        length = int.from_bytes(head[:8], "little")
        if length > MOST_HEADER_BYTES:
            reason = kind_of(head)
            if head[8:9] == b"{":
                reason = f"its list of tensors has {length:,} bytes, and at most {MOST_HEADER_BYTES:,} are read"
            raise ValueError(f"{path}: not a readable .safetensors ({reason})")
        return safe_open(path, framework="pt")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"{path}: not a readable .safetensors, or not all of it ({reason})") from None


def list_tensors(files: list[Path]) -> StateDict:
    """{name of each tensor in the files: an empty one of its shape}, on the device "meta", which needs no memory.

    Errors: ValueError for a kind of number that is none of DTYPES, for a shape that no model has, and for a tensor that
    two files have.
    """
    listed: StateDict = {}
    for path in files:
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                if TABLES.search(name):
                    continue
                stored = file.get_slice(name)
                dtype = stored.get_dtype()
                if dtype not in DTYPES:
                    raise ValueError(f"{path}: {name[:80]} is {dtype}; {', '.join(DTYPES)} are read")
                if name in listed:
                    raise ValueError(f"{path}: {name[:80]} is in another file of the folder too")
                shape = stored.get_shape()
                # Where one is 0 the others may be anything, and torch ends with errors of many kinds.
                if not all(0 < size <= LARGEST for size in shape):
                    raise ValueError(f"{path}: the shape of {name[:80]} is {shape}, which no model has")
                listed[name] = torch.empty(shape, device="meta")
    return listed


def check_listed(
    listed: StateDict, config: MiniMindConfig, folder: Path, model_class: "type[MiniMindForCausalLM]"
) -> None:
    """ValueError unless the tensors of a folder are those of a model of such a config."""
    found: StateDict = {}
    for name, tensor in listed.items():
        if not must_be_zero(name):
            found.update(own_tensors(name, tensor, config))
    if config.tie_word_embeddings and EMBEDDINGS in found:
        found.setdefault(HEAD, found[EMBEDDINGS])
    check_sizes(found, config, folder)
    with torch.device("meta"):
        expected = model_class(config).state_dict()
    check_shapes(found, expected, folder)
    if config.use_moe and config.generation == "minimind2":
        # Where a gate is missing, transformers draws it at random, and the model is not the one that is computed here.
        for layer in range(config.num_hidden_layers):
            gate = f"model.layers.{layer}.mlp.shared_expert_gate.weight"
            if gate not in listed:
                raise ValueError(f"{folder}: missing keys: {gate}")


def tensors_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight in fp32) of each tensor of a file, one after the other; those that must be zero are left out.

    Errors: ValueError for numbers that are not finite, and for some that are not zero and must be.
    """
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - it is no dict
            if TABLES.search(name):
                continue
            try:
                stored = file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                reason = " ".join(str(error).split())[:120]
                raise ValueError(f"{path}: {name[:80]} cannot be read ({reason})") from None
            if not torch.isfinite(stored).all():
                raise ValueError(f"{path}: {name[:80]} has numbers that are NaN or infinite: the file is damaged")
            why = must_be_zero(name)
            if why is None:
                yield name, stored.to(torch.float32)
            elif stored.any():
                raise ValueError(f"{path}: {name} is not zero: {why}")
