"""The commands of docs/chat.md, executed as a shell would."""

import os
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT, blocks


@pytest.mark.slow
def test_the_commands_of_the_page_work(tmp_path):
    text = (ROOT / "docs" / "chat.md").read_text(encoding="utf-8")
    shell = [block.text for block in blocks(text) if block.language == "sh" and "DIR" not in block.text]
    assert len(shell) == 4
    glass = tmp_path / "bin" / "glass"
    glass.parent.mkdir()
    glass.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m glassformer "$@"\n')
    glass.chmod(0o755)
    environment = os.environ | {"PATH": f"{glass.parent}:{os.environ['PATH']}"}
    command = ["sh", "-e", "-c", "\n".join(shell)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert '"user": "ROMEO:"' in done.stdout
    assert "⟦" in done.stdout
    assert (tmp_path / "pets" / "best" / "chat_template.jinja").exists()
    assert done.stdout.rstrip().endswith("milk.")
