"""An oracle that imports its subject proves nothing: numpy, the standard library and the config, and no more."""

import ast
import sys
from pathlib import Path

import glassformer.reference


def test_the_oracle_imports_numpy_and_config_only() -> None:
    files = sorted(Path(glassformer.reference.__file__).parent.glob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names.append(node.module or "")
            for name in names:
                top = name.split(".")[0]
                own = name.startswith(("glassformer.reference", "glassformer.config"))
                assert own or top == "numpy" or top in sys.stdlib_module_names, f"{file.name} imports {name}"
