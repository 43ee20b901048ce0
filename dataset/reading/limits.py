"""How large one document may be, in one place: every reader and the encoder keep their memory within these."""

# Bytes of a line after decompression, of a text file, of a value in a table. A reader holds a few copies of one.
MAX_DOCUMENT_BYTES = 256 << 20

# Python's csv module takes four bytes for each character of a row, and up to sixty for each of its fields.
MAX_CSV_ROW_BYTES = 32 << 20

# Python's objects for the values of a JSON line may take twenty times its bytes, so long lines must hold few of them.
MANY_VALUES_BYTES = 16 << 20
MAX_JSON_VALUES = 4_000_000

# Of a conversation the template and its pieces are held several times over: 27 bytes for each of its own.
MAX_CONVERSATION_BYTES = 16 << 20


def too_long(what: str, most: int | None = None) -> tuple[str, str]:
    """(kind, reason) of the fault of a line, row or file of more than `most` bytes (default: of a document)."""
    megabytes = (MAX_DOCUMENT_BYTES if most is None else most) >> 20
    return "too long", f"the {what} is longer than {megabytes} MB; cut its text into several documents"
