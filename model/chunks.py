"""How many rows of logits exist at a time: for the loss (model/loss.py), and for the estimate of its memory.

Nothing here needs torch.
"""

# With a vocabulary of 6,400 these take 52 MB in fp32; fewer make small products.
CHUNK_ROWS = 2048
# Each chunk is some ten launches, and a GPU has done 2,048 rows before the host has launched the next.
CHUNK_ROWS_OF_GPU = 16_384
# Of the logits of a chunk in fp32, so that a large vocabulary does not fill a small card.
CHUNK_BYTES_OF_GPU = 512_000_000
FP32 = 4
# GPUs multiply whole tiles.
TILE = 128


def chunk_rows(device_type: str, vocab_size: int) -> int:
    """The largest number of rows of logits on a device of this type."""
    if device_type != "cuda":
        return CHUNK_ROWS
    rows = CHUNK_BYTES_OF_GPU // (FP32 * vocab_size) // TILE * TILE
    # Smaller chunks than those of a CPU would be slow, whatever the vocabulary is.
    return max(CHUNK_ROWS, min(CHUNK_ROWS_OF_GPU, rows))
