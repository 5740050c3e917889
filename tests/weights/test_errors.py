"""How lists and pickles are named in messages."""

from glassformer.weights.errors import WeightsError, pickled, summarize


def test_a_long_list_is_counted_and_cut():
    assert summarize(["a", "b"]) == "2: a, b"
    assert summarize("abcdefg") == "7: a, b, c, d, e and 2 more"


def test_a_pickle_is_refused_with_a_way_that_works():
    assert "save_pretrained" in str(pickled("m is a pickle", by_transformers=True))
    assert "torch.load(file, weights_only=True)" in str(pickled("m is a pickle"))
    assert isinstance(pickled("m is a pickle"), WeightsError)


def test_errors_are_value_errors():
    assert issubclass(WeightsError, ValueError)
