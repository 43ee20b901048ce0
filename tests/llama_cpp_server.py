"""llama.cpp's own server with an exported GGUF file, from the package xllamacpp, which brings it compiled."""

import contextlib
import http.client
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

# A process of its own, which knows nothing of this repository: it prints its address, and ends with its standard input.
# Port 0 is any free one. Caches of keys and values in float32: by default they are in float16.
SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.port = params.verbosity = 0
params.n_ctx = 4096
params.n_parallel = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def llama_cpp(path):
    """Within the block: ask(route, **request) -> the answer of a server with this file. Skips the test where there is no xllamacpp."""
    if find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed: pip install -r requirements-dev.txt")
    command = [sys.executable, "-c", SERVER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().strip().removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=60)

        def ask(route, **request):
            connection.request("POST", route, json.dumps(request), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = json.loads(answer.read())
            assert answer.status == 200, content
            return content

        yield ask
        process.stdin.close()
