import pytest

from glassformer import config as c

EXPERT = c.Dense(8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: c.MoE(0, 1, EXPERT), "n_experts=0"),
        (lambda: c.MoE(2, 3, EXPERT), "n_active=3 exceeds n_experts=2"),
        (lambda: c.MoE(4, 2, EXPERT, shared_gate=True), "give shared"),
        (lambda: c.MoE(5, 2, EXPERT, router=c.Router(groups=2)), "n_experts=5 is not a multiple of router.groups=2"),
        (lambda: c.MoE(4, 2, EXPERT, router=c.Router(groups=4)), "groups of 1 experts"),
        (lambda: c.MoE(8, 5, EXPERT, router=c.Router(groups=2)), "raise router.top_groups"),
        (lambda: c.Router(score="tanh"), "score='tanh'"),
        (lambda: c.Router(scale=0.0), "scale=0.0 must be positive"),
        (lambda: c.Router(groups=2, top_groups=3), "top_groups=3 exceeds groups=2"),
    ],
)
def test_impossible_mixtures_are_refused(make, words):
    with pytest.raises(c.ConfigError, match=words):
        make()
