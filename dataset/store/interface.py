"""What planning and loading ask of tokenised documents, whether they lie in one token store or in several."""

from typing import Any, Protocol

import numpy as np

# An array of whole numbers, of any width.
Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Column(Protocol):
    """A 1-d array of whole numbers, read by slices, by arrays of indices and by single indices, as numpy's are."""

    @property
    def dtype(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...


class HasOffsets(Protocol):
    """What a plan reads."""

    @property
    def offsets(self) -> Column:
        """int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]."""


class HasTokens(Protocol):
    """What a batch is made from."""

    @property
    def tokens(self) -> Column:
        """uint16 or uint32 [all tokens]: the documents end to end."""


class HasTokensAndOffsets(HasTokens, HasOffsets, Protocol):
    """What validation reads."""


class Documents(HasTokensAndOffsets, Protocol):
    """Tokenised documents, numbered from 0: a TokenStore or a ConcatStore."""

    # Of the data and of how it was tokenised.
    fingerprint: str

    @property
    def text_bytes(self) -> Column:
        """uint32 [documents]: UTF-8 bytes of each text."""

    @property
    def doc_hash(self) -> Column:
        """uint64 [documents]: hash of each text."""

    @property
    def total_text_bytes(self) -> int:
        """UTF-8 bytes of all texts."""

    def __len__(self) -> int: ...
