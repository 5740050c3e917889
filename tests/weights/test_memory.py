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
from glassformer.weights import load, save
from glassformer.weights.formats.gguf import check
from tests.weights.tiny import edit

LIMIT = 1.15
CODE = """
import gc, json, resource, sys
import torch
import glassformer as gf
from glassformer.weights import load
folder, small, dtype = sys.argv[1:]
load(small, dtype=None if dtype == "None" else dtype)  # imports and buffers that every load needs

def resident():
    with open("/proc/self/status") as file:
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.startswith("Vm")}

gc.collect()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again from here
before = resident()["VmRSS"]
model = load(folder, dtype=None if dtype == "None" else dtype)
peak = resident()["VmHWM"] - before
final = sum(p.nbytes for p in model.parameters())
print(json.dumps({"ratio": peak / final, "final": final}))
"""


def peak(folder, small, dtype=None):
    """The peak of memory while a model is loaded, divided by its size.

    Large blocks go back to the system when they are freed, so that the peak is of what is held, not of what the
    allocator keeps for later, which differs from run to run.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", CODE, str(folder), str(small), str(dtype)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["final"] > 90e6
    return result["ratio"]


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
        save(model.half(), root / name / "half")
    return root


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's count of resident memory")
@pytest.mark.parametrize(("form", "dtype"), [("whole", None), ("shards", None), ("half", "float32")])
def test_the_peak_is_little_more_than_the_model(folders, form, dtype):
    assert peak(folders / "large" / form, folders / "small" / form, dtype) <= LIMIT


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's count of resident memory")
def test_the_peak_of_a_gguf_file(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda: False)
    for name in ("small", "large"):
        save(load(folders / name / "whole"), tmp_path / f"{name}.gguf", format="gguf", quantization="q8_0")
    assert peak(tmp_path / "large.gguf", tmp_path / "small.gguf") <= LIMIT


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


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's count of resident memory")
def test_the_peak_of_quantised_weights(folders, tmp_path):
    small, large = (float8(tmp_path / name, folders / name / "whole") for name in ("small", "large"))
    assert peak(large, small, "float32") <= LIMIT
