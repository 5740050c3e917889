import pytest

from glassformer import config as c


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: c.Attention(n_heads=12, n_kv_heads=5),
            "n_heads=12 is not a multiple of n_kv_heads=5: query heads cannot share keys evenly. "
            "Use 1, 2, 3, 4, 6 or 12.",
        ),
        (lambda: c.Attention(n_heads=0), "Attention.n_heads=0"),
        (lambda: c.Attention(n_heads=2, scale=0.0), "scale=0.0 must be positive"),
        (lambda: c.Attention(n_heads=2, window=0), "Attention.window=0"),
        (lambda: c.Attention(n_heads=2, window_layers=(0,)), "window_layers is set but window is not"),
        (lambda: c.LayerNorm(eps=0.0), "LayerNorm.eps=0.0 must be positive"),
        (lambda: c.RMSNorm(eps=-1.0), "RMSNorm.eps=-1.0 must be positive"),
        (lambda: c.Dense(d_ff=0), "Dense.d_ff=0"),
        (lambda: c.Dense(d_ff=3, activation="swish"), "activation='swish' is not known. Use one of 'relu'"),
        (lambda: c.Gated(d_ff=3, activation="swish"), "activation='swish'"),
        (lambda: c.MoE(n_experts=2, n_active=3, expert=c.Dense(d_ff=1)), "n_active=3 exceeds n_experts=2"),
        (lambda: c.Head(transform="swish"), "transform='swish'"),
        (lambda: c.Head(width=0), "Head.width=0"),
        (lambda: c.Head(transform_bias=False), "give transform or width too"),
        (lambda: c.Embedding(n_segments=-1), "n_segments=-1"),
        (lambda: c.Embedding(width=0), "Embedding.width=0"),
        (lambda: c.Embedding(width=3, project="first"), "project='first' is not known"),
        (lambda: c.Embedding(project="before_positions"), "give width too"),
    ],
)
def test_impossible_parts_are_refused(make, words):
    with pytest.raises(c.ConfigError) as caught:
        make()
    assert words in str(caught.value)


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
