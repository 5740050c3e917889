"""Loading never holds a model twice: the peak of resident memory in a process of its own, mapped pages included."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from glassformer.config import presets
from glassformer.model import build
from glassformer.weights import save
from glassformer.weights.formats.gguf import check
from tests.weights.tiny import edit

LIMIT = 1.15
CODE = """
import gc, json, resource, sys
import torch
from glassformer.weights import load

def resident():
    with open("/proc/self/status") as file:
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.startswith("Vm")}

for folder, small, dtype in json.loads(sys.argv[1]):
    load(small, dtype=dtype)  # imports and buffers that every load needs
    model = None
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from here
    before = resident()["VmRSS"]
    model = load(folder, dtype=dtype)
    peak = resident()["VmHWM"] - before
    final = sum(p.nbytes for p in model.parameters())
    print(json.dumps({"ratio": peak / final, "final": final}))
"""
pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's count of resident memory"
)
FORMS = {"whole": None, "shards": None, "half": "float32", "float8": "float32", "q8_0.gguf": None}
"""Forms of a model, and the dtype to which each is loaded."""


def peaks(folders):
    """The peak of memory while each form of the model is loaded, divided by its size. One process loads all forms.

    Large blocks go back to the system when they are freed, so that the peak is of what is held, not of what the
    allocator keeps for later, which differs from run to run.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    jobs = [[str(folders / "large" / form), str(folders / "small" / form), dtype] for form, dtype in FORMS.items()]
    command = [sys.executable, "-c", CODE, json.dumps(jobs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = list(map(json.loads, done.stdout.splitlines()))
    assert min(result["final"] for result in results) > 90e6
    return dict(zip(FORMS, (result["ratio"] for result in results), strict=True))


def float8(folder, source):
    folder.mkdir()
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj" in name:
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = torch.ones(*(-(-n // 128) for n in tensor.shape))
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    edit(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A Llama of 25 million parameters, a third of them in its vocabulary table, a tiny one, and forms of both."""
    root = tmp_path_factory.mktemp("memory")
    sizes = {"small": (64, 2, 64), "large": (512, 6, 16384)}
    for name, (width, layers, vocabulary) in sizes.items():
        config = presets.llama_tiny(d_model=width, n_layers=layers, n_heads=4, vocab_size=vocabulary)
        model = build(config, seed=0).eval()
        save(model, root / name / "whole")
        save(model, root / name / "shards", max_shard_bytes=1 << 24)
        float8(root / name / "float8", root / name / "whole")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check, "is_installed", lambda: False)
            save(model, root / name / "q8_0.gguf", format="gguf", quantization="q8_0")
        save(model.half(), root / name / "half")
    return root


@pytest.mark.slow
def test_the_peak_is_little_more_than_the_model(folders):
    assert {form: peak for form, peak in peaks(folders).items() if peak > LIMIT} == {}
