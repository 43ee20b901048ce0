"""Reading the tensors of a `.pth` that may come from anywhere: no code is run, and no small file fills the memory."""

import os
import re
import zipfile
from pathlib import Path
from typing import IO

import torch

from common.files import file_digest, refuse_irregular
from model.weight_record import DIGEST_FIELD

# RoPE tables that some older files carry: no weights, so they are left out
TABLES = re.compile(r"(^|\.)(freqs_cis|pos_cis|freqs_cos|freqs_sin|rotary_emb\.inv_freq)$")
# What DistributedDataParallel puts before all keys, and torch.compile before those of what it has compiled
WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+|(?<=\.)_orig_mod\.")
# Where other trainers' checkpoints have the weights
NESTED = ("model", "state_dict", "model_state_dict")
# {what a file begins with that somebody took for weights: what it is}
OTHER_KINDS = {
    b"version https://git-lfs": "a git-LFS pointer, not the weights themselves: run git lfs pull",
    b"<": "a web page: the download did not give the file itself",
    b"{": "JSON",
    b"[": "JSON",
}
ZIP_MAGIC = b"PK\x03\x04"
# The format of torch before 1.6
PICKLE_MAGIC = b"\x80"


def read_state_dict(path: Path, digests: list[str] | None = None) -> dict[str, torch.Tensor]:
    """path -> {key: finite tensor} without RoPE tables, and without what DDP and torch.compile put before the keys.

    digests: the SHA-256 that the file may have; None: it is not known.
    Errors: ValueError, one line, for a file that is no flat state dict of floating-point numbers, or not the one that
    was written.
    """
    check_kind(path)
    if digests is not None and file_digest(path) not in digests:
        raise ValueError(
            f"{path}: damaged or changed: its SHA-256 is not the one in the .json beside it; copy both files again, or "
            f"take {DIGEST_FIELD} out of the .json to load it unchecked"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged pickle raises whatever it likes.
        reason = " ".join(str(error).split()) or type(error).__name__
        if "weights_only" in reason or "Weights only" in reason:
            reason = "it holds Python objects besides tensors, which are not loaded because they could run code"
        raise ValueError(f"{path}: not a readable weight file ({reason[:160]})") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path}: not a flat state dict (parameter name -> tensor) but a {type(state).__name__}")
    if {"format", "model", "engine", "progress"} <= state.keys():
        raise ValueError(
            f"{path}: a checkpoint to resume from; the weights are the .pth beside its folder, and --from_resume 1 goes on"
        )
    for name in NESTED:
        if isinstance(state.get(name), dict):
            raise ValueError(
                f"{path}: a checkpoint, with the weights in its entry {name!r}: save them by themselves, "
                f"torch.save(torch.load(path)[{name!r}], ...)"
            )
    weights = {}
    for key, tensor in state.items():
        if not isinstance(key, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{path}: not a flat state dict (parameter name -> tensor): {str(key)[:60]!r} is no tensor"
            )
        key = WRAPPERS.sub("", key)
        if TABLES.search(key):
            continue
        is_plain = tensor.layout is torch.strided and tensor.is_floating_point() and tensor.device.type == "cpu"
        # Strides of 0 make any number of a few bytes.
        if not is_plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path}: {key} is no plain block of floating-point numbers")
        if not torch.isfinite(tensor).all():
            raise ValueError(
                f"{path}: {key} has numbers that are NaN or infinite: the file is damaged, or its run failed"
            )
        weights[key] = tensor
    return weights


def check_kind(path: Path) -> None:
    """ValueError where the first bytes tell that torch never wrote the file, or that unpacking it would fill memory."""
    head = head_of(path)
    if head.startswith(ZIP_MAGIC):
        try:
            with open(path, "rb") as file:
                is_stored = holds_no_more_than_its_size(file)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
            raise ValueError(f"{path}: not a readable weight file (the archive is damaged or cut off)") from None
        if not is_stored:
            raise ValueError(f"{path}: not a readable weight file (a compressed archive, which torch never writes)")
    elif not head.startswith(PICKLE_MAGIC):
        raise ValueError(f"{path}: not a readable weight file ({kind_of(head)})")


def head_of(path: Path) -> bytes:
    """The first bytes of a file, which tell its kind. Errors: ValueError."""
    try:
        refuse_irregular(path)
        with open(path, "rb") as file:
            return file.read(512)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def kind_of(head: bytes) -> str:
    """What a file that is no weight file seems to be."""
    if not head:
        return "it is empty"
    for beginning, kind in OTHER_KINDS.items():
        if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(beginning):
            return f"it is {kind}"
    if head[8:10] == b'{"':
        return "it looks like safetensors: name the folder that holds it and its config.json"
    return "torch.save did not write it"


def holds_no_more_than_its_size(archive: IO[bytes]) -> bool:
    """Whether a ZIP archive stores its files uncompressed and apart from each other, as torch does; a bomb does not.

    Errors: those of zipfile, for what is no archive.
    """
    with zipfile.ZipFile(archive) as opened:
        entries = opened.infolist()
    size = archive.seek(0, os.SEEK_END)
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    return is_stored and sum(entry.file_size for entry in entries) <= size
