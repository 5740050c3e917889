"""The rules of the house, as tests. docs/architecture.md says why."""

import ast
import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import glassformer as gf

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "glassformer"
FILES = sorted(SOURCE.rglob("*.py"))

# A room may import rooms of lower tiers, never a neighbour of its own tier. Root modules are rooms too.
TIERS: list[set[str]] = [
    {"shapes", "files", "errors", "pages"},
    {"config", "finding"},
    {"model", "reference", "sizing", "pretrained"},
    {"kernels"},
    {"lens", "generation", "weights"},
    {"chat"},
    {"training", "anatomy", "evaluation"},
    {"doctor"},
    {"theory", "bench"},
    {"tour"},
    {"studio", "pytest_plugin"},
    {"cli"},
    {"__init__", "__main__"},
]
TIER = {room: tier for tier, rooms in enumerate(TIERS) for room in rooms}

LONG_FILES: dict[str, str] = {}
"""Files over 400 lines, each with its reason."""
LONG_FUNCTIONS = {}
"""Functions over 60 lines, each with its reason."""

# Modules without a test file of their own name, and where they are tested instead.
TESTED_ELSEWHERE = {
    "__main__": "tests/cli/test_common.py runs it",
    "evaluation/__main__": "tests/evaluation/test_harness.py runs it",
    "py.typed": "no code",
    "chat/errors": "no code",
    "weights/not_supported": "tests/weights/test_families.py",
}
COMMANDS = ("bench/gpu/", "bench/developer/")
"""Benchmarks are commands for a person; those with logic of their own have tests."""
TABLES = ("weights/hf/", "weights/encoders/", "weights/seq2seq/")
"""Declarative tables of model families, compared with transformers by test_decoders.py, test_encoders.py and
test_seq2seq.py in tests/weights."""


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@dataclasses.dataclass
class Outline:
    """What several tests ask about a module. Parsing all modules takes seconds, so it happens once."""

    has_docstring: bool
    imports: set[str] = dataclasses.field(default_factory=set)
    """Absolute names of everything it imports, at any depth."""
    functions: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    """Names and numbers of lines."""


@functools.cache
def outline(path: Path) -> Outline:
    tree = ast.parse(path.read_text())
    found = Outline(bool(ast.get_docstring(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.imports |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.functions.append((node.name, node.end_lineno - node.lineno + 1))
    return found


def imports_of(path: Path) -> set[str]:
    return outline(path).imports


def own_imports(path: Path) -> set[str]:
    """Rooms of this package that a module imports."""
    rooms = set()
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "glassformer" and len(parts) > 1 and parts[1] in TIER:
            rooms.add(parts[1])
    return rooms


def test_every_room_has_a_tier():
    assert {room_of(path) for path in FILES} <= TIER.keys()


def test_imports_point_down():
    pairs = [(path, room_of(path), other) for path in FILES for other in own_imports(path) - {room_of(path)}]
    assert len(pairs) > len(FILES) / 2
    for path, room, other in pairs:
        assert TIER[other] < TIER[room], f"{path.relative_to(ROOT)} imports {other}, which is not below {room}"


def test_the_oracle_shares_nothing_with_the_engine():
    for path in FILES:
        if room_of(path) == "reference":
            outside = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names)
            assert outside <= {"numpy", "glassformer"}, path
            assert own_imports(path) <= {"reference", "config"}, path


@pytest.mark.parametrize("room", ["config", "sizing", "finding", "pages"])
def test_rooms_without_torch(room):
    for path in FILES:
        if room_of(path) == room:
            assert not any(name.split(".")[0] in ("torch", "numpy") for name in imports_of(path)), path


def test_transformers_is_never_imported_and_nothing_is_unpickled():
    for path in FILES:
        names = imports_of(path)
        if path.relative_to(SOURCE).as_posix().startswith(("bench/developer/", "bench/gpu/")):
            continue  # benchmarks against other releases import them, as a person's script would
        assert not any(n.split(".")[0] in ("transformers", "pickle", "dill", "cloudpickle") for n in names), path
        assert "torch.load" not in names, path
        text = path.read_text()
        assert "add_safe_globals" not in text, path
        if "torch.load" not in text:
            continue
        code = list(ast.walk(ast.parse(text)))  # a message may name the function
        loads = [n for n in code if isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.load"]
        calls = [n for n in code if isinstance(n, ast.Call) and n.func in loads]
        # the checkpoint of nanoGPT is a pickle: it is opened in one place, where only tensors and plain values are read
        assert not loads or path.relative_to(SOURCE).as_posix() == "weights/formats/nanogpt.py", path
        assert len(loads) == len(calls), path
        assert all("weights_only=True" in ast.unparse(call) for call in calls), path


def test_distributed_lives_in_one_folder():
    for path in FILES:
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(("training/distributed/", "bench/developer/")):
            assert "torch.distributed" not in path.read_text(), path


def test_only_the_command_line_imports_the_studio():
    for path in FILES:
        if room_of(path) not in ("studio", "cli"):
            assert "studio" not in own_imports(path), path


def test_files_and_functions_stay_short_and_every_module_has_a_docstring():
    for path in FILES:
        name, found = path.relative_to(SOURCE).as_posix(), outline(path)
        assert len(path.read_text().splitlines()) <= 400 or name in LONG_FILES, name
        assert found.has_docstring, name
        for function, lines in found.functions:
            assert lines <= 60 or f"{name}:{function}" in LONG_FUNCTIONS, f"{name}:{function}"


def test_tests_mirror_the_source():
    for path in FILES:
        relative = path.relative_to(SOURCE)
        name = relative.with_suffix("").as_posix()
        if relative.stem == "__init__" or name in TESTED_ELSEWHERE or name.startswith((*COMMANDS, *TABLES)):
            continue
        assert (ROOT / "tests" / relative.parent / f"test_{relative.stem}.py").exists(), f"no test file for {relative}"


def loaded_after(code: str) -> set[str]:
    run = [sys.executable, "-c", f"{code}; import sys; print(' '.join(sys.modules))"]
    return set(subprocess.run(run, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "code", ["import glassformer", "import glassformer.sizing", "import glassformer as g; g.presets.gpt2()"]
)
def test_light_imports_stay_light(code):
    assert not loaded_after(code) & {"torch", "numpy", "tyro", "rich", "matplotlib", "sympy", "jinja2"}


def test_a_gpu_machine_without_optional_packages_imports_decodes_and_trains_without_the_compiler_of_torch(tmp_path):
    """The compiler takes as long to import as torch, which imports it for some operations on the meta device."""
    pytest.importorskip("glassformer.kernels")
    gf.save(gf.build(gf.presets.gpt2(n_layers=1, d_model=24, vocab_size=31), seed=0), tmp_path / "model")
    code = f"""
import sys
for name in ("jaxtyping", "tyro", "rich", "matplotlib", "platformdirs", "sympy.physics"):
    sys.modules[name] = None
def report(what):
    heavy = ("torch._dynamo", "torch._inductor", "sympy", "transformers")
    print(what, *(name for name in heavy if name in sys.modules))
import glassformer as gf
print(len(gf.generate(gf.load({str(tmp_path / "model")!r}), [[1, 2]], 3, engine="torch")[0]))
report("sample")
import torch
from glassformer.anatomy.record import record
record(lambda: torch.ones(2) + 1, [], None)
report("record")
import glassformer.kernels.decode
assert glassformer.kernels.decode.DECODE_KERNELS
report("kernels")
del sys.modules["rich"]  # which training needs, also there
import glassformer.training.loop
report("training")
import glassformer.bench.__main__, glassformer.bench.run
report("bench")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["5", "sample", "record", "kernels", "training", "bench"], done.stderr


def test_help_does_not_import_torch():
    code = """
import sys
from glassformer.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
print(" ".join(sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "tour" in done.stdout
    assert not set(done.stderr.split()) & {"torch", "numpy", "safetensors", "tokenizers", "jinja2"}


def test_public_names_all_resolve():
    import glassformer as gf

    for name in gf.__all__:
        assert getattr(gf, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        gf.nonsense  # noqa: B018


REQUIRED = ("__pycache__", "__init__.py", "__main__.py", "py.typed")
"""Names that Python and type checkers require; they are not counted."""


def entries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name not in REQUIRED]


LISTS = ("theory/claims/", "studio/static")
"""Folders that are lists of one kind of file: the claims of a chapter, the assets of the page."""


def test_the_root_and_the_folders_stay_small():
    """At most 8 files in the root of the package, and at most 25 entries in a folder."""
    files = [path.name for path in SOURCE.iterdir() if path.is_file()]
    assert len(files) <= 8, files
    for folder in [SOURCE, *(path for path in SOURCE.rglob("*") if path.is_dir() and path.name != "__pycache__")]:
        name, held = folder.relative_to(SOURCE).as_posix(), entries(folder)
        assert len(held) <= 25 or name.startswith(LISTS), f"{name} has {len(held)} entries: {sorted(held)}"


CLASS_ASSIGNMENTS = ("kernels", "theory")
"""Rooms that may assign `__class__`: kernels install themselves into a model, and claims break one on purpose."""


def test_classes_are_reassigned_in_kernels_and_theory_only():
    for path in FILES:
        text = path.read_text()
        if room_of(path) in CLASS_ASSIGNMENTS or "__class__" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found = any(isinstance(target, ast.Attribute) and target.attr == "__class__" for target in targets)
            assert not found, f"{path.relative_to(ROOT)}:{node.lineno} assigns __class__"


def test_no_absolute_paths_or_hosts_in_what_is_committed():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    for name in listed or [str(p.relative_to(ROOT)) for p in FILES]:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", "") and path.is_file() and path != Path(__file__):
            text = path.read_text(encoding="utf-8", errors="replace")
            for word in ("/root/", "/home/", "pypi.org", "pythonhosted", f"{os.sep}work{os.sep}"):
                assert word not in text, f"{name} mentions {word}"
