"""Blocks of documents to token ids, in this process or in several."""

import hashlib
from array import array
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from common.errors import DataError
from common.processes import end_with, environment, id_for_children, ignore_stop_signals
from dataset.reading.documents import Block
from dataset.reading.faults import BadLine, Fault
from dataset.tokenizing.encoder import DocumentEncoder, TooLongToEncode

# An array.array while a block is encoded, a numpy array where one is read from a file.
Numbers = Any


class EncodedBlock(NamedTuple):
    """The documents of a block, one after the other."""

    tokens: Numbers  # uint16 or uint32
    lengths: Numbers  # int64: tokens of each document
    text_bytes: Numbers  # uint32: UTF-8 bytes of each document
    hashes: Numbers  # uint64: hash of each document's text
    faults: list[Fault]


@dataclass
class BlockEncoder:
    """Turns blocks into EncodedBlocks; picklable."""

    encoder: DocumentEncoder
    text_field: str
    skip_bad_lines: bool

    def __call__(self, block: Block) -> EncodedBlock:
        typecode = "H" if self.encoder.vocab_size <= 1 << 16 else "I"
        out = EncodedBlock(array(typecode), array("q"), array("I"), array("Q"), [])
        for line, text in block.documents(self.text_field):
            before = len(out.tokens)
            if isinstance(text, str):
                try:
                    for ids in self.encoder.encode_in_parts(text):
                        out.tokens.extend(ids)
                except TooLongToEncode as error:
                    del out.tokens[before:]
                    text = BadLine("too long", str(error))
            if isinstance(text, BadLine):
                out.faults.append(Fault(str(block.path), line, *text.args))
                if not self.skip_bad_lines:
                    # The caller raises it: the rest of the block is not wanted.
                    break
            elif len(out.tokens) > before:
                # Else it is a tokenizer without BOS and EOS for which the text is nothing.
                raw = self.encoder.body(text).encode()
                out.lengths.append(len(out.tokens) - before)
                out.text_bytes.append(len(raw))
                out.hashes.append(hash_of_text(raw))
        return out


def hash_of_text(raw: bytes) -> int:
    """64 bits. raw: the text in UTF-8, without the BOS and EOS strings that it may carry."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def encode_blocks(
    blocks: Iterable[Block], encode: BlockEncoder, num_procs: int
) -> Generator[tuple[Block, EncodedBlock], None, None]:
    """Yields (block, its tokens) in the order of the blocks. num_procs=1: no process is started."""
    blocks = iter(blocks)
    # A later fork (of a data loader) would have to warn about the tokenizer's threads.
    with environment("TOKENIZERS_PARALLELISM", "false"):
        if num_procs == 1:
            encode.encoder.use_fast_bpe()
            for block in blocks:
                yield block, encode(block)
            return
        pool = ProcessPoolExecutor(num_procs, initializer=_begin, initargs=(encode, id_for_children()))
        try:
            # Two blocks for each process are under way, so that none waits for the caller.
            waiting = deque((block, pool.submit(_encode, block)) for block in islice(blocks, 2 * num_procs))
            while waiting:
                block, future = waiting.popleft()
                yield block, future.result()
                waiting.extend((block, pool.submit(_encode, block)) for block in islice(blocks, 1))
        except BrokenProcessPool:
            raise DataError(
                "a tokenising process has ended (out of memory?); try fewer processes, and begin what a script of your own does "
                "with `if __name__ == '__main__':`"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------------ in the worker

_encoder: BlockEncoder | None = None


def _begin(encode: BlockEncoder, parent: int) -> None:
    """A worker's first act. It ends with the process that wants the tokens, which hears the signals of the terminal."""
    global _encoder
    ignore_stop_signals()
    end_with(parent)
    encode.encoder.use_fast_bpe()
    _encoder = encode


def _encode(block: Block) -> EncodedBlock:
    assert _encoder is not None
    return _encoder(block)
