"""What counts as a block and as a command."""

import pytest

from tests.docs.blocks import blocks, commands

TEXT = """Say `glass env` or `glass size gpt2 --batch 8`.

```sh
glass train run.toml \\
    --set a=1   # a comment
make tour
```

    glass bench decode

```text
glass nonsense `glass nonsense too`
```
"""


def test_blocks_have_a_language_and_a_line():
    assert [(block.language, block.line) for block in blocks(TEXT)] == [("sh", 3), ("text", 11)]
    assert blocks(TEXT)[1].text == "glass nonsense `glass nonsense too`\n"
    with pytest.raises(AssertionError, match="line 1 has no end"):
        blocks("```sh\nglass env\n")


def test_commands_are_those_of_shell_blocks_indented_lines_and_prose():
    assert [(command.words, command.line) for command in commands(TEXT)] == [
        (("train", "run.toml", "--set", "a=1"), 4),
        (("env",), 1),
        (("size", "gpt2", "--batch", "8"), 1),
        (("bench", "decode"), 9),
    ]
