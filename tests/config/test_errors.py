from glassformer.config.errors import listing, nearest


def test_listing_reads_as_a_sentence():
    assert listing([1]) == "1"
    assert listing([1, 2]) == "1 or 2"
    assert listing(["a", "b", "c"], "and") == "a, b and c"


def test_nearest_names_or_all_names():
    assert nearest("n_head", ["n_heads", "d_model"]) == " Did you mean n_heads?"
    assert nearest("qqq", ["b", "a"]) == " Fields: a, b."
    assert nearest("qqq", ["b", "a"], "Use one of") == " Use one of a, b."
