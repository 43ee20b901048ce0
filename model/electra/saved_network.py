"""Networks in folders of `save_pretrained`: what does not hold all of a network is refused."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from common.errors import UserError
from common.packages import loader_reason, refuse_foreign_attention
from model.config_bounds import read_checked, refuse_oversize
from model.hf_folder import CONFIG


def load_config(what: str, folder: Path) -> Any:
    """The config of a folder. `what` names it in errors: UserError."""
    try:
        if (folder / CONFIG).exists():
            read_checked(folder)
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:
        # Each loader raises its own kinds.
        raise UserError(f"{what}: no config can be loaded from there ({loader_reason(error)})") from error


def load_network(what: str, folder: Path, kind: Any) -> Any:
    """A network of an ELECTRA of a class of transformers, in fp32.

    Errors: UserError for a folder that holds another model, or not all of its weights.
    """
    config = load_config(what, folder)
    refuse_foreign_attention(config, what)
    if config.model_type != "electra":
        raise UserError(f"{what}: a model of the kind {str(config.model_type)[:40]}; a network of an ELECTRA is wanted")
    refuse_oversize(folder, lambda: kind(config))
    try:
        network, faults = kind.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        # Each loader raises its own kinds.
        raise UserError(f"{what}: no model can be loaded from there ({loader_reason(error)})") from error
    missing = sorted(map(str, faults["missing_keys"]))
    if missing:
        # transformers would fill them with random numbers.
        raise UserError(
            f"{what}: {len(missing)} weights of an {kind.__name__} are not in there, {missing[0]}; name a folder as "
            "train_electra.py leaves it: a fine-tuned encoder has lost the head of its pretraining"
        )
    return network
