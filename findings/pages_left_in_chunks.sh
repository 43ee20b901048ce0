#!/usr/bin/env bash
# warcio 1.8.1 (and zstandard 0.25.0 to write a page), content_stream() of a response
# One would guess: it undoes Transfer-Encoding and Content-Encoding, as its page says, or raises where it cannot.
# What happens: it knows the transfer coding only if it is spelled "chunked", and of content codings only one of gzip, deflate and br. "Chunked" (HTTP
# does not tell these apart), x-gzip (HTTP: the same as gzip), two codings in a row and zstd pass through as they came, and of a body that is
# several gzip members (HTTP allows it) the first one is all there is. No error, no warning.
# In a run: lengths of chunks as lines of their own in the middle of sentences, pages that break off, or compressed bytes that a tolerant decoder turns
# into a document. Which pages are hit depends on the server, so a look at some of them from one site shows nothing.
# Instead: record.raw_stream, and undo both headers oneself, in lower case; drop what still has a coding that one does not know.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile warcio==1.8.1 zstandard==0.25.0
env/bin/python - <<'END'
import gzip
import importlib.metadata
import io

import zstandard
from warcio.archiveiterator import ArchiveIterator
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

def pack(data):
    return gzip.compress(data, mtime=0)


page = b"<p>Once upon a time there was a fox.</p>"
chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (page[:20], page[20:], b""))
members = pack(page[:20]) + pack(page[20:])


def read(body, header, value):
    """The page as content_stream() gives it back from a WARC file with this response."""
    file = io.BytesIO()
    writer = WARCWriter(file, gzip=True)
    headers = StatusAndHeaders("200 OK", [("Content-Type", "text/html"), (header, value)], protocol="HTTP/1.1")
    writer.write_record(writer.create_warc_record("http://a.test/", "response", io.BytesIO(body), http_headers=headers))
    file.seek(0)
    got = b"".join(record.content_stream().read() for record in ArchiveIterator(file))
    print(f"{header}: {value}: {got[:60]}")
    return got


print("warcio", importlib.metadata.version("warcio"))
assert read(chunks, "Transfer-Encoding", "chunked") == page
assert read(chunks, "Transfer-Encoding", "Chunked") == chunks
assert read(pack(page), "Content-Encoding", "gzip") == page
assert read(pack(page), "Content-Encoding", "GZIP") == page
assert read(pack(page), "Content-Encoding", "x-gzip") == pack(page)
assert read(members, "Content-Encoding", "gzip") == page[:20] and gzip.decompress(members) == page
twice = pack(pack(page))
assert read(twice, "Content-Encoding", "gzip, gzip") == twice
zstd = zstandard.compress(page)
assert read(zstd, "Content-Encoding", "zstd") == zstd
END
