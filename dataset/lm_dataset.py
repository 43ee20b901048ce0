"""PretrainDataset: `{"text": ...}` lines as padded (input, target, mask) triples, MiniMind's own interface to its data.

The trainers read token stores (dataset/store/token_store.py); this class serves code that expects a plain map-style
dataset. It keeps the places of the lines, not their text.
"""

from array import array
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from common.errors import DataError
from dataset.reading import faults
from dataset.reading.faults import BadLine, Fault
from dataset.reading.json_files import text_of_line
from dataset.reading.streams import BOM, WHITE_SPACE, LineReader
from dataset.tokenizing.encoder import DocumentEncoder


class PretrainDataset(Dataset):
    """Item i is (X, Y, loss_mask), int64 [max_length - 1]: inputs, targets one to the right, 1 where these are text.

    BOS and EOS are put around a text that does not carry them; a text that is cut at max_length ids has no EOS. Any
    fast Hugging Face tokenizer serves; padding is its pad token, or else its EOS, or else id 0. Blank lines are no items.
    A faulty line raises DataError with file and line when it is asked for. Items may be asked for in any process.
    """

    def __init__(self, data_path: str | Path, tokenizer: PreTrainedTokenizerBase, max_length: int = 512) -> None:
        if max_length < 2:
            raise ValueError(f"max_length {max_length}: an input and its target take at least 2 ids")
        self.path = Path(data_path)
        self.max_length = max_length
        if not self.path.is_file():
            raise DataError(f"{data_path}: no such file")
        if self.path.suffix not in (".jsonl", ".ndjson"):
            raise DataError(f"{data_path}: PretrainDataset reads plain .jsonl files; the trainers read other kinds too")
        self.encoder = DocumentEncoder(tokenizer)
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_id = next(token_id for token_id in candidates if token_id is not None)
        self.starts, self.ends, self.lines = _find_lines(self.path)
        if not len(self.starts):
            raise DataError(f"{data_path}: the file has no line with text")

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        ids = self.encoder.encode([self.text(index)])[0][: self.max_length]
        row = torch.full((self.max_length,), self.pad_id, dtype=torch.int64)
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
        # From the length: comparing with the pad id would drop every real token that happens to be the same.
        mask = (torch.arange(1, self.max_length) < len(ids)).long()
        return row[:-1].clone(), row[1:].clone(), mask

    def text(self, index: int) -> str:
        """The text of item `index`."""
        size = int(self.ends[index] - self.starts[index])
        if size > faults.MAX_DOCUMENT_BYTES:
            raise DataError(f"{self.path}:{self.lines[index]}: {faults.too_long('line')[1]}")
        # Opened here: a handle that forked workers share has one position for all of them.
        with open(self.path, "rb") as file:
            file.seek(self.starts[index])
            raw = file.read(size)
        try:
            text = text_of_line(raw, "text")
        except BadLine as bad:
            raise Fault(str(self.path), self.lines[index], *bad.args).error() from None
        if text is None:
            raise DataError(f"{self.path}:{self.lines[index]}: the file has changed since it was opened; start again")
        return text


def _find_lines(path: Path) -> "tuple[array[int], array[int], array[int]]":
    """(start, end, line number from 1) of all lines that are not blank."""
    starts = array("q")
    ends = array("q")
    numbers = array("q")
    start = 0
    with path.open("rb") as file:
        reader = LineReader(file)
        while (line := reader.read_line()) != b"":
            end = file.tell()
            # A line that is too long is a fault of its own when it is asked for.
            if line is None or line.removeprefix(BOM).strip(WHITE_SPACE):
                starts.append(start)
                ends.append(end - (line is not None and line.endswith(b"\n")))
                numbers.append(reader.number)
            start = end
    return starts, ends, numbers
