"""Greedy and beam search give the tokens of transformers' `generate`, on prompts of unequal length, by one family for
each primitive; with a cache and without one."""

import pytest
import torch

import glassformer as gf
from glassformer.weights import load
from tests.weights.test_decoders import CASES, attention_of, config_of
from tests.weights.tiny import precision, random_model, saved

PROMPTS = [[5, 9, 23, 7, 11, 40, 3, 8], [14, 6, 31], [90, 2, 17, 55, 61, 12]]
NEW = 7
PRIMITIVES = {
    "gemma2": "score and logit caps, windows in every other layer, sandwich norms",
    "gemma3": "q/k norms, two rotary bases, windows",
    "gpt_neox": "two parallel branches, partial rotation",
    "gptj": "interleaved rotation, one parallel norm",
    "gpt_neo": "local windows, learned positions",
    "bloom": "ALiBi, norm of the embedding",
    "mpt": "clipped queries and keys",
    "falcon rw": "rounded ALiBi",
    "olmo3": "norms after the branches, YaRN in some layers",
    "granite": "multipliers",
    "smollm3": "layers without positions",
    "nemotron": "norm offset, squared ReLU",
    "qwen2_moe": "experts, a gated shared one, dense layers",
    "gpt_oss": "sinks, limited gates, router bias",
    "deepseek_v3": "latent attention with its own cache, sigmoid router in groups",
    "minimax_m2": "q/k norm of the projection, corrected router",
}


@pytest.mark.sample(16)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("case", PRIMITIVES)
@torch.no_grad()
def test_generation_equals_transformers(tmp_path, case, beams):
    model = random_model(*config_of(case), torch.float64, attention=attention_of(case))
    ours = load(saved(model, tmp_path)).double()
    longest = max(map(len, PROMPTS))
    tokens = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    with precision(torch.float64):
        theirs = model.generate(
            tokens, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, num_beams=beams,
            pad_token_id=0, eos_token_id=None, repetition_penalty=1.0,
        )[:, longest:]  # fmt: skip
    for cache in (True, False):
        found = gf.generate(ours, PROMPTS, NEW, beams=beams, cache=cache, stop=[])
        assert [list(new) for new in found.new] == theirs.tolist(), cache


def test_the_primitives_are_cases():
    assert PRIMITIVES.keys() <= CASES.keys()
