"""Blocks of documents to token ids, in this process or in several.

The worker processes run this very file and speak over their pipes: they import neither the caller's script nor torch,
end with the caller, however that ends (common/processes.py, or the end of file on standard input), and get no signal of
the terminal.
"""

import contextlib
import hashlib
import os
import pickle
import queue
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# Started by path: this folder must not shadow packages.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.errors import DataError
from common.processes import end_with, environment, id_for_children
from dataset.reading.documents import Block
from dataset.reading.faults import BadLines, Fault
from dataset.tokenizing.long_texts import PART_CHARACTERS, TooLongToEncode

# The tokenizer holds about 100 bytes a token until a batch is done.
BATCH_CHARACTERS = PART_CHARACTERS


if TYPE_CHECKING:
    # Not in a worker process, which would wait for it.
    from dataset.tokenizing.encoder import DocumentEncoder

# An array.array while a block is encoded, a numpy array where one is read from a file.
Numbers = Any


@dataclass
class EncodedBlock:
    """The documents of a block, one after the other."""

    # uint16 or uint32.
    tokens: Numbers
    # int64: tokens of each document.
    lengths: Numbers
    # uint32: UTF-8 bytes of each document.
    text_bytes: Numbers
    # uint64: hash of each document's text.
    hashes: Numbers
    # Line numbers count from the start of the block.
    bad: BadLines
    max_token_id: int = -1


@dataclass
class BlockEncoder:
    """Turns blocks into EncodedBlocks; picklable."""

    encoder: "DocumentEncoder"
    text_field: str
    skip_bad_lines: bool

    def __call__(self, block: Block) -> EncodedBlock:
        typecode = "H" if self.encoder.vocab_size <= 1 << 16 else "I"
        out = EncodedBlock(array(typecode), array("q"), array("I"), array("Q"), BadLines())
        texts: list[str] = []
        characters = 0
        fault: Fault | None
        for line, text in block.documents(self.text_field):
            if not isinstance(text, str):
                fault = Fault(str(block.path), line, *text)
            elif len(text) > BATCH_CHARACTERS:
                self._add_batch(texts, out)
                texts = []
                characters = 0
                fault = self._add_long(text, str(block.path), line, out)
            else:
                fault = None
                texts.append(text)
                characters += len(text)
            if fault is not None:
                out.bad.add(fault)
                if not self.skip_bad_lines:
                    # The caller raises it: the rest of the block is not wanted.
                    break
            if characters >= BATCH_CHARACTERS:
                self._add_batch(texts, out)
                texts = []
                characters = 0
        self._add_batch(texts, out)
        out.max_token_id = max(out.tokens, default=-1)
        return out

    def _add_batch(self, texts: list[str], out: EncodedBlock) -> None:
        if not texts:
            return
        for text, ids in zip(texts, self.encoder.encode(texts), strict=True):
            out.tokens.extend(ids)
            self._add_document(text, len(ids), out)

    def _add_long(self, text: str, path: str, line: int, out: EncodedBlock) -> Fault | None:
        """Adds a document part by part; returns what is wrong where it cannot be encoded in bounded memory."""
        before = len(out.tokens)
        try:
            for ids in self.encoder.encode_in_parts(text):
                out.tokens.extend(ids)
        except TooLongToEncode as error:
            del out.tokens[before:]
            return Fault(path, line, "too long", str(error))
        self._add_document(text, len(out.tokens) - before, out)
        return None

    def _add_document(self, text: str, tokens: int, out: EncodedBlock) -> None:
        """Adds all but the tokens, which are there already."""
        # A tokenizer without BOS and EOS for which the text is nothing.
        if not tokens:
            return
        measured = measure(self.encoder.body(text))
        out.lengths.append(tokens)
        out.text_bytes.append(measured.n_bytes)
        out.hashes.append(measured.digest)


class Measured(NamedTuple):
    """What a store keeps of a text beside its tokens: its UTF-8 bytes, and a hash of them of 64 bits."""

    n_bytes: int
    digest: int


def measure(body: str) -> Measured:
    """body: a text without the BOS and EOS strings that it may carry."""
    digest = hashlib.blake2b(digest_size=8)
    n_bytes = 0
    for begin in range(0, len(body), BATCH_CHARACTERS):
        raw = body[begin : begin + BATCH_CHARACTERS].encode("utf-8")
        digest.update(raw)
        n_bytes += len(raw)
    return Measured(n_bytes, int.from_bytes(digest.digest(), "little"))


def encode_blocks(
    blocks: Iterable[Block], encode: BlockEncoder, num_procs: int
) -> Generator[tuple[Block, EncodedBlock], None, None]:
    """Yields (block, its tokens) in the order of the blocks. num_procs=1: no process is started."""
    blocks = iter(blocks)
    if num_procs == 1:
        encode.encoder.use_fast_bpe()
        # A later fork (of a data loader) would have to warn about the tokenizer's threads.
        with environment("TOKENIZERS_PARALLELISM", "false"):
            for block in blocks:
                yield block, encode(block)
        return
    setup = pickle.dumps(encode)
    workers = [_Worker(setup) for _ in range(num_procs)]
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(block: Block) -> EncodedBlock:
        worker = idle.get()
        try:
            return worker(block)
        finally:
            idle.put(worker)

    # Each thread only waits for a process. Two blocks for each of them are under way, so that none waits for the caller.
    pool = ThreadPoolExecutor(num_procs)
    waiting: deque[tuple[Block, Future[EncodedBlock]]] = deque()
    try:
        for block in islice(blocks, 2 * num_procs):
            waiting.append((block, pool.submit(run, block)))
        while waiting:
            block, future = waiting.popleft()
            yield block, future.result()
            for next_block in islice(blocks, 1):
                waiting.append((next_block, pool.submit(run, next_block)))
    finally:
        for worker in workers:
            worker.process.kill()
        pool.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.close()


class _Worker:
    """One process; a call sends a block and waits for its tokens."""

    def __init__(self, setup: bytes) -> None:
        """setup: the pickled BlockEncoder. It is sent with the first block, in the thread that waits for the process."""
        variables = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), str(id_for_children())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.to_process = self.process.stdin
        self.from_process = self.process.stdout
        self.setup = setup

    def __call__(self, block: Block) -> EncodedBlock:
        try:
            if self.setup:
                self.to_process.write(self.setup)
                self.setup = b""
            pickle.dump(block, self.to_process)
            self.to_process.flush()
            # Unpickling could run code, but this comes from our own process over a private pipe.
            result = pickle.load(self.from_process)
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self.process.wait()
            raise DataError(
                f"a tokenising process ended with code {code} (out of memory?); try fewer processes"
            ) from None
        if isinstance(result, Exception):
            raise result
        assert isinstance(result, EncodedBlock)
        return result

    def close(self) -> None:
        """Wait for the end of a process that was killed."""
        # What was not sent does not matter any more.
        with contextlib.suppress(OSError):
            self.to_process.close()
        self.from_process.close()
        self.process.wait()


def _serve() -> None:
    """The worker: blocks come on standard input, tokens go out on what was standard output."""
    end_with(int(sys.argv[1]))
    source = sys.stdin.buffer
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # A stray print must not get into the stream.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        encode = pickle.load(source)
        encode.encoder.use_fast_bpe()
        while True:
            block = pickle.load(source)
            result: EncodedBlock | Exception
            try:
                result = encode(block)
            except Exception as error:
                result = error
            pickle.dump(result, sink)
            sink.flush()
    except (EOFError, BrokenPipeError):
        # The caller is done or gone.
        # At once: what is left in the buffer has no reader.
        os._exit(0)


if __name__ == "__main__":
    _serve()
