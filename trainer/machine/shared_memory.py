"""Memory that all ranks of one machine see.

It is a file without a name (memfd_create): it is gone with the last process that has it, even after kill -9, and no limit
of /dev/shm counts, which containers keep at 64 MB. The ranks open rank 0's through /proc/PID/fd.
"""

import mmap
import os
import secrets
import sys

import torch
import torch.distributed as dist

from trainer.machine.collectives import on_main
from trainer.machine.ranks import Ranks

# At the beginning of the memory stands a random text. A rank in a container of its own would find another file under the
# same name, or none.
PROOF_BYTES = 16
# Where the part for tensors begins: at a page, so that it is aligned for whatever reads it.
HEADER_BYTES = mmap.PAGESIZE


def can_share(ranks: Ranks) -> bool:
    """Whether the ranks have what it takes. A limit or a sandbox may refuse it all the same."""
    return ranks.on_one_machine and sys.platform == "linux"


def shared_bytes(size: int, ranks: Ranks) -> torch.Tensor | None:
    """uint8 [size], zeros, the same memory on all ranks; None on all of them where one cannot have it.

    A collective: all ranks must call it. The memory is taken page by page, as it is written.
    """
    if not can_share(ranks):
        return None
    whole = HEADER_BYTES + size
    descriptor = -1
    mapping: mmap.mmap | None = None

    def make() -> tuple[str, bytes]:
        nonlocal descriptor, mapping
        try:
            descriptor = os.memfd_create("ranks", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, whole)
            mapping = mmap.mmap(descriptor, whole)
        except OSError:
            # A limit of the shell, or a sandbox that refuses it.
            return "", b""
        proof = secrets.token_bytes(PROOF_BYTES)
        mapping[:PROOF_BYTES] = proof
        return f"/proc/{os.getpid()}/fd/{descriptor}", proof

    path, proof = on_main(ranks, make)
    if path and not ranks.is_main:
        mapping = open_mapping(path, whole, proof)
    # All have it or none: otherwise each would wait for the others in another way.
    n_with_it = torch.tensor([float(mapping is not None)])
    dist.all_reduce(n_with_it)
    # The mapping stays without it.
    if descriptor >= 0:
        os.close(descriptor)
    if mapping is None or n_with_it < ranks.world_size:
        return None
    return torch.frombuffer(mapping, dtype=torch.uint8)[HEADER_BYTES:]


def open_mapping(path: str, size: int, proof: bytes) -> mmap.mmap | None:
    """The memory behind another process's open file; None where it is not the one with this proof."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != size:
            return None
        mapping = mmap.mmap(descriptor, size)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return mapping if mapping[:PROOF_BYTES] == proof else None
