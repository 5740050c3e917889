import pytest

from glassformer import config as c


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: c.Embedding(n_segments=-1), "n_segments=-1 must be 0 or more"),
        (lambda: c.Embedding(width=0), "width=0"),
        (lambda: c.Embedding(project_bias=False), "give width too"),
        (lambda: c.Head(softcap=0.0), "softcap=0.0 must be positive"),
        (lambda: c.Head(transform="swish"), "transform='swish'"),
        (lambda: c.Head(transform_bias=False), "give transform or width too"),
    ],
)
def test_impossible_ends_are_refused(make, words):
    with pytest.raises(c.ConfigError, match=words):
        make()


def test_tokens_that_are_forced_or_suppressed_limit_generation():
    assert not c.Special(bos=1, eos=(2,), pad=0, start=3).limits_generation
    for special in (c.Special(forced_bos=0), c.Special(forced_eos=0), c.Special(suppressed=(0,))):
        assert special.limits_generation
