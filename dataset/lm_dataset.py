"""PretrainDataset: documents as padded (input, target, mask) triples, MiniMind's own interface to its data.

The trainers plan rows on token stores themselves; this class is for code that expects a plain map-style dataset.
"""

from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from dataset.store.build import open_or_build
from dataset.tokenizing.encoder import DocumentEncoder


class PretrainDataset(Dataset):
    """Item i is (X, Y, loss_mask), int64 [max_length - 1]: inputs, targets shifted by one, 1 where the target is text.

    BOS and EOS are added where missing; a text truncated at max_length ids has no EOS. Any fast Hugging Face tokenizer
    works; padding is its pad token, else its EOS, else id 0. Blank lines and empty texts are skipped. Files of all
    kinds and folders are read, and tokenised once into the token store that the trainers use. parse_special_tokens: read special
    tokens spelt out in a text as such, like MiniMind.
    Errors: DataError for the first faulty line, with file and line.
    """

    def __init__(
        self,
        data_path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int = 512,
        parse_special_tokens: bool = False,
    ) -> None:
        self.max_length = max_length
        self.store = open_or_build(data_path, DocumentEncoder(tokenizer, parse_special_tokens))
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_id = next(token_id for token_id in candidates if token_id is not None)

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        number = range(len(self))[index]
        ids = self.store.document(number)[: self.max_length].astype("int64")
        row = torch.full((self.max_length,), self.pad_id, dtype=torch.int64)
        row[: len(ids)] = torch.from_numpy(ids)
        # From the length: comparing with the pad id would also mask real tokens with that id.
        mask = (torch.arange(1, self.max_length) < len(ids)).long()
        return row[:-1].clone(), row[1:].clone(), mask
