"""The windows of a text, and the scores of tokens."""

import numpy as np
import pytest

from glassformer.evaluation.score import windows


@pytest.mark.parametrize("n", [2, 3, 9, 10, 33])
@pytest.mark.parametrize(("context", "stride"), [(1, 1), (4, 1), (4, 2), (4, 4), (8, 8), (64, 3)])
def test_every_token_but_the_first_is_a_target_once(n, context, stride):
    tokens = np.arange(n)
    found = list(windows(tokens, context, stride))
    targets = [window.tokens[len(window.tokens) - window.scored :].tolist() for window in found]
    assert [target for part in targets for target in part] == list(range(1, n))
    assert {len(window.tokens) for window in found} == {min(context, n - 1) + 1}
    # all but those of the first window see at least context - stride tokens
    assert all(window.scored <= stride for window in found[1:])


def test_a_stride_of_the_context_gives_the_windows_of_the_harness():
    utils = pytest.importorskip("lm_eval.utils", reason="lm_eval is not installed: pip install '.[eval]'")
    for n, context in ((23, 5), (20, 5), (3, 5), (11, 1)):
        theirs = utils.get_rolling_token_windows(list(range(1, n + 1)), 0, context, 1)
        pairs = [utils.make_disjoint_window(window) for window in theirs]
        ours = [
            (w.tokens[: len(w.tokens) - w.scored].tolist(), w.tokens[len(w.tokens) - w.scored :].tolist())
            for w in windows(np.arange(n + 1), context, context)
        ]
        assert ours == [(list(before), list(after)) for before, after in pairs]
