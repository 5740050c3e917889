"""What makes the start of a run shorter: the postponed garbage collector, the compiler imported meanwhile."""

import contextlib
import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from glassformer import training
from glassformer.config import presets
from glassformer.model import build
from glassformer.model.device import opening_gpu
from glassformer.model.transformer import allocate, init_weights
from glassformer.training import first_postponed, importing_compiler, postponed_collection


class Node:
    """An object that refers to itself: only the collector frees it."""

    def __init__(self):
        self.own = self


@pytest.fixture(autouse=True)
def _set_back():
    was, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.unfreeze()
    yield
    (gc.enable if was else gc.disable)()
    if frozen:  # by the test runner
        gc.freeze()


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_set_back_after_an_error_too(enabled):
    (gc.enable if enabled else gc.disable)()
    with contextlib.suppress(KeyError), postponed_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() is enabled


def test_objects_are_old_afterwards_and_a_full_collection_frees_them():
    gc.enable()
    with postponed_collection():
        node = weakref.ref(Node())
    assert gc.get_freeze_count() == 0
    gc.collect(1)
    assert node() is not None  # not looked at
    gc.collect()
    assert node() is None


def test_what_a_process_froze_stays_frozen():
    frozen = [[] for _ in range(1000)]
    gc.freeze()
    try:
        with postponed_collection():
            pass
        assert gc.get_freeze_count() >= len(frozen)  # other objects may have been deleted meanwhile
    finally:
        gc.unfreeze()


def test_only_the_first_call_is_postponed():
    gc.enable()
    call = first_postponed(lambda x: (gc.isenabled(), x))
    assert [call(1), call(2)] == [(False, 1), (True, 2)]


def test_training_is_imported_with_the_collector_off():
    script = (
        "import gc, sys\n"
        "import glassformer.training\n"
        "assert 'torch' not in sys.modules\n"
        "passes = []\n"
        "gc.callbacks.append(lambda phase, info: passes.append(phase))\n"
        "from glassformer.training import train\n"
        "assert 'torch' in sys.modules and not passes and gc.isenabled()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_compiler_is_imported_while_the_block_runs():
    script = (
        "import gc, sys, threading, torch\n"
        "from glassformer.training import importing_compiler\n"
        "with importing_compiler():\n"
        "    assert not gc.isenabled()\n"
        "    torch.empty(10).normal_()\n"
        "assert 'torch._inductor.compile_fx' in sys.modules\n"
        "assert gc.isenabled() and threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_error_of_the_import_is_raised_at_the_end_of_the_block(monkeypatch):
    monkeypatch.setattr(training, "COMPILER", "torch._no_such_compiler")
    done = []
    with pytest.raises(ModuleNotFoundError, match="_no_such_compiler"), importing_compiler():
        done.append(1)
    assert done
    with pytest.raises(KeyError), importing_compiler():  # the error of the block is not replaced
        raise KeyError


@pytest.mark.sample(1)
@pytest.mark.parametrize("compile", ["auto", "no"])
def test_a_run_that_does_not_compile_does_not_import_the_compiler(compile, tmp_path):
    """AdamW and Muon with averaged weights, through checkpoints, a resumption and both ways to start a run."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 100)
    script = f"""
import sys
import glassformer as gf
from glassformer.cli import main
machine = {{'device': 'cpu', 'compile': {compile!r}}}
loop = {{'steps': 3, 'batch': 2, 'context': 8, 'checkpoint_every': 1, 'eval_every': 2, 'eval_batches': 1, 'keep': 9}}
optim = {{'ema': 0.9, 'clip': 0.1}}
folder = {str(tmp_path)!r}
gf.train({str(text)!r}, model={{'preset': 'nano'}}, loop=loop, optim=optim, machine=machine, out=folder + '/adamw')
changes = ('data.corpus="' + {str(text)!r} + '"', 'machine.device=cpu', 'machine.compile={compile}')
changes += ('model.preset=nano', 'loop.steps=3', 'loop.batch=2', 'loop.context=8', 'loop.checkpoint_every=2')
changes += ('loop.eval_batches=1', 'optim.kind=muon', 'optim.muon_lr=0.03', 'optim.beta2=0.99', 'optim.ema=0.9')
words = [word for change in changes for word in ('--set', change)]
assert main(['train', *words, '--out', folder + '/muon']) == 0
assert main(['train', '--resume', folder + '/muon', '--set', 'loop.steps=4']) == 0
heavy = ('torch._dynamo', 'torch._inductor', 'torch.distributed.fsdp', 'torch.distributed.tensor', 'sympy')
found = [name for name in heavy if name in sys.modules]
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_first_step_imports_what_it_needs_only(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 100)
    script = f"""
import sys
from glassformer.training import open_session, read_run, train
changes = ('data.corpus="{text}"', 'machine.device=cpu', 'loop.batch=2', 'loop.context=8', 'out="{tmp_path}/run"')
class Done(Exception): pass
def listen(event):
    if event['event'] == 'step':
        raise Done
session = open_session(read_run('', changes))
try:
    train(session.run, session.data, listen)
except Done:
    heavy = ('torch._dynamo', 'torch._inductor', 'torch.distributed.fsdp', 'torch.distributed.tensor', 'sympy')
    heavy += ('glassformer.weights.families', 'glassformer.generation', 'glassformer.lens', 'jinja2')
    print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["[]"], done.stderr


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_machine_without_a_gpu_opens_none(cuda, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("ctypes.CDLL", lambda name: 1 / 0)
    with opening_gpu():
        pass


def test_other_work_is_done_while_weights_are_drawn():
    config = presets.nano(d_model=1024, n_layers=1, vocab_size=2048)  # some matrices are drawn in parts
    model, seen = allocate(config, "cpu"), []
    init_weights(model, 3, lambda: seen.append(threading.current_thread()))
    assert seen == [threading.main_thread()]
    for name, wanted in build(config, seed=3).named_parameters():
        assert torch.equal(model.get_parameter(name), wanted), name
