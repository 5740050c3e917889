from glassformer.config import presets
from glassformer.config.placement import cut_dimension, divided, indivisible, is_of_vocabulary, part_not_supported
from glassformer.sizing.parameters import count, parameters


def test_matrices_of_blocks_and_the_vocabulary_are_cut_and_everything_else_is_whole():
    names = parameters(presets.llama_tiny())
    cut = {name for name in names if cut_dimension(name) is not None}
    blocks = {name for name in names if ".blocks." in name and len(names[name]) == 2}
    assert cut == blocks | {"embed.tokens.weight"}
    assert {name for name in names if is_of_vocabulary(name)} == {"embed.tokens.weight"}
    assert cut_dimension("decoder.blocks.0.attention.o.weight") == 1
    assert cut_dimension("decoder.blocks.0.attention.o.bias") is None
    assert cut_dimension("decoder.blocks.3.feedforward.experts.1.down.weight") == 1


def test_what_cannot_be_divided_is_named():
    config = presets.llama_tiny(n_heads=8, n_kv_heads=4)
    assert indivisible(config, 4) is None
    assert indivisible(config, 8) == "4 key/value heads"
    assert indivisible(presets.gpt2(d_ff=3074), 4) == "3074 hidden units (d_ff)"
    assert part_not_supported(config) is None
    assert part_not_supported(presets.t5_small()) == "an encoder and a decoder"


def test_the_config_of_a_part_has_its_parameters():
    config = presets.llama_tiny(n_heads=8, n_kv_heads=4)
    part = divided(config, 2)
    assert part.d_head == config.d_head
    cut = sum(
        shape[0] * shape[1]
        for name, shape in parameters(config).items()
        if cut_dimension(name) is not None and not is_of_vocabulary(name)  # a part has a whole one
    )
    assert count(part) == count(config) - cut // 2
    moe = divided(presets.moe_tiny(), 2)
    assert moe.feedforward.expert.d_ff == presets.moe_tiny().feedforward.expert.d_ff // 2
