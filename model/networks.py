"""Loading a save_pretrained folder of any architecture in transformers; no code from the folder is run."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from common.errors import UserError, library_errors
from common.files import read_object
from model.hf_format import CONFIG, refuse_layers


def load_config(what: str, folder: Path) -> Any:
    """Returns the config of a save_pretrained folder, of any architecture. what: its name in errors. Errors: UserError."""
    with library_errors(f"{what}: no config can be loaded from there"):
        refuse_layers(read_object(folder / CONFIG))
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # transformers would download an attention kernel from the hub and run it, despite trust_remote_code=False.
    implementation = str(getattr(config, "_attn_implementation", None) or "")
    if "/" in implementation:
        raise UserError(f"{what}: its config asks for the attention of {implementation}, a program that is not fetched")
    return config


def load_network(what: str, folder: Path, kind: Any, config: Any, **options: Any) -> tuple[Any, dict[str, list[str]]]:
    """Returns (network in fp32, {"missing_keys", "unexpected_keys", "mismatched_keys": names of weights}).

    Missing weights and those of another shape are random; names of the latter include both shapes. kind: a class of
    transformers. config: of load_config, perhaps changed. Errors: UserError.
    """
    with library_errors(f"{what}: no model can be loaded from there"):
        # transformers makes random weights where the files have none: a config of a kilobyte must not fill the memory. Quantised
        # weights have half a byte each.
        with torch.device("meta"):
            parameters = sum(
                weight.numel() for weight in kind.from_config(config, trust_remote_code=False).parameters()
            )
        n_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
        if parameters > 2 * n_bytes:
            raise ValueError(f"its config asks for {parameters:,} parameters, the weight files have {n_bytes:,} bytes")
        network, faults = kind.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    shapes = "{} is {} in the file, {} in the config"
    faults["mismatched_keys"] = [
        shapes.format(key, list(found), list(expected)) for key, found, expected in faults["mismatched_keys"]
    ]
    return network, {fault: sorted(keys) for fault, keys in faults.items()}
