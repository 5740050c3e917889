import importlib.util
import re
import socket
from pathlib import Path

import pytest

from glassformer.cli import serve
from glassformer.studio import Settings
from tests.cli.asking import run
from tests.studio.serving import serving


def test_a_missing_extra_is_one_sentence(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    code, _, error = run(capsys, "serve", "--no-open")
    assert code == 2
    assert "uvicorn" in error
    assert re.search(r"pip install '\S*\[studio\]'", error)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "give a token"),
        (["--host", "0.0.0.0", "--token", "x"], "8 to 200"),
        (["--model", "/nonexistent/folder"], "'/nonexistent/folder' does not exist: give a folder"),
        (["--model", str(Path(__file__).parent)], "has none of config.json"),
        (["--adapter", "/nonexistent/adapter"], "'/nonexistent/adapter' does not exist: give a folder"),
        (["--adapter", str(Path(__file__).parent)], "is not an adapter folder: it needs adapter_config.json"),
        (["--model", "bard", "--model", "induction", "--adapter", "bard"], "needs one --model"),
        (["--model", "induction", "--adapter", "bard-chat"], "so give bard, the base that its folder names"),
        (["--port", "99999"], "between 0 and 65535"),
        (["--folder", __file__, "--port", "0"], "is a file: --folder names a folder"),
        (["--folder", f"{__file__}/below", "--port", "0"], "is a file: --folder names a folder"),
        (["--host", "no.such.host.invalid", "--token", "abcdefgh"], "cannot be used"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(capsys, arguments, words):
    code, out, error = run(capsys, "serve", *arguments)
    assert code == 2
    assert words in error
    assert len(error.strip().splitlines()) == 1
    assert out == ""


def test_a_taken_port_is_reported(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, error = run(capsys, "serve", "--port", taken.getsockname()[1])
    assert code == 2
    assert "give another port" in error


def test_the_address_carries_the_token(tmp_path):
    local = Settings(folder=tmp_path)
    assert serve.page_address(local, 80) == "http://127.0.0.1:80/"
    shared = Settings(host="0.0.0.0", token="abcdefgh", folder=tmp_path)
    assert serve.page_address(shared, 80) == "http://127.0.0.1:80/?token=abcdefgh"
    six = Settings(host="::1", folder=tmp_path)
    assert serve.page_address(six, 80) == "http://127.0.0.1:80/"


def test_it_serves_a_folder_and_ends_cleanly(tmp_path):
    from tests import folders

    folders.write(tmp_path / "mine")
    with serving(tmp_path / "studio", "--model", tmp_path / "mine") as server:
        assert [model["name"] for model in server.get("/api/state")["models"]] == [
            "bard",
            "induction",
            "bard-chat",
            "mine",
        ]
        server.stop()
        assert server.process.returncode in (0, -15)
