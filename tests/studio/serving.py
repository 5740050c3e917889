"""Asking a studio: in this process, or a server of its own on a free port."""

import contextlib
import json
import os
import re
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from safetensors.numpy import load

from glassformer.studio.encoding import MEDIA_TYPE


def decode(data):
    """(arrays by name, meta) of a tensor response; uint8 arrays as the values they stand for."""
    (length,) = struct.unpack("<Q", data[:8])
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    arrays, ranges = load(data), json.loads(metadata["ranges"])
    for name, array in arrays.items():
        if array.dtype == np.uint8:
            low, high = ranges[name]
            arrays[name] = low + (high - low) * array.astype(np.float64) / 255
    return arrays, json.loads(metadata["meta"])


class Asker:
    """POSTs to the views of an application in this process."""

    def __init__(self, client):
        self.client = client

    def __call__(self, path, **body):
        """The JSON of an answer that must be a success."""
        reply = self.client.post(f"/api/{path}", json=body)
        assert reply.status_code == 200, (path, reply.status_code, reply.text[:300])
        return reply.json()

    def tensors(self, path, **body):
        reply = self.client.post(f"/api/{path}", json=body, headers={"accept": MEDIA_TYPE})
        assert reply.status_code == 200, (path, reply.status_code, reply.text[:300])
        assert reply.headers["content-type"] == MEDIA_TYPE
        return decode(reply.content)

    def events(self, path, **body):
        reply = self.client.post(f"/api/{path}", json=body)
        assert reply.status_code == 200, (path, reply.status_code, reply.text[:300])
        assert reply.headers["content-type"].startswith("text/event-stream")
        return parse_events(reply.text)

    def refused(self, path, **body):
        """(status, sentence) of an answer that must be a refusal."""
        reply = self.client.post(f"/api/{path}", json=body)
        assert 400 <= reply.status_code < 500, (path, reply.status_code, reply.text[:300])
        return reply.status_code, reply.json()["error"]


def parse_events(text):
    """(name, data) of each event, comments left out."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if "data" in fields:
            data = fields["data"]
            found.append((fields.get("event"), json.loads(data) if data != "[DONE]" else data))
    return found


class Server:
    """`glass serve` as a process of its own."""

    def __init__(self, folder, *arguments, env=None):
        command = [sys.executable, "-m", "glassformer", "serve", "--port", "0", "--folder", str(folder), "--no-open"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), **(env or {})}
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
        )
        line = self.process.stdout.readline()
        found = re.search(r"http://[^/]+", line)
        assert found, (line, self.process.stderr.read() if self.process.poll() is not None else "")
        self.address = found[0]

    def get(self, path, timeout=30):
        with urllib.request.urlopen(self.address + path, timeout=timeout) as reply:
            return json.loads(reply.read())

    def post(self, path, body, timeout=60):
        """(status, JSON)."""
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def wait_for_torch(self, seconds=60):
        assert self.post("/api/warm", {})[0] == 200
        wait_until(lambda: self.get("/api/state")["torch"] == "ready", seconds)

    def kill(self):
        self.process.kill()
        self._end()

    def stop(self):
        self.process.terminate()
        self._end()

    def _end(self):
        self.process.wait(30)
        self.process.stdout.close()
        self.process.stderr.close()


@contextlib.contextmanager
def serving(folder, *arguments, **more):
    server = Server(folder, *arguments, **more)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def wait_until(condition, seconds=30.0, step=0.05):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "this did not come about in time"
        time.sleep(step)
    return found
