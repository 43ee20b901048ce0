"""Encodes blocks of documents to token ids, in this process or in several."""

import hashlib
from array import array
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.errors import DataError
from common.processes import WorkerDied, Workers, environment
from dataset.reading.documents import Block
from dataset.reading.faults import BadLine, Fault
from dataset.tokenizing.encoder import DocumentEncoder, TooLongToEncode

# an array.array
Numbers = Any


class EncodedBlock(NamedTuple):
    """The documents of a block, one after the other."""

    tokens: Numbers  # uint16 or uint32
    lengths: Numbers  # int64: tokens of each document
    text_bytes: Numbers  # uint32: UTF-8 bytes of each document
    hashes: Numbers  # uint64: hash of each document's text
    faults: list[Fault]
    source_bytes: int  # bytes of the data file that this block took, for progress


@dataclass
class BlockEncoder:
    """Turns blocks into EncodedBlocks; picklable."""

    encoder: DocumentEncoder
    text_field: str
    skip_bad_lines: bool

    def __call__(self, block: Block) -> EncodedBlock:
        typecode = "H" if self.encoder.vocab_size <= 1 << 16 else "I"
        out = EncodedBlock(array(typecode), array("q"), array("I"), array("Q"), [], block.source_bytes)
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
                    # The caller raises it: the rest of the block is not needed.
                    break
            elif len(out.tokens) > before:
                # A text without tokens, from a tokenizer without BOS and EOS, is no document.
                raw = self.encoder.body(text).encode()
                out.lengths.append(len(out.tokens) - before)
                out.text_bytes.append(len(raw))
                out.hashes.append(hash_of_text(raw))
        return out


def hash_of_text(raw: bytes) -> int:
    """A 64-bit hash. raw: the text in UTF-8, without its BOS and EOS strings, if any."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def encode_blocks(blocks: Iterator[Block], encode: BlockEncoder, num_procs: int) -> Generator[EncodedBlock, None, None]:
    """Yields the encoded blocks in order. num_procs=1: no process is started."""
    # If the tokenizer had threads, a later fork (of a data loader) would warn about them.
    with environment("TOKENIZERS_PARALLELISM", "false"):
        if num_procs == 1:
            encode.encoder.use_fast_bpe()
            yield from map(encode, blocks)
            return
        try:
            with closing(Workers(num_procs, encode, encode.encoder.use_fast_bpe)) as workers:
                # Two blocks per process in flight, so that none waits for the caller.
                yield from workers.results(blocks, ahead=2 * num_procs)
        except WorkerDied as lost:
            raise DataError(
                f"the tokeniser's {lost}; let it use fewer cores (on Linux: taskset), and put the code of a script of your own below "
                "`if __name__ == '__main__':`"
            ) from None
