"""Networks of transformers in folders of `save_pretrained`."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from common.errors import UserError
from common.packages import loader_reason, refuse_foreign_attention


def load_config(what: str, folder: Path) -> Any:
    """The config of a folder. `what` names it in errors: UserError."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # Each loader raises its own kinds.
        raise UserError(f"{what}: no config can be loaded from there ({loader_reason(error)})") from error
    refuse_foreign_attention(config, what)
    return config


def load_network(what: str, folder: Path, kind: Any, config: Any) -> tuple[Any, set[str]]:
    """(the network of a folder in fp32, names of its weights that are not in there or have another shape: they are random).

    kind: an Auto class of transformers. config: of load_config, perhaps changed. Errors: UserError.
    """
    try:
        network, faults = kind.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        # Each loader raises its own kinds.
        raise UserError(f"{what}: no model can be loaded from there ({loader_reason(error)})") from error
    return network, {*faults["missing_keys"], *(key for key, *_ in faults["mismatched_keys"])}
