"""A reader who follows a tutorial literally, in an empty folder, gets through it."""

import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.docs.walk import environment, follow, main, saved_as

TUTORIALS = sorted(path.name for path in (ROOT / "docs" / "tutorials").glob("*.md") if path.stem != "index")
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
