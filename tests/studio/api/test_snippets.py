import json

import pytest
import torch

from glassformer.studio.api.snippets import VIEWS

IDS = [18, 47, 56, 57, 58, 1]
ABOUT = {"model": "bard", "ids": IDS}
TALK = {"model": "chatty", "messages": [{"role": "user", "content": "the cat"}], "max_new_tokens": 9, "seed": 3}
OUT = {"heads": [[0, 1], [2, 3]], "mode": "mean"}
CLEAN = {"model": "bard", "clean": [18, 47, 56, 57, 58], "corrupt": [35, 47, 56, 57, 42]}


def python(client, view, **given):
    query = {k: v if isinstance(v, str) else json.dumps(v) for k, v in given.items()}
    reply = client.get("/api/python", params={"view": view, **query})
    assert reply.status_code == 200, reply.text
    return reply.json()["python"]


def run(code):
    names: dict = {}
    exec(compile(code, "<lines>", "exec"), names)
    return names["result"]


def close(value, wanted):
    return torch.allclose(torch.as_tensor(value).double(), torch.as_tensor(wanted).double(), atol=1e-3, rtol=1e-3)


def checks(ask):
    """View -> (fields, what must be equal to the answer of the view)."""
    return {
        "tokens": ({"model": "bard", "text": "First"}, lambda r: r == ask("tokens", model="bard", text="First")["ids"]),
        "next": (
            {**ABOUT, "top_k": 5},
            lambda r: all(close(r[t["id"]], t["p"]) for t in ask("next", **ABOUT, top_k=5)["top"]),
        ),
        "generate": (
            {**ABOUT, "max_new_tokens": 6, "seed": 4},
            lambda r: r == ask.events("generate", **ABOUT, max_new_tokens=6, seed=4)[-1][1]["ids"],
        ),
        "chat": (TALK, lambda r: r == ask.events("chat", **TALK)[-1][1]["ids"]),
        "beam": (
            {**ABOUT, "beams": 3, "steps": 4},
            lambda r: r == ask("beam", **ABOUT, beams=3, steps=4)["best"][0]["ids"],
        ),
        "anatomy": ({"model": "bard"}, lambda r: r.parameters == ask("anatomy", model="bard")["totals"]["parameters"]),
        "tensor": (
            {**ABOUT, "site": "blocks.2.attention.q", "head": 1},
            lambda r: close(r, ask.tensors("tensor", **ABOUT, site="blocks.2.attention.q", head=1)[0]["value"].copy()),
        ),
        "cell": (
            {**ABOUT, "site": "logits", "index": [2, 9]},
            lambda r: close(r, ask("cell", **ABOUT, site="logits", index=[2, 9])["value"]),
        ),
        "patterns": (
            ABOUT,
            lambda r: (r - torch.tensor(ask.tensors("patterns", **ABOUT)[0]["pattern"])).abs().max() < 3e-3,
        ),
        "heads": (
            {"model": "induction"},
            lambda r: r.rows[2].scores == ask("heads", model="induction")["rows"][2]["scores"],
        ),
        "ablate": (
            {**ABOUT, **OUT},
            lambda r: all(close(r[t["id"]], t["p"]) for t in ask("ablate", **ABOUT, **OUT)["after"]),
        ),
        "lens": (ABOUT, lambda r: close(r.entropy[:, 0], ask("lens", **ABOUT)["entropy"])),
        "attribution": (ABOUT, lambda r: close(r.values[:, 0], ask("attribution", **ABOUT)["values"])),
        "depth": (ABOUT, lambda r: close(r.deviation[:, 0], ask("depth", **ABOUT)["rank"]["deviation"])),
        "patch": (
            {**CLEAN, "answer": 1, "wrong": 2},
            lambda r: close(r, ask.events("patch", **CLEAN, answer=1, wrong=2)[-1][1]["effects"]),
        ),
        "positions": (
            {"kind": "alibi", "length": 9},
            lambda r: close(r, ask.tensors("positions", kind="alibi", length=9)[0]["map"].copy()),
        ),
        "size": ({"preset": "gpt2", "batch": 2}, lambda r: r.to_dict() == ask("size", preset="gpt2", batch=2)),
        "leak": ({"model": "table"}, lambda r: float(r.triu(1).max()) == 0 and float(r.max()) > 0),
    }  # fmt: skip


@pytest.mark.sample(11)
@pytest.mark.parametrize("view", list(VIEWS))
def test_the_lines_of_every_view_run_and_give_its_numbers(client, ask, view, tmp_path, monkeypatch):
    known = checks(ask)
    if view in known:
        fields, holds = known[view]
        code = python(client, view, **fields)
        result = run(code)
        assert holds(result), code
        return
    monkeypatch.chdir(tmp_path)
    if view == "theory":
        claim = next(row["id"] for row in client.get("/api/claims").json() if not row["slow"])
        result = run(python(client, view, claim=claim, seed=2))
        assert str(result.verdict) == ask.events(f"claims/{claim}/run", seed=2)[-1][1]["verdict"]
    elif view == "chinchilla":
        result = run(python(client, view, flops="1e20"))
        assert result.to_dict()["allocations"] == client.get("/api/size/chinchilla?flops=1e20").json()["allocations"]
    elif view == "doctor":
        assert "quick=True" in python(client, view, model="table")  # tests/studio/api/test_doctor.py runs the doctor
        compile(python(client, view, model="table"), "<lines>", "exec")
    else:
        assert view == "train"
        small = {"model.n_layers": 1, "model.d_model": 16, "model.n_heads": 2, "model.d_ff": 16, "model.max_len": 16}
        fields = {**small, "loop.steps": 2, "schedule.warmup": 1, "loop.eval_batches": 1}
        state = run(python(client, view, corpus="embedded", preset="nano", fields=fields))
        assert state.step == 2


PAIR = {"model": "pair", "ids": [3, 1, 4, 1, 5]}
GIVEN = {**PAIR, "target": [0, 9, 2]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("asked", [PAIR, GIVEN], ids=["its own answer", "an answer given"])
def test_the_lines_of_an_encoder_decoder_make_the_target_that_the_view_has(client, ask, asked):
    """The decoder's input is the request's, or the model's own answer: the lines say which and give its numbers."""
    table = {
        "lens": lambda r: close(r.entropy[:, 0], ask("lens", **asked)["entropy"]),
        "attribution": lambda r: close(r.values[:, 0], ask("attribution", **asked)["values"]),
        "depth": lambda r: close(r.deviation[:, 0], ask("depth", **asked)["rank"]["deviation"]),
        "next": lambda r: all(close(r[row["id"]], row["p"]) for row in ask("next", **asked)["top"]),
        "generate": lambda r: r == ask.events("generate", **asked, max_new_tokens=5, seed=2)[-1][1]["ids"],
    }
    for view, holds in table.items():
        more = {"max_new_tokens": 5, "seed": 2} if view == "generate" else {}
        code = python(client, view, **asked, **more)
        result = run(code)
        assert holds(result), (view, code)
    for where in ("self", "cross", "encoder"):
        wanted = torch.tensor(ask.tensors("patterns", **asked, where=where)[0]["pattern"])
        assert (run(python(client, "patterns", **asked, where=where)) - wanted).abs().max() < 3e-3
    heads = {"heads": [[1, 2]], "mode": "zero"}
    after = ask("ablate", **asked, **heads)["after"]
    result = run(python(client, "ablate", **asked, **heads))
    assert all(close(result[row["id"]], row["p"]) for row in after)
    cell = {"site": "decoder.blocks.0.cross.pattern", "index": [0, 1, 2]}
    assert close(run(python(client, "cell", **asked, **cell)), ask("cell", **asked, **cell)["value"])


@pytest.mark.parametrize(
    ("kind", "model"),
    [("sinusoidal", None), ("rotary", None), ("alibi", None), ("t5", None), ("t5", "pair"), ("learned", "table")],
)
def test_lines_of_every_position_scheme(client, ask, kind, model):
    asked = {"kind": kind, "length": 40, "width": 24, **({"model": model} if model else {})}
    result = run(python(client, "positions", **asked))
    assert close(result.detach(), ask.tensors("positions", **asked)[0]["map"].copy())


def test_the_lines_of_a_run_read_its_log(client, studio, tmp_path, monkeypatch):
    from tests.training import tiny

    monkeypatch.setenv("GLASSFORMER_STUDIO", str(tmp_path))
    from glassformer.training import train

    session = tiny.session(tmp_path, "loop.steps=6", name="runs/run-x/out")
    train(session.run, session.data)
    assert "validation" in run(python(client, "train", run="run-x", what="loss"))


def test_text_goes_into_the_lines_as_a_literal(client, ask):
    text = """"); import os; x = ('"""
    code = python(client, "tokens", model="tiny", text=text)
    assert run(code) == ask("tokens", model="tiny", text=text)["ids"]
    assert "import os" not in [line.strip() for line in code.splitlines()]


@pytest.mark.parametrize(
    "query",
    ["", "view=nonsense", "view=next", "view=next&model=../x&ids=[1]", "view=theory&claim=x", "view=train&run=../../x",
     "view=chinchilla&flops=x", "view=tensor&model=bard&ids=[1]&site=embed&head=x", "view=positions&kind=learned"],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(client, query):
    assert 400 <= client.get(f"/api/python?{query}").status_code < 500
