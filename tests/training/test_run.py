"""Runs: TOML there and back, changes by name, refusals that name the nearest key."""

import tomllib

import pytest

from glassformer.config import ConfigError, Rotary, presets, to_toml
from glassformer.training.run import Loop, override, read_run, run_to_dict, with_model

FLOAT8 = ("machine.products=float8", "machine.precision=bfloat16")


def test_no_text_is_nanogpts_cpu_setting():
    run = read_run()
    assert run.model == presets.nano()
    assert (run.loop.steps, run.loop.batch, run.context, run.objective) == (2000, 12, 64, "next")


def test_a_resolved_run_reads_back_as_itself():
    run = read_run(
        'seed = 3\n[model]\npreset = "llama_tiny"\nn_layers = 2\n[optim]\nkind = "muon"\nclip = "none"\n',
        ("optim.ema=0.99", "schedule.kind=wsd", "loop.accumulate=3"),
    )
    assert run.optim.kind == "muon"
    assert run.optim.clip is None
    assert run.schedule.kind == "wsd"
    assert run.model.n_layers == 2
    assert read_run(to_toml(run_to_dict(run))) == run


def test_changes_are_typed_and_reach_the_model():
    run = read_run(
        "", ("optim.lr=3e-4", "model.n_layers=3", "data.corpus=embedded", "model.attention__bias=true", "seed=7")
    )
    assert (run.optim.lr, run.model.n_layers, run.data.corpus, run.seed) == (3e-4, 3, "embedded", 7)
    assert run.model.attention.bias is True


def test_a_model_without_a_preset_changes_the_default_one():
    run = read_run("[model]\nn_layers = 6\n[model.attention]\nbias = true\n")
    assert run.model == presets.nano(n_layers=6, attention__bias=True)
    assert read_run("[model]\nn_layers = 3\n", ("model.preset=llama_tiny",)).model == presets.llama_tiny(n_layers=3)
    whole = to_toml({"model": run_to_dict(run)["model"]})
    assert "preset" not in whole
    assert read_run(whole).model == run.model
    assert read_run(whole, ("model.preset=llama_tiny",)).model == presets.llama_tiny()


def test_a_preset_with_a_changed_part():
    run = read_run('[model]\npreset = "nano"\n[model.position]\nkind = "rotary"\n[model.attention]\nn_kv_heads = 2\n')
    assert run.model.position.kind == "rotary"
    assert (run.model.attention.n_heads, run.model.attention.n_kv_heads) == (4, 2)


@pytest.mark.parametrize(
    ("preset", "objective"), [("gpt2", "next"), ("bert_base", "masked"), ("transformer_base", "seq2seq")]
)
def test_the_architecture_decides_the_objective(preset, objective):
    assert read_run("", (f"model.preset={preset}", "loop.context=8")).objective == objective


def test_products_in_8_bits_are_asked_for_by_name():
    assert read_run().machine.products == "precision"
    run = read_run("", (*FLOAT8, "model.preset=gpt2"))
    assert run.machine.products == "float8"
    assert read_run(to_toml(run_to_dict(run))) == run


def test_with_model_changes_the_vocabulary():
    assert with_model(read_run(), vocab_size=9).model.vocab_size == 9


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("optm = 3", (), "optm is not a part of a run. Did you mean optim"),
        ("[optim]\nlearning_rate = 3", (), "optim.learning_rate is not a field"),
        ("[optim]\nlr = 'fast'", (), "optim.lr='fast' has the wrong type: expected a number"),
        ("[loop]\nstep = 3", (), "loop.step is not a field. Did you mean steps"),
        ("a = = 3", (), "is not readable TOML"),
        ("optim = 3", (), "optim must be a table"),
        ("seed = 'x'", (), "seed='x' must be a whole number"),
        ("[model]\npreset = 'nanoo'", (), "nano"),
        ("", ("optim.lr",), "must read section.field=value"),
        ("", ("optim.lr=-1",), "optim.lr=-1.0 must be positive"),
        ("", ("loop.batch=12", "loop.accumulate=5"), "not a multiple of loop.accumulate=5"),
        ("", ("loop.context=65",), "loop.context=65 exceeds the model's max_len=64"),
        ("", ("schedule.warmup=2000",), "leaves nothing of loop.steps=2000"),
        ("", ("loop.steps=10", "schedule.warmup=10"), "schedule.warmup=10 leaves nothing of loop.steps=10"),
        ("[loop]\nsteps = 10\n[schedule]\nwarmup = 20", (), "schedule.warmup=20 leaves nothing of loop.steps=10"),
        ("[loop]\nsteps = 10", ("schedule.warmup=20",), "schedule.warmup=20 leaves nothing of loop.steps=10"),
        ("", ("model.head=none",), "predicts nothing"),
        ("", ("data.validation=1.5",), "data.validation=1.5"),
        ("", ("machine.device=tpu",), "device"),
        ("", ("machine.products=int8",), "products"),
        ("", ("machine.products=float8",), "needs machine.precision='bfloat16', not 'auto'"),
        ("", (*FLOAT8, "machine.device=cpu"), "needs a CUDA GPU, not machine.device='cpu'"),
        ("", (*FLOAT8, "model.preset=moe_tiny"), "for a dense or gated feed-forward, and the model's is 'moe'"),
        ("", (*FLOAT8, "model.d_model=120"), "model.d_model=120 is not a multiple of 16"),
        ("", (*FLOAT8, "model.d_ff=200"), "model.feedforward.d_ff=200 is not a multiple of 16"),
        ("", ("optim.ema=1",), "optim.ema=1.0 must be between"),
        ("", ("probe.every=-1",), "probe.every=-1 must be 0 (never) or more"),
        ("", ("probe.head=true",), "probe.head is not a field. Did you mean heads"),
    ],
)
def test_wrong_runs_are_refused_in_words(text, changes, words):
    with pytest.raises(ConfigError) as caught:
        read_run(text, changes, source="run.toml")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "changes", "warmup"),
    [
        ("", ("loop.steps=10",), 1),
        ("", ("loop.steps=1",), 0),
        ("", ("loop = {steps = 50}",), 5),
        ("[loop]\nsteps = 30", (), 3),
        ("[loop]\nsteps = 3000\n[schedule]\nwarmup = 300", ("loop.steps=300",), 30),
    ],
)
def test_a_shorter_run_shortens_a_warm_up_of_lower_rank_and_says_so(text, changes, warmup):
    notes = []
    run = read_run(text, changes, note=notes.append)
    assert run.schedule.warmup == warmup
    assert len(notes) == 1
    assert f"to {warmup}, a tenth of loop.steps={run.loop.steps}" in notes[0]


def test_a_warm_up_that_fits_is_left_alone():
    notes = []
    assert read_run("", ("loop.steps=101",), note=notes.append).schedule.warmup == 100
    assert read_run("", ("loop.steps=10", "schedule.warmup=9"), note=notes.append).schedule.warmup == 9
    assert notes == []


def test_the_recipes_are_valid_runs():
    from pathlib import Path

    recipes = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
    assert {"bard", "shakespeare_cpu", "shakespeare_gpu", "gpt2_124m", "induction", "grokking"} <= {
        path.stem for path in recipes
    }
    for path in recipes:
        assert tomllib.loads(path.read_text())
        read_run(path.read_text(), source=path.name)


@pytest.mark.parametrize(
    "table",
    ["", "[model.attention]\nn_heads = 8\n", '[model.norm]\nkind = "rms_norm"\n[model.attention]\nn_heads = 8\n'],
)
def test_a_preset_of_another_width_keeps_the_ratio_of_its_feed_forward(table):
    width = 512 if table else 96  # 12 heads do not divide 512: a table may say how many there are
    run = read_run(f'out = "x"\n[model]\npreset = "gpt2"\nd_model = {width}\n{table}')
    assert run.model.feedforward.d_ff == 4 * width
    own = read_run(f'out = "x"\n[model]\npreset = "gpt2"\nd_model = {width}\n{table}[model.feedforward]\nd_ff = 40\n')
    assert own.model.feedforward.d_ff == 40


def test_overrides_change_parts_of_a_run_and_keep_the_rest():
    run = read_run("", ("optim.lr=3e-4", "optim.beta2=0.9", "loop.steps=50", "loop.context=8"))
    changed = override(run, {"optim": {"kind": "muon"}, "seed": 3})
    assert (changed.optim.kind, changed.optim.lr, changed.optim.beta2, changed.seed) == ("muon", 3e-4, 0.9, 3)
    assert override(run, {"model": {"position": {"kind": "rotary"}}}).model.position == Rotary()
    assert override(run, {"model": {"preset": "llama_tiny"}}).model == presets.llama_tiny()
    assert override(run, {"loop": Loop(steps=500)}).loop == Loop(steps=500)  # a whole section keeps no old field
    assert override(run, {}) == run


def test_a_change_of_the_corpus_drops_the_parameters_of_a_task():
    run = read_run("", ("data.corpus=task:repeat", "loop.context=40"))
    assert override(run, {"data": {"corpus": "embedded"}}).task is None
    assert override(run, {"data": {"validation": 0.2}}).task == run.task


def test_overrides_shorten_the_warm_up_of_a_shorter_run_and_say_so():
    notes = []
    assert override(read_run(), {"loop": {"steps": 50}}, note=notes.append).schedule.warmup == 5
    assert notes == [
        "schedule.warmup is shortened from 100 to 5, a tenth of loop.steps=50; set schedule.warmup to choose another "
        "length."
    ]


def test_a_section_that_is_not_a_table_is_refused_with_changes_too():
    with pytest.raises(ConfigError, match="optim is not a table"):
        read_run("optim = 3", ("optim.lr=1.0",))
