"""Submissions that try to leave the sandbox, in Python and in C: each is refused, and nothing outside is touched."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from glassformer.theory.exercises import Grader, find
from glassformer.theory.exercises import sandbox as module
from glassformer.theory.exercises.grading import RIGHT, WRONG

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="seccomp and Landlock are parts of Linux")
FORBIDDEN = "does what the grader forbids"


@pytest.fixture(scope="module")
def grader():
    with Grader() as held:
        yield held


def graded(grader, folder, body, **limits):
    file = folder / "my.py"
    solution = find("block-parameters").solution
    head, rest = solution.split("    attention =", 1)
    file.write_text(f"{head}    {body}\n    attention ={rest}")
    return grader.grade(find("block-parameters"), file, **limits)


def test_a_right_answer_is_right_under_all_layers(grader, tmp_path):
    found = graded(grader, tmp_path, "pass")
    assert found.result == RIGHT
    layers = {"limits", "audit"} | ({"landlock", "seccomp"} if sys.platform == "linux" else set())
    assert set(found.layers) == layers


@pytest.mark.parametrize(
    "body",
    [
        "open('NEIGHBOUR').read()",
        "import os; os.listdir('FOLDER')",
        "open('FOLDER/new.txt', 'w')",
        "open('NEIGHBOUR', 'a')",
        "import os; os.remove('NEIGHBOUR')",
        "import os; os.chmod('NEIGHBOUR', 0o777)",
        "import os; os.mkdir('FOLDER/new')",
        "import os; os.system('touch FOLDER/new.txt')",
        "import os; os.fork()",
        "import os; os.kill(os.getppid(), 9)",
        "import subprocess; subprocess.run(['ls'])",
        "import multiprocessing; multiprocessing.Pool(2)",
        "import socket; socket.create_connection(('127.0.0.1', PORT))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:PORT')",
        "import tempfile; tempfile.mkdtemp()",
        "import sys; del sys.modules['glassformer']; import glassformer.theory.exercises.counting",
        "open('PACKAGE/theory/exercises/counting.py').read()",
    ],
)
def test_python_that_leaves_the_sandbox_is_refused(grader, tmp_path, body):
    with listening() as port:
        found = attempt(grader, tmp_path, body, port)
    assert found.result == WRONG
    assert any(
        words in found.sentences[0] for words in (FORBIDDEN, "not installed", "No usable temporary directory")
    ), found.sentences


def attempt(grader, folder, body, port=0):
    """Grade a submission, and compare what lies next to it before and after."""
    neighbour = folder / "neighbour.txt"
    neighbour.write_text("the answer of another student")
    os.chmod(neighbour, 0o600)
    package = str(Path(module.__file__).parents[2])
    for name, value in {"NEIGHBOUR": neighbour, "FOLDER": folder, "PORT": port, "PACKAGE": package}.items():
        body = body.replace(name, str(value))
    found = graded(grader, folder, body)
    assert sorted(path.name for path in folder.iterdir()) == ["my.py", "neighbour.txt"]
    assert neighbour.read_text() == "the answer of another student"
    assert neighbour.stat().st_mode & 0o777 == 0o600
    assert "another student" not in found.printed
    return found


class listening:  # noqa: N801
    """A server that must not be reached."""

    def __enter__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        return self.socket.getsockname()[1]

    def __exit__(self, *error):
        with pytest.raises(BlockingIOError):
            self.socket.accept()
        self.socket.close()


THROUGH_C = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True); r = CALL; print(r, ctypes.get_errno())"


@LINUX
@pytest.mark.parametrize(
    "call",
    [
        "libc.open(b'NEIGHBOUR', 0)",
        "libc.open(b'NEIGHBOUR', 2)",
        "libc.open(b'FOLDER/new.txt', 0o101, 0o644)",
        "libc.open(b'/dev/shm/new-of-a-submission', 0o102, 0o644)",
        "libc.unlink(b'NEIGHBOUR')",
        "libc.rename(b'NEIGHBOUR', b'FOLDER/new.txt')",
        "libc.chmod(b'NEIGHBOUR', 0o777)",
        "libc.truncate(b'NEIGHBOUR', 0)",
        "libc.utimensat(-100, b'NEIGHBOUR', None, 0)",
        "libc.mkdir(b'FOLDER/new', 0o755)",
        "libc.symlink(b'NEIGHBOUR', b'FOLDER/link')",
        "libc.fork()",
        "libc.vfork()",
        "libc.syscall(435, None, 0)",
        "libc.execl(b'/bin/sh', b'sh', None)",
        "libc.kill(os.getppid(), 9)",
        "libc.kill(-1, 0)",
        "libc.socket(2, 1, 0)",
        "libc.socketpair(1, 1, 0, ctypes.create_string_buffer(8))",
        "libc.ptrace(16, os.getppid(), 0, 0)",
        "libc.open(b'/proc/%d/mem' % os.getppid(), 0)",
        "libc.memfd_create(b'x', 0)",
        "libc.unshare(0x10000000)",
        "libc.syscall(425, 4, ctypes.create_string_buffer(120))",
        "libc.fcntl(0, 8, os.getppid())",
    ],
)
def test_c_functions_are_refused_by_the_kernel(grader, tmp_path, call):
    found = attempt(grader, tmp_path, THROUGH_C.replace("CALL", call))
    result, error = found.printed.split("\n")[0].split()
    assert int(result) == -1
    assert int(error) in (1, 13, 38)  # EPERM, EACCES, ENOSYS
    assert found.result == RIGHT  # what it tried did not work, and its answers are correct


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("while True: pass", "did not finish within 1 seconds: is there an endless loop?"),
        ("import time; time.sleep(600)", "did not finish within 1 seconds"),
        (
            "import signal; signal.signal(signal.SIGXCPU, lambda *a: 0)\n    while True: pass",
            "did not finish|was killed",
        ),
        ("x = bytearray(10**11)", "needs more memory"),
        ("x = []\n    while True: x.append(bytearray(10**8))", "needs more memory"),
        ("import ctypes; ctypes.string_at(0)", "was killed"),
        ("import os; os._exit(0)", "ended the process"),
        ("raise KeyError", "raises KeyError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (2**50, 2**50))", "ValueError|OSError"),
    ],
)
def test_limits_end_what_goes_too_far(grader, tmp_path, body, words):
    found = graded(grader, tmp_path, body, seconds=5 if "bytearray" in body else 1, memory=1 << 28)
    assert found.result == WRONG
    assert any(one in found.sentences[0] for one in words.split("|")), found.sentences


@pytest.mark.parametrize(
    "body",
    [
        "import threading; t = threading.Thread(target=len, args=('a',)); t.start(); t.join()",
        "import json, random, fractions, dataclasses, itertools, collections, statistics, decimal",
        "import numpy.linalg, numpy.fft, numpy.random; numpy.random.default_rng().normal()",
        "import ctypes, hashlib, ssl, sqlite3, zlib, lzma, uuid; uuid.uuid4()",
    ],
)
def test_ordinary_python_works(grader, tmp_path, body):
    found = graded(grader, tmp_path, body)
    assert found.result == RIGHT, found.sentences


@pytest.mark.slow
def test_torch_works(grader, tmp_path):
    body = (
        "import torch; m = torch.nn.Linear(3, 3); o = torch.optim.AdamW(m.parameters()); "
        "m(torch.ones(2, 3)).sum().backward(); o.step()"
    )
    assert graded(grader, tmp_path, body).result == RIGHT


AUDITED = """
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("sandbox", sys.argv[1])
sandbox = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sandbox)
sandbox.audit(sandbox.readable([]))
refused = []
for line in json.loads(sys.argv[2]):
    try:
        exec(line)
    except PermissionError as error:
        refused.append(str(error))
print(json.dumps(refused))
"""


def test_the_audit_hook_alone_refuses_what_is_done_through_python(tmp_path):
    """The second line, and the only one on a system without seccomp and Landlock."""
    (tmp_path / "a.txt").write_text("x")
    lines = [
        f"open({str(tmp_path / 'a.txt')!r})",
        f"open({str(tmp_path / 'b.txt')!r}, 'w')",
        f"os.open({str(tmp_path / 'b.txt')!r}, os.O_CREAT | os.O_WRONLY)",
        f"os.listdir({str(tmp_path)!r})",
        f"os.remove({str(tmp_path / 'a.txt')!r})",
        f"os.rename({str(tmp_path / 'a.txt')!r}, {str(tmp_path / 'b.txt')!r})",
        f"os.chmod({str(tmp_path / 'a.txt')!r}, 0o777)",
        "os.system('true')",
        "os.fork()",
        "os.kill(os.getppid(), 0)",
        "import socket; socket.socket()",
        "import subprocess; subprocess.run(['true'])",
    ]
    allowed = ["import fractions, wave", "open(os.__file__).close()", "os.listdir(os.path.dirname(os.__file__))"]
    command = [sys.executable, "-I", "-c", AUDITED, module.__file__, json.dumps([*lines, *allowed])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    refused = json.loads(done.stdout)
    assert len(refused) == len(lines), refused
    assert all("the grader does not allow" in text for text in refused)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_the_folder_of_the_solutions_is_not_readable_and_python_is(tmp_path):
    (tmp_path / "lib" / "glassformer").mkdir(parents=True)
    (tmp_path / "lib" / "numpy").mkdir()
    (tmp_path / "lib" / "numpy.py").touch()
    found = []
    hidden = [str(tmp_path / "lib" / "glassformer"), str(tmp_path / "other")]
    module._without(str(tmp_path), hidden, found)
    assert sorted(found) == [str(tmp_path / "lib" / name) for name in ("numpy", "numpy.py")]
    paths = module.readable([str(Path(module.__file__).parents[2])])
    assert any(path in os.__file__ for path in paths)
    assert not any(str(Path(module.__file__)).startswith(path.rstrip("/") + "/") for path in paths)


def test_every_architecture_has_a_program():
    for column, number in module.MACHINES.values():
        program = module._filter(column, number)
        assert len(program) % 8 == 0
        assert 200 < len(program) // 8 < 4096
