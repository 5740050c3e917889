"""The graph is valid ONNX and is GPT-2: logits against the engine's, in two pieces through the cache."""

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.bench.peers.base import arrays, config_of
from glassformer.bench.peers.onnx_graph import build
from tests.bench import tiny


def test_logits_are_the_engines_with_and_without_a_past(subject):
    onnx = pytest.importorskip("onnx", reason="a peer that is not installed here")
    from onnx.reference import ReferenceEvaluator

    order = tiny.order(subject, "onnxruntime", "onnxrt")
    made = build(config_of(order), arrays(order))
    onnx.checker.check_model(made, full_check=True)
    graph = ReferenceEvaluator(made)
    ids = np.array(subject.prompts(2, 9, seed=1))
    empty = np.zeros((2, 4, 0, 16), dtype=np.float32)
    feed = {f"past_{part}_{i}": empty for i in range(2) for part in "kv"}
    model = gf.load(subject.root / "hf")
    for first, last in ((0, 5), (5, 9)):
        places = np.arange(first, last)
        logits, *present = graph.run(None, {"ids": ids[:, first:last], "positions": places, **feed})
        with torch.no_grad():
            expected = model(torch.from_numpy(ids[:, :last]))[:, -1].numpy()
        assert np.abs(logits - expected).max() < 1e-4
        feed = {f"past_{part}_{i}": present[2 * i + k] for i in range(2) for k, part in enumerate("kv")}
        assert present[0].shape == (2, 4, last, 16)
