"""Arguments of launches: members by name, tensors by address. That they mirror the structs: emulated.py asserts it."""

import torch

from glassformer.kernels.cuda.graph.launches import Launch


def test_arguments_have_the_addresses_of_tensors():
    one, two = torch.zeros(3), torch.zeros(4)
    made = Launch("linear", "linear", {}, {"x": one, "weight": [two, None], "eps": 0.5, "slots": 7}, 1).arguments()
    assert (made.x, made.weight[0], made.weight[1], made.out) == (one.data_ptr(), two.data_ptr(), None, None)
    assert (made.eps, made.slots) == (0.5, 7)


def test_the_source_begins_with_the_macros():
    text = Launch("vectors", "embed", {"STORED": 1}, {}, 1).text()
    assert "#define WARPS 8\n#define STORED 1" in text
    assert 'extern "C" __global__' in text
