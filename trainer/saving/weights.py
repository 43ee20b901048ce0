"""The half-precision weights of a run, as MiniMind's code loads them: `pretrain_512.pth` and `pretrain_512.json`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch

from common.files import HashingWriter, atomic_file, file_digest
from common.wording import announce
from dataset.tokenizing.plain_tokenizer import PlainTokenizer
from dataset.tokenizing.tokenizer_files import DEFAULT, has_tokenizer
from model.weight_record import DIGEST_FIELD, SPECIAL_TOKENS_FIELD, VOCABULARY_FIELD, tokenizer_beside

FLOAT16_MAX = torch.finfo(torch.float16).max


def save_pth(
    state_dict: dict[str, torch.Tensor],
    config: dict[str, Any],
    stem: str | Path,
    vocabulary: str | None = None,
    parse_special_tokens: bool | None = None,
) -> None:
    """Write `{stem}.pth`, a flat state dict on the CPU with the public key names, and `{stem}.json`, the config.

    The weights are in fp16, or in fp32 if one of them overflows fp16.
    The .json has the SHA-256 of this .pth and of the one before. vocabulary: the `vocabulary_digest` of the tokenizer.
    parse_special_tokens: whether special tokens inside a document were parsed. None: unknown.
    """
    path = Path(f"{stem}.pth")
    before = [file_digest(path)] if path.is_file() else []
    record = {VOCABULARY_FIELD: vocabulary, SPECIAL_TOKENS_FIELD: parse_special_tokens}
    known = {name: value for name, value in record.items() if value is not None}

    def content(digest: str) -> bytes:
        fields = {**config, DIGEST_FIELD: list(dict.fromkeys([digest, *before])), **known}
        return json.dumps(fields, indent=2, sort_keys=True).encode()

    save_with_digest(weights_to_save(state_dict), path, Path(f"{stem}.json"), content)


def kept_tokenizer(tokenizer: Any, stem: Path) -> dict[Path, Callable[[], None]]:
    """For `RunFiles.write_at_start`: the folder beside the weights in which all programs look for their tokenizer.

    Nothing is written if it is the repository's own, or if only transformers can tell how it acts: then users name it.
    """
    folder = tokenizer_beside(Path(f"{stem}.pth"))

    def write() -> None:
        # A resume finds it there.
        if is_kept(tokenizer) and not has_tokenizer(folder):
            tokenizer.copy_to(folder)

    return {folder: write}


def is_kept(tokenizer: Any) -> bool:
    """Returns whether a run writes its tokenizer beside its weights."""
    return isinstance(tokenizer, PlainTokenizer) and Path(tokenizer.name_or_path).resolve() != DEFAULT


def weights_to_save(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights on the CPU in float16, or all in float32 if one of them overflows float16.

    A tied matrix is stored once.
    """
    dtype = torch.float16
    for name, tensor in state_dict.items():
        largest = tensor.abs().max().item() if tensor.numel() else 0.0
        if FLOAT16_MAX < largest < float("inf"):
            announce(f"warning: {name} reaches {largest:.3g}, beyond float16: the weights are saved in float32")
            dtype = torch.float32
            break
    copies = {tensor.data_ptr(): tensor.to("cpu", dtype) for tensor in state_dict.values()}
    return {name: copies[tensor.data_ptr()] for name, tensor in state_dict.items()}


def save_with_digest(state: Any, path: Path, companion: Path, content: Callable[[str], bytes]) -> str:
    """torch.save to `path`, and write content(its SHA-256) to `companion`. Returns the SHA-256.

    The companion is renamed first, so that the file is never seen without it. After a kill between the two the content must
    match the previous file as well. Errors: OSError, such as for a full disk.
    """
    with atomic_file(path) as file:
        writer = HashingWriter(file)
        try:
            # torch uses only `write` and `flush` of a file.
            torch.save(state, cast(IO[bytes], writer))
        except RuntimeError as error:
            # torch reports that it cannot finish its file, instead of the error of `write`.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        digest = writer.digest.hexdigest()
        with atomic_file(companion) as beside:
            beside.write(content(digest))
    return digest
