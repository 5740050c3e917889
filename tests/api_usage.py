"""Every public name, used as in a user's own file.

mypy checks this file with the strict settings of a user (`make types`), and `tests/test_public_api.py` runs it.
"""

from pathlib import Path

import torch

import glassformer as gf

TINY = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "vocab_size": 61, "max_len": 24}
TOKENS = torch.arange(12).view(1, 12) % 61


def build_models() -> gf.DecoderLM:
    """Configs, presets and the three model classes."""
    config: gf.ModelConfig = gf.presets.nano(**TINY)
    assert gf.presets.pythia_70m().vocab_size == 50304
    assert isinstance(config, gf.DecoderConfig)
    assert gf.config.from_dict(gf.config.to_dict(config)) == config
    decoder = gf.build(config, seed=0)
    assert isinstance(decoder, gf.DecoderLM)
    logits: torch.Tensor = decoder(TOKENS)
    assert logits.shape == (1, 12, 61)

    encoder = gf.build(gf.presets.bert_base(**TINY))
    assert isinstance(encoder, gf.EncoderLM)
    assert isinstance(encoder.config, gf.EncoderConfig)
    states: list[torch.Tensor] = gf.encode(encoder, [[1, 2, 3], [4]], engine="torch")
    assert len(states) == 2
    hidden: torch.Tensor = encoder.encode(TOKENS, mask=torch.ones_like(TOKENS, dtype=torch.bool))
    assert hidden.shape == (1, 12, 16)

    seq2seq = gf.build(gf.presets.transformer_base(**TINY, n_encoder_layers=1))
    assert isinstance(seq2seq, gf.Seq2Seq)
    assert isinstance(seq2seq.config, gf.Seq2SeqConfig)
    assert seq2seq(TOKENS, TOKENS[:, :5]).shape == (1, 5, 61)
    return decoder


def use_masks_and_a_cache(model: gf.DecoderLM) -> None:
    pattern: torch.Tensor = gf.masks.prefix(torch.tensor([4]), 12)
    assert model(TOKENS, mask=pattern).shape == (1, 12, 61)
    cache: gf.Cache = model.new_cache()
    first = model(TOKENS[:, :8], cache=cache)
    rest = model(TOKENS[:, 8:], cache=cache)
    assert torch.allclose(torch.cat([first, rest], 1), model(TOKENS), atol=1e-5)


def generate_tokens(model: gf.DecoderLM) -> None:
    sampling = gf.Sampling(temperature=0.8, top_k=5)
    result = gf.generate(model, TOKENS, max_new_tokens=4, sampling=sampling, seed=1, stop=[], engine="torch")
    tokens: list[list[int]] = result
    assert len(tokens[0]) == 16
    steps = list(gf.stream(model, TOKENS, max_new_tokens=4, sampling=sampling, seed=1, stop=[], engine="torch"))
    assert [step[0] for step in steps] == tokens[0][12:]


def look_inside(model: gf.DecoderLM) -> None:
    trace = gf.trace(model, TOKENS)
    site = next(name for name in trace if name.endswith("attention.pattern"))
    logits: torch.Tensor = gf.patch(model, TOKENS, {site: gf.lens.zero()})
    assert logits.shape == trace.logits.shape


def examine(model: gf.DecoderLM) -> None:
    report = gf.diagnose(model, quick=True)
    healthy: bool = report.healthy
    assert healthy, report.diagnoses
    findings: tuple[gf.Finding, ...] = report.findings
    assert all(finding.verdict is not gf.Verdict.FAIL for finding in findings)
    comparison: gf.Comparison = gf.compare(model, model)
    assert comparison.same


def examine_training(model: gf.DecoderLM) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()

    report = gf.diagnose_training(step, TOKENS)
    assert report.healthy, report.text()


def prove() -> None:
    name = next(id for id, claim in gf.claims.ALL.items() if not claim.slow)
    finding: gf.Finding = gf.check(name)
    assert finding.passed


def compute_sizes() -> None:
    sheet = gf.size(gf.presets.nano(**TINY), batch=2, context=16)
    assert sheet.parameters > 0


def save_and_load(model: gf.DecoderLM, folder: Path) -> None:
    path: Path = gf.save(model, folder / "model", format="glass")
    again = gf.load(path)
    assert torch.equal(again(TOKENS), model(TOKENS))
    assert gf.load_tokenizer(path) is None
    try:
        gf.save(model, path, format="glass")
        raise AssertionError("a saved model was replaced")
    except gf.GlassformerError:
        gf.save(model, path, format="glass", overwrite=True)


def train_and_evaluate(corpus: Path, folder: Path) -> None:
    run = gf.Run(gf.presets.nano(**TINY), out=str(folder / "run"))
    result: gf.TrainResult = gf.train(
        run,
        data={"corpus": str(corpus), "cache": str(folder / "tokens")},
        loop={"steps": 4, "batch": 4, "sample_every": 0, "eval_every": 2, "eval_batches": 1},
        machine={"device": "cpu", "precision": "float32"},
    )
    assert result.folder == folder / "run"
    assert [event["step"] for event in result.history if event["event"] == "validation"] == [0, 2, 4]
    scores: gf.Evaluation = gf.evaluate(result.model, corpus.read_text(), tokenizer=result.tokenizer)
    assert scores.perplexity > 1
    assert scores.bits_per_byte is not None
    assert gf.generate(result.model, "the", max_new_tokens=2).texts


def main(corpus: Path, folder: Path) -> None:
    """Use everything once."""
    assert gf.__version__
    model = build_models()
    use_masks_and_a_cache(model)
    generate_tokens(model)
    look_inside(model)
    examine(model)
    examine_training(model)
    prove()
    compute_sizes()
    save_and_load(model, folder)
    train_and_evaluate(corpus, folder)
