"""What the CUDA kernels do not know, and what they are given."""

import pytest
import torch

from glassformer import config as c
from glassformer.config import presets
from glassformer.kernels.cuda.decode.decoder import PARTS
from glassformer.kernels.cuda.decode.pack import (
    kernel_sizes,
    position_tables,
    source,
    stacked_weights,
    unsupported_config,
)
from tests.variants import POSITIONS, decoder, lively


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (presets.bert_base(), "decoder-only"),
        (decoder(placement="post"), "placement='post'"),
        (presets.get("moe_tiny"), "feedforward='moe'"),
        (decoder(position=c.Alibi()), "alibi"),
        (presets.get("llama2_7b"), "do not fit"),
        (presets.get("qwen3_0_6b"), "attention.qk_norm='rms_norm'"),
        (decoder(), "both must be 16, 32, 64 or 128"),
        (decoder(d_model=42, attention__d_head=16), "multiples of 8"),
    ],
)
def test_what_they_do_not_know_is_said(config, words):
    assert words in unsupported_config(config)


def test_gpt2_and_small_llamas_are_known():
    assert unsupported_config(presets.gpt2()) is None
    llama = presets.get("llama2_7b")
    assert unsupported_config(c.replace(llama, d_model=2048, attention__n_heads=16, feedforward__d_ff=5504)) is None


def test_matrices_are_stacked_by_layer():
    model = lively(decoder())[0].float()
    held = stacked_weights(model, torch.float32)
    attention = model.blocks[1].attention
    rows = torch.cat([attention.q.weight, attention.k.weight, attention.v.weight])
    assert torch.equal(held["w_qkv"][1], rows)
    assert torch.equal(held["norm_f"][1], model.blocks[1].norm_feedforward.weight)
    assert stacked_weights(model, torch.bfloat16)["w_down"].dtype is torch.bfloat16


def test_tables_are_those_of_the_scheme():
    learned = lively(decoder(position=POSITIONS["learned"]))[0].float()
    assert torch.equal(position_tables(learned, 5)["position_table"], learned.decoder.position.weight)
    rotary = lively(decoder(position=POSITIONS["rotary-halves"]))[0].float()
    assert position_tables(rotary, 5)["cosines"].shape[0] == 5
    assert position_tables(rotary, 5)["position_table"].numel() == 1


def test_sizes_are_numbers_the_preprocessor_can_read():
    sizes = kernel_sizes(lively(decoder())[0], torch.bfloat16, 4)
    assert all(type(value) is int for value in sizes.values())
    assert (sizes["HALF"], sizes["WARPS"], sizes["G"]) == (1, 4, 2)


def test_sizes_come_first_and_the_machine_can_be_another():
    text = source({"D": 40}, PARTS, {"machine.cuh": "// here"})
    assert text.startswith("#define D 40\n")
    assert "// here" in text
    assert "bar.sync" not in text
    assert "bar.sync" in source({"D": 40}, PARTS)
    assert text.index("Pack") < text.index("// here") < text.index("decode(const Arguments a)")
