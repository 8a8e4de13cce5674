"""A server on this machine that speaks S3, with buckets for tests."""

import logging
from contextlib import contextmanager

import pyarrow.fs
import pytest

KEY, SECRET, REGION = "a-key", "a-secret", "us-east-1"


class Bucket:
    """A new bucket. uri : of a folder in it, with everything that a process needs to open it"""

    def __init__(self, server, name):
        self.name = name
        self.uri = f"s3://{KEY}:{SECRET}@{name}/runs/a?scheme=http&endpoint_override={server}&region={REGION}"
        self._s3 = pyarrow.fs.S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            endpoint_override=server,
            scheme="http",
            region=REGION,
            allow_bucket_creation=True,
        )
        self._s3.create_dir(name)

    def names(self):
        actual = self._s3.get_file_info(pyarrow.fs.FileSelector(f"{self.name}/runs/a"))
        return sorted(info.base_name for info in actual)

    def read(self, name):
        with self._s3.open_input_file(f"{self.name}/runs/a/{name}") as file:
            return file.read()

    def write(self, name, data):
        with self._s3.open_output_stream(f"{self.name}/runs/a/{name}") as file:
            file.write(data)


@contextmanager
def serving():
    """Run a server; yield a function that creates a bucket of a name. Skip the test without its library."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed", exc_type=ImportError)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield lambda name: Bucket(f"{host}:{port}", name)
    finally:
        server.stop()
