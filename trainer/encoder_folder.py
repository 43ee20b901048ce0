"""Where the folders of pretrained encoders are."""

import contextlib
from pathlib import Path

from transformers.utils import cached_file

from common.errors import UserError
from dataset.reading.file_kinds import expanded


def find_model(flag: str, model_path: str) -> Path:
    """The folder that a flag such as --model_path names; a name is looked up in the local cache of Hugging Face."""
    path = expanded(model_path)
    if (path / "config.json").exists():
        return path
    if not path.exists():
        with contextlib.suppress(OSError, ValueError):
            cached = cached_file(str(model_path), "config.json", local_files_only=True)
            if cached is not None:
                return Path(cached).parent
    # The folder of a run of train_electra.py holds its networks, and users name it as a whole.
    if (path / "discriminator" / "config.json").is_file():
        raise UserError(f"{flag} {model_path}: no config.json there; {path / 'discriminator'} has one")
    raise UserError(
        f"{flag} {model_path}: no config.json there, nor such a name in the local Hugging Face cache; "
        "train_electra.py leaves such a folder as electra_small/discriminator in its --out_dir"
    )
