"""Run llama.cpp on a GGUF file, in a process of its own, and compare it with our model.

llama.cpp ends its process when a file is not as it expects, so it must not run in ours. This file, run as a script, is
that process. It imports nothing of this package, because that would take longer than the rest. It reads a JSON object
from standard input and writes one to standard output.
"""

import base64
import ctypes
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

WARN, ERROR = 3, 4
"""Levels of messages in llama.cpp."""
SECONDS = 600
"""Time that llama.cpp has to load a file and compute a few dozen tokens."""


def is_installed() -> bool:
    """Return True if llama-cpp-python is installed."""
    return find_spec("llama_cpp") is not None


def run_llama(file: Path, tokens: list[int], new: int, texts: list[str]) -> dict[str, Any]:
    """Return what llama.cpp computes: `logits` (T,V) of the tokens, `new` greedy tokens after them, `ids` of texts.

    Without a result there is a key `error` with the reason.
    """
    request = {"file": str(file), "tokens": tokens, "new": new, "texts": texts}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            timeout=SECONDS,
            check=False,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"it did not finish within {SECONDS} seconds"}
    except ValueError:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [f"exit code {done.returncode}"]
        return {"error": last[0].strip()}
    data = np.frombuffer(bytearray(base64.b64decode(answer["logits"])), np.float32)
    return answer | {"logits": data.reshape(len(tokens), -1)}


class _Llama:
    """A model in llama.cpp, through the functions of its C interface."""

    def __init__(self, file: str, length: int):
        import llama_cpp

        self.c = llama_cpp
        quiet = llama_cpp.llama_log_callback(lambda level, text, data: self._log(level, text))
        self._quiet = quiet  # llama.cpp keeps the pointer
        self.messages: list[str] = []
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), parameters)
        if not self.model:
            raise SystemExit(self.messages[-1] if self.messages else "llama.cpp cannot load the file")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = max(length, 32)
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32  # the default cache rounds to float16
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.n_threads = options.n_threads_batch = 1
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise SystemExit(self.messages[-1] if self.messages else "llama.cpp cannot use the file")
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)

    def _log(self, level: int, text: bytes) -> None:
        if level in (WARN, ERROR):
            self.messages.append(text.decode("utf-8", "replace").strip())

    def decode(self, tokens: list[int], position: int) -> np.ndarray:
        """Return the logits (T,V) of new tokens, the first of which has this position."""
        batch = self.c.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position + i, 1, 1
            batch.seq_id[i][0] = 0
        if code := self.c.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode returned {code}")
        rows = [
            np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, i), (self.size,)).copy()
            for i in range(len(tokens))
        ]
        self.c.llama_batch_free(batch)
        return np.stack(rows)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the tokens in front of it and behind it, special tokens parsed."""
        data = text.encode()
        buffer = (self.c.llama_token * (len(data) + 8))()
        count = self.c.llama_tokenize(self.vocabulary, data, len(data), buffer, len(buffer), True, True)
        return list(buffer[: max(count, 0)])


def main() -> None:
    request = json.load(sys.stdin)
    tokens, new = request["tokens"], request["new"]
    llama = _Llama(request["file"], len(tokens) + new + 1)
    ids = [llama.encode(text) for text in request["texts"]]
    logits = llama.decode(tokens, 0)
    last, greedy = logits[-1], []
    for i in range(new):
        greedy.append(int(last.argmax()))
        last = llama.decode(greedy[-1:], len(tokens) + i)[0]
    encoded = base64.b64encode(logits.astype(np.float32).tobytes()).decode()
    print(json.dumps({"logits": encoded, "greedy": greedy, "ids": ids}))


if __name__ == "__main__":
    main()
