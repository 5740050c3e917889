"""The memory estimate of a run against the steps and evaluations that training really does; the vocabulary."""

import pytest
import torch
from tokenizers import Tokenizer

from glassformer.config import ModelConfig, presets
from glassformer.model import build, device
from glassformer.training.data.corpus import DataError
from glassformer.training.data.tokenizer import CharTokenizer
from glassformer.training.forecast import count_vocabulary, forecast, sheet
from glassformer.training.loop import evaluate, prepare_state, train_step
from glassformer.training.objective import make_batch
from glassformer.training.run import Run, read_run
from glassformer.training.session import open_session
from glassformer.weights import save
from tests.sizing.test_memory import live_peak, weigh

RUN = """
[model]
preset = "gpt2"
n_layers = 2
d_model = 128
n_heads = 4
max_len = 128
dropout = 0.0

[data]
corpus = "{corpus}"
tokenizer = "bpe"
vocab_size = {vocabulary}

[machine]
device = "cpu"
compile = "no"
precision = "float32"

[loop]
batch = 4
"""


def measured(run: Run) -> int:
    """Highest number of bytes alive in a step and in an evaluation of one batch."""
    state = prepare_state(run)
    ids = torch.randint(0, run.model.vocab_size - 1, (run.loop.batch, run.context + 1))
    window = ids[:, :-1], ids[:, 1:]
    batch = make_batch(run, window, 0)
    train_step(state, batch)
    state.optimizer.zero_grad()
    tensors = [*state.optimizer.state().values(), *(state.average.weights.values() if state.average else ())]
    if "frozen matmuls" in state.kernels:
        kept = pytest.importorskip("glassformer.kernels.cpu.training.frozen")._kept
        tensors += [kept[p][1] for p in state.model.parameters() if kept.get(p) is not None]
    held = weigh(state.model) + sum(t.numel() * t.element_size() for t in tensors)
    step = live_peak(lambda: train_step(state, batch))
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in state.model.parameters() if p.grad is not None)
    return held + max(step, gradients + live_peak(lambda: evaluate(state, [window])))


CASES = {
    "AdamW": (97, (), "backward"),
    "Muon": (97, ("optim.kind=muon",), "backward"),
    "Muon, short sequences": (97, ("optim.kind=muon", "loop.context=4"), "step"),
    "averaged weights": (97, ("optim.ema=0.99",), "backward"),
    "label smoothing": (997, ("loss.label_smoothing=0.1",), "loss"),
    "z-loss": (997, ("loss.z_loss=0.01",), "loss"),
    "z-loss, label smoothing, bfloat16": (
        997,
        ("loss.z_loss=0.01", "loss.label_smoothing=0.1", "machine.precision=bfloat16"),
        "loss",
    ),
    "chunked loss": (4999, (), "evaluation"),
    "chunked z-loss": (4999, ("loss.z_loss=0.01",), "evaluation"),
    "accumulated": (997, ("loop.accumulate=4",), "loss"),
    "bfloat16 matmuls": (97, ("machine.precision=bfloat16",), "backward"),
    "bfloat16 matmuls, gated": (97, ("machine.precision=bfloat16", "model.preset=llama_tiny"), "backward"),
    "bfloat16 residual stream": (997, ("machine.precision=bfloat16", "machine.stream=bfloat16"), "loss"),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CASES)
def test_a_run_is_forecast_as_it_trains(name, tmp_path):
    vocabulary, changes, moment = CASES[name]
    run = read_run(RUN.format(corpus=tmp_path, vocabulary=max(257, vocabulary)), changes)
    if vocabulary < 257:
        run = read_run(RUN.format(corpus="task:copy", vocabulary=257).replace("vocab_size = 257", ""), changes)
    found = forecast(run)
    memory = sheet(run).training
    assert memory is not None
    assert memory.peak == pytest.approx(measured(found.run), rel=0.06)
    assert memory.moment == moment


def model_of(text: str) -> tuple[ModelConfig, str]:
    run = read_run(text)
    found = forecast(run)
    return found.run.model, " ".join(found.notes)


@pytest.mark.parametrize(
    "text",
    [
        "[data]\ncorpus = 'CORPUS'",
        "[data]\ncorpus = 'CORPUS'\ntokenizer = 'byte'",
        "[data]\ncorpus = 'task:copy'",
        "[data]\ncorpus = 'CORPUS'\n[model]\npreset = 't5_small'\nmax_len = 32",
        "[data]\ncorpus = 'CORPUS'\n[model]\npreset = 'bert_base'\nmax_len = 32",
    ],
)
def test_the_vocabulary_is_the_one_that_training_finds(text, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("to be or not to be " * 40)
    (folder / "b.txt").write_text("THAT IS THE QUESTION " * 40)
    run = read_run(text.replace("CORPUS", str(folder)), (f"data.cache={tmp_path / 'tokens'}", "loop.context=16"))
    assert forecast(run).run.model == open_session(run).run.model


def test_tiny_shakespeare_is_not_downloaded_to_be_sized(monkeypatch):
    monkeypatch.setattr("glassformer.training.data.corpus.find", lambda name: pytest.fail("read the corpus"))
    assert count_vocabulary(read_run("")) == (65, "")


def test_what_cannot_be_known_is_assumed_and_stated():
    model, notes = model_of("[data]\ncorpus = 'nowhere.txt'")
    assert model.vocab_size == 65
    assert "Vocabulary: 65 is assumed, as the model is configured: the corpus 'nowhere.txt' does not exist." in notes
    model, notes = model_of("[data]\ntokenizer = 'nowhere.json'")
    assert "Vocabulary: 65 is assumed" in notes
    model, notes = model_of("[data]\ntokenizer = 'bpe'\nvocab_size = 500")
    assert model.vocab_size == 500
    assert "a short text has fewer" in notes
    with pytest.raises(DataError):
        open_session(read_run("[data]\ncorpus = 'nowhere.txt'"))


@pytest.mark.parametrize("flags", [(), ("avx512f", "avx2", "fma", "amx_bf16")])
@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16"])
def test_the_precision_is_the_one_that_training_chooses(monkeypatch, flags, width, precision):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "processor_flags", lambda: frozenset(flags))
    run = read_run("", (f"model.d_model={width}", "model.n_heads=4", f"machine.precision={precision}"))
    found = forecast(run)
    assert (found.options.matmuls == "bfloat16") == (prepare_state(run).dtype is torch.bfloat16)
    assert any("machine.precision='auto' is" in note for note in found.notes) == (precision == "auto")


def test_a_run_for_a_gpu_is_sized_without_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = forecast(read_run("", ("machine.device=cuda",)))
    assert found.options.matmuls == "bfloat16"
    assert "machine.precision='auto' is bfloat16: there is no GPU here, and recent GPUs" in " ".join(found.notes)
    assert forecast(read_run("", ("machine.device=cuda", "machine.precision=float32"))).options.matmuls is None


def test_options_given_replace_values_of_the_run():
    run = read_run("[optim]\nkind = 'muon'\n[machine]\nprecision = 'bfloat16'\n[loop]\nbatch = 6\naccumulate = 3")
    found = sheet(run, name="run.toml")
    assert (found.batch, found.context, found.optimizer, found.dtype) == (6, 64, "muon", "float32")
    assert found.notes == (
        "From run.toml: batch 6 in 3 parts, context 64, optimizer muon, weights float32, matmuls bfloat16, residual "
        "stream float32.",
    )
    other = sheet(run, batch=9, context=32, optimizer="sgd", dtype="bfloat16")
    assert (other.batch, other.context, other.optimizer, other.dtype) == (9, 32, "sgd", "bfloat16")
    assert other.options.matmuls is None
    assert other.notes == ()
    with pytest.raises(ValueError, match=r"batch=7 is not a multiple of loop\.accumulate=3"):
        sheet(run, batch=7)


TUNED = {
    "LoRA": ("gpt2", ("lora.rank=8",)),
    "LoRA on q and v, gated": ("llama_tiny", ("lora.rank=8", 'lora.targets=["q", "v"]')),
    "DoRA, gated": ("llama_tiny", ("lora.rank=8", "lora.dora=true")),
    "NF4": ("gpt2", ("lora.rank=8", "lora.quantize=nf4")),
    "LoRA in bfloat16": ("llama_tiny", ("lora.rank=8", "machine.precision=bfloat16")),
    "LoRA with its kernel": ("gpt2", ("lora.rank=8", "machine.compile=auto")),
    "LoRA with its kernel in bfloat16": (
        "gpt2",
        ("lora.rank=8", "machine.compile=auto", "machine.precision=bfloat16"),
    ),
    "LoRA with its kernel, head in chunks": ("gpt2", ("lora.rank=8", "machine.compile=auto", "loop.batch=8")),
    "LoRA with its kernel, bfloat16 head in chunks": (
        "gpt2",
        ("lora.rank=8", "machine.compile=auto", "machine.precision=bfloat16", "loop.batch=8"),
    ),
    "frozen blocks": ("llama_tiny", ('optim.freeze=["embed", "block.0"]',)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", TUNED)
def test_adapters_are_forecast_as_they_train(name, tmp_path):
    """Within 10 % of the bytes alive at the peak, and less than a run that trains all weights."""
    preset, changes = TUNED[name]
    vocabulary = 4999 if "head" in name else 97
    config = presets.get(preset, n_layers=2, d_model=128, n_heads=4, max_len=128, dropout=0.0, vocab_size=vocabulary)
    characters = "".join(chr(0x4E00 + i) for i in range(vocabulary))
    tokenizer = Tokenizer.from_str(CharTokenizer(characters).to_json())
    folder = save(build(config), tmp_path / "model", format="glass", tokenizer=tokenizer)
    machine = ("machine.device=cpu", "machine.compile=no", "machine.precision=float32", "loop.batch=4")
    run, whole = (read_run("", (f'start.model="{folder}"', *machine, *more)) for more in (changes, ()))
    predicted = sheet(run).training
    assert predicted.peak == pytest.approx(measured(run), rel=0.10)
    full = sheet(whole).training
    assert predicted.optimizer < full.optimizer * (1 if "frozen" in name else 0.3)
    assert predicted.gradients < full.gradients
