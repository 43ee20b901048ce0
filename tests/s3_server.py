"""An S3 server in this process: moto's, with a hand on what it sends."""

import threading
from contextlib import contextmanager, suppress

import pytest


class S3Server:
    """url: where it listens. requests: (method, path, Range header) of each request so far.

    While `stalls` is set, the content of an object comes to its half; `stalled` tells that it has. `go_on` lets the rest
    come, unless `cuts` is set: then the connection ends there.
    """

    def __init__(self, app):
        self.app = app
        self.url = ""
        self.requests = []
        self.buckets = set()
        self.stalls = threading.Event()
        self.stalled = threading.Event()
        self.go_on = threading.Event()
        self.cuts = threading.Event()

    def __call__(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path, environ.get("HTTP_RANGE")))
        body = self.app(environ, start_response)
        is_object = method == "GET" and path.count("/") >= 2 and not path.endswith("/")
        if not (is_object and self.stalls.is_set()):
            return body
        return self._half_by_half(b"".join(body))

    def _half_by_half(self, content):
        half = len(content) // 2
        yield content[:half]
        self.stalled.set()
        self.go_on.wait(60)
        if not self.cuts.is_set():
            yield content[half:]

    def put(self, key, content):
        """Store an object under `bucket/name`; the bucket is made as well, and everybody may read."""
        import fsspec

        system = fsspec.filesystem("s3")
        bucket = key.partition("/")[0]
        if bucket not in self.buckets:
            # moto keeps the buckets of a server before this one.
            with suppress(FileExistsError):
                system.mkdir(bucket)
            self.buckets.add(bucket)
        system.pipe_file(key, content, ACL="public-read")
        return f"s3://{key}"

    def contents_asked_for(self):
        """The (path, Range header) of each request for an object."""
        return [(path, span) for method, path, span in self.requests if method == "GET" and path.count("/") >= 2]


@contextmanager
def running_s3_server():
    """An S3Server, and the environment in which clients find it."""
    moto = pytest.importorskip("moto.server")
    serving = pytest.importorskip("werkzeug.serving")
    pytest.importorskip("s3fs")
    import fsspec

    server = S3Server(moto.DomainDispatcherApplication(moto.create_backend_app))
    http = serving.make_server("127.0.0.1", 0, server, threaded=True, request_handler=_quiet(serving))
    server.url = f"http://127.0.0.1:{http.port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    environment = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        # A client remembers the server that it was made for.
        fsspec.filesystem("s3").clear_instance_cache()
        yield server
        server.go_on.set()
        http.shutdown()
        fsspec.filesystem("s3").clear_instance_cache()


def _quiet(serving):
    class Handler(serving.WSGIRequestHandler):
        def log(self, *_):
            """Nothing."""

    return Handler
