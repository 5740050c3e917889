"""Saves that are killed, or that run out of disk space, at every step of the way. Run as a script in its own process.

    python -m tests.weights.crash FOLDER {save,convert,renames}:{kill,full,COUNT}...

It imports torch once and forks a child for each crash. Python reports each file operation to an audit hook, which
kills the child or raises "No space left on device" at the n-th of them, for n = 1, 2, … until a save survives. With
a COUNT the child is killed that many times after a random time instead. After each crash the target must be, byte for
byte, the complete old folder or the complete new one. Prints how often the target was which, one line for each.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from glassformer.cli import main as glass
from glassformer.config import presets
from glassformer.model import build
from glassformer.weights import WeightsError, save, swap

SIZE = {"d_model": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 31, "max_len": 16}
FILE_EVENTS = ("open", "os.", "shutil.", "tempfile.", "ctypes.dlsym")
WRITE_EVENTS = ("os.rename", "os.mkdir", "os.chmod", "tempfile.mkdtemp", "shutil.copyfile")
EXCHANGE = swap._exchange
SURVIVED, REFUSED, BROKEN, NOT_REACHED = 0, 2, 3, 4
left = 0
"""File operations before the crash."""


def snapshot(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def writes(event, arguments):
    if event != "open":
        return event in WRITE_EVENTS
    _, mode, flags = arguments
    return any(letter in (mode or "") for letter in "wxa+") or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))


def fail_at(number, how):
    """Kill this process, or raise, at the n-th file operation from now on."""

    def hook(event, arguments):
        global left
        if not event.startswith(FILE_EVENTS) or (how == "full" and not writes(event, arguments)):
            return
        left -= 1
        if left == 0 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if left == 0:
            raise OSError(28, "No space left on device")

    global left
    left = number
    sys.addaudithook(hook)


class Scene:
    """An old model at the target, and a way to replace it with a new one."""

    def __init__(self, root, action):
        self.root, self.action = root, action
        self.source, self.target, self.spare = root / "source", root / "new" / "target", root / "spare"
        self.model = build(presets.llama_tiny(**SIZE), seed=2)
        save(build(presets.gpt2(**SIZE), seed=1), self.spare, format="hf")
        (self.spare / "generation_config.json").write_text('{"eos_token_id": 3}')
        (self.spare / "vocab.json").write_text("{}")
        save(self.model, self.source, format="glass")
        self.restore()
        self.replace()
        self.old, self.new = snapshot(self.spare), snapshot(self.target)
        assert set(self.new) == {"model.safetensors", "config.json" if self.action == "convert" else "model.toml"}

    def restore(self):
        shutil.rmtree(self.target.parent, ignore_errors=True)
        shutil.copytree(self.spare, self.target)

    def replace(self):
        """Replace the old model; returns the exit code, after checking that a refusal is one sentence."""
        swap._exchange = EXCHANGE if self.action != "renames" else lambda a, b: False
        if self.action == "convert":
            result = io.StringIO()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(result):
                code = glass(["convert", str(self.source), str(self.target), "--to", "hf", "--force"])
            one = result.getvalue().count("\n") == 1 and "No space left" in result.getvalue()
            return code if code == 0 or one else BROKEN
        try:
            save(self.model, self.target, format="glass", overwrite=True)
        except WeightsError as error:
            return REFUSED if "No space left" in str(error) else BROKEN
        return SURVIVED

    def crash(self, before, seconds=None):
        """Replace the model in a child that `before` has prepared; returns how the child ended."""
        if (child := os.fork()) == 0:
            code = BROKEN
            try:
                before()
                code = self.replace()
                code = NOT_REACHED if left > 0 else code
            finally:
                os._exit(code)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def state(self):
        """What is at the target: old, new, or missing; anything else is an error."""
        if not self.target.exists():
            return "missing"
        found = snapshot(self.target)
        assert found in (self.old, self.new), f"a mixture: {sorted(found)}"
        return "old" if found == self.old else "new"


def every_step(scene, how):
    ended = Counter()
    for number in range(1, 1000):
        scene.restore()
        code = scene.crash(lambda n=number: fail_at(n, how))
        state, leftovers = scene.state(), len(list(scene.target.parent.iterdir())) > 1
        if code == NOT_REACHED:
            assert (state, leftovers) == ("new", False)
            return ended
        ended[state] += 1
        ended["leftovers"] += leftovers
        if how == "full":
            assert (code, state, leftovers) in ((REFUSED, "old", False), (SURVIVED, "new", leftovers)), (number, code)
            continue
        assert code == -signal.SIGKILL, code
        if state == "missing":
            assert scene.action == "renames"
            with contextlib.suppress(WeightsError):  # the next attempt finds the old model again
                save(scene.model, scene.target, format="glass")
            assert scene.state() == "old"
        assert scene.replace() == SURVIVED  # a leftover never blocks the next attempt, which removes it
        assert [item.name for item in scene.target.parent.iterdir()] == ["target"]
    raise AssertionError("no save survived")


def random_moments(scene, count):
    began = time.monotonic()
    assert scene.crash(lambda: None) == SURVIVED
    longest, draw, ended = time.monotonic() - began, random.Random(0), Counter()
    for _ in range(count):
        scene.restore()
        scene.crash(lambda: None, seconds=draw.uniform(0, longest))
        ended[scene.state()] += 1
        ended["leftovers"] += len(list(scene.target.parent.iterdir())) > 1
    return ended


def main(folder, *orders):
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # matters in a power cut, not to a killed process, and waits for the disk
    for order in orders:
        action, how = order.split(":")
        scene = Scene(Path(folder) / order.replace(":", "-"), action)
        ended = random_moments(scene, int(how)) if how.isdigit() else every_step(scene, how)
        print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
