"""The solution that reads GPT-2's names against the model of `transformers`."""

import numpy as np
import pytest
import torch

from glassformer.theory.exercises import loading as module


def test_the_logits_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    for case in module.LOADING.cases(np.random.default_rng(3)):
        tokens, state, layers, heads = case.arguments.values()
        V, D = state["wte.weight"].shape
        config = transformers.GPT2Config(vocab_size=V, n_positions=8, n_embd=D, n_layer=layers, n_head=heads)
        model = transformers.GPT2LMHeadModel(config).double().eval()
        tensors = {f"transformer.{name}": torch.from_numpy(value) for name, value in state.items()}
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0].numpy()
        assert np.allclose(module.gpt2_logits(tokens, state, layers, heads), expected, atol=1e-10)
