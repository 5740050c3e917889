"""A reader who follows a tutorial literally, in an empty folder, gets through it; the commands of guides run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.docs.walk import environment, follow, main, saved_as

TUTORIALS = sorted(path.name for path in (ROOT / "docs" / "tutorials").glob("*.md") if path.stem != "index")
GUIDES = sorted(path.name for path in (ROOT / "docs" / "guides").glob("*.md") if path.stem != "index")
SHORT = "--set loop.steps=4 --set loop.batch=2 --set loop.context=16 --set loop.eval_batches=1"
PORT = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def original():
    return AutoModelForCausalLM.from_pretrained("tiny-llama")


mine = original
if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("tiny-llama")
"""
HERE = environment(Path(sys.executable).parent, ROOT / "src")
PAGE = """
Save this as `one.py`. It is short:

```python
def one():
    return 1
```

```python
from pathlib import Path

Path("seen.txt").write_text(str(one()))
```

```sh
cat one.py seen.txt
glass train --set machine.device=cuda
false; exit 2
```

```python
print(Path("seen.txt").read_text() + 1)
```
"""


def test_blocks_are_followed_in_their_order(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    steps = list(follow(tmp_path / "page.md", tmp_path, HERE))
    assert [(step.line, step.code, step.works) for step in steps] == [
        (4, 0, True),
        (9, 0, True),
        (16, 0, True),
        (18, 2, False),
        (21, 1, False),
    ]
    assert steps[2].output == "def one():\n    return 1\n1"
    assert [saved_as(PAGE, block) for block in blocks(PAGE)] == ["one.py", None, None, None]


def test_the_exit_code_says_whether_all_worked(tmp_path, capsys):
    (tmp_path / "good.md").write_text("```sh\necho hello\n```\n")
    (tmp_path / "bad.md").write_text("```sh\nexit 3\n```\n")
    assert main([str(tmp_path / "good.md")]) == 0
    assert main([str(tmp_path / "bad.md")]) == 1
    assert "hello" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_works_as_it_is_printed(name, tmp_path):
    if name == "load_and_check.md":
        pytest.importorskip("transformers")
    places = dict.fromkeys(("XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(tmp_path / "home"))  # progress in the course
    steps = list(follow(ROOT / "docs" / "tutorials" / name, tmp_path, {**HERE, **places}))
    assert len(steps) >= 3
    for step in steps:
        assert step.works, f"{name}:{step.line}: {step.command}: {step.output[-1000:]}"


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """What the guides call the reader's own: texts, a model, a port, and the run of the first tutorial."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("desk")
    readme = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    model = next(block.text for block in readme if block.language == "python")
    for name in ("file.py", "model.py"):
        (folder / name).write_text(model)
    (folder / "port.py").write_text(PORT)
    first = (ROOT / "docs" / "tutorials" / "train_your_first_model.md").read_text(encoding="utf-8")
    held_out = next(block.text for block in blocks(first) if saved_as(first, block) == "held_out.txt")
    (folder / "held_out.txt").write_text(held_out)
    (folder / "mytext.txt").write_text(held_out * 20)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": held_out[i:]}) + "\n" for i in range(0, 400, 10)))
    tiny = SHORT.replace("steps=4", "steps=300").split()
    for words in (
        ["python", "port.py"],
        ["glass", "train", "mytext.txt", "--out", "runs/first", "--set", "model.d_model=32", *tiny],
    ):
        subprocess.run(words, cwd=folder, env=HERE, check=True, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_the_commands_of_a_guide_run(name, desk, tmp_path):
    folder = shutil.copytree(desk, tmp_path / "desk", symlinks=True)
    for step in follow(ROOT / "docs" / "guides" / name, folder, HERE, SHORT):
        if "the run is finished" in step.output:  # the run of the desk did not crash
            continue
        assert step.works, f"{name}:{step.line}: {step.command}: {step.output[-1000:]}"
