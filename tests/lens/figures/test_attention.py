"""Attention is drawn the right way round, no large weight is lost, and the stripe is where induction heads attend."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from matplotlib.collections import PatchCollection

from glassformer.lens.figure import drawing
from glassformer.lens.figures import FigureError, attention_head, attention_sheet, head_scores, induction_stripe
from glassformer.lens.figures.attention import draw_attention, draw_map, draw_mask, expected_stripe, max_pooled
from glassformer.lens.heads import induction_score
from tests.lens.figures.cases import drawn


@given(
    hnp.arrays(np.float64, st.tuples(st.integers(1, 40), st.integers(1, 40)), elements=st.floats(0, 1)),
    st.integers(1, 12),
)
def test_pooling_keeps_every_maximum_and_its_position(map, most):
    small = max_pooled(map, most)
    assert max(small.shape) <= most
    step = -(-max(map.shape) // most)
    for row, column in np.argwhere(map > 0):
        assert small[row // step, column // step] >= map[row, column]
    assert set(small.ravel()) <= set(map.ravel())


def one_hot(T: int, S: int, *cells: tuple[int, int]) -> np.ndarray:
    made = np.zeros((T, S))
    for cell in cells:
        made[cell] = 1.0
    return made


CALLS = ("imshow", "pcolor", "pcolormesh", "matshow")


def test_only_one_function_draws_heat_maps():
    import glassformer

    source = Path(glassformer.__file__).parent
    texts = {path.relative_to(source).as_posix(): path.read_text() for path in source.rglob("*.py")}
    found = {name: sum(text.count(f"{call}(") for call in CALLS) for name, text in texts.items()}
    assert {name: n for name, n in found.items() if n} == {"lens/figures/attention.py": 1}


def test_a_map_has_the_scale_and_the_colours_of_its_values():
    with drawing("x") as figure:
        axes = figure.canvas.subplots(1, 4)
        amount = draw_map(axes[0], [[0.0, 1.0]])
        signed = draw_map(axes[1], torch.zeros(2, 2), -3.0, 3.0)
        weights = draw_attention(axes[2], np.eye(2))
        draw_mask(axes[3], np.tri(3, dtype=bool), "sees")
    assert (amount.get_cmap().name, amount.get_clim()) == ("viridis", (0, 1))
    assert (signed.get_cmap().name, signed.get_clim()) == ("RdBu_r", (-3, 3))
    assert float(weights.norm(0.25)) == 0.5  # square root
    assert [text.get_text() for text in axes[3].texts] == ["sees"] * 6
    assert {text.get_position() for text in axes[3].texts} == {(j, i) for i in range(3) for j in range(i + 1)}


def test_cells_of_nan_are_left_out():
    with drawing("x") as figure:
        image = draw_attention(figure.canvas.subplots(), np.where(np.tri(3), 0.5, np.nan))
    assert np.ma.getmaskarray(image.get_array()).tolist() == (np.tri(3) == 0).tolist()


def test_queries_run_down_and_keys_to_the_right():
    figure = attention_head(one_hot(5, 5, (3, 1)), list("abcde"))
    ax = figure.axes[0]
    assert ax.get_xlabel().startswith("key")
    assert ax.get_ylabel().startswith("query")
    assert ax.get_ylim() == (4.5, -0.5)  # row 0 on top
    assert ax.get_xlim() == (-0.5, 4.5)
    assert np.argwhere(np.asarray(ax.images[0].get_array()) == 1).tolist() == [[3, 1]]
    assert [label.get_text() for label in ax.get_yticklabels()] == list("abcde")


def test_a_long_head_is_pooled_but_keeps_its_coordinates():
    ax = attention_head(one_hot(2000, 2000, (1500, 20))).axes[0]
    assert max(ax.images[0].get_array().shape) <= 900
    assert list(ax.images[0].get_extent()) == [-0.5, 1999.5, 1999.5, -0.5]
    shown = np.argwhere(np.asarray(ax.images[0].get_array()) == 1)
    assert len(shown) == 1
    assert (shown[0] * 3 // 3 * 3).tolist() == [1500, 18]


def test_the_sheet_shows_layers_down_heads_right_and_each_weight_in_its_map():
    patterns = torch.zeros(3, 4, 7, 7)
    patterns[2, 1, 5, 0] = 1.0
    figure = attention_sheet(patterns)
    ax = figure.axes[0]
    bright = np.argwhere(np.asarray(ax.images[0].get_array().filled(0)) == 1)
    down, right = (bright[:, axis].mean() for axis in (0, 1))
    places = {text.get_text(): at for at, text in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)}
    assert abs(down - places["2"]) < abs(down - places["1"])
    assert down > places["2"]  # query 5 of 7 is below the middle
    columns = {text.get_text(): at for at, text in zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)}
    assert abs(right - columns["1"]) == min(abs(right - at) for at in columns.values())
    assert right < columns["1"]  # key 0 is at the left


def test_144_heads_at_512_tokens_lose_no_single_bright_weight():
    patterns = np.zeros((12, 12, 512, 512), np.float32)
    rng = np.random.default_rng(0)
    cells = {(i, j, int(rng.integers(512)), int(rng.integers(512))) for i in range(12) for j in range(12)}
    for cell in cells:
        patterns[cell] = 1.0
    image = attention_sheet(patterns).axes[0].images[0]
    assert int((np.asarray(image.get_array().filled(0)) == 1).sum()) == 144


def test_one_layer_names_each_head():
    figure = drawn("sheet of one layer")
    assert [text.get_text() for text in figure.axes[0].texts] == [f"head {h}" for h in range(12)]
    assert "layer 7" in figure.title


@pytest.mark.parametrize("bad", [np.full((3, 3), 2.0), np.full((3, 3), -1.0)])
def test_scores_before_softmax_are_refused(bad):
    with pytest.raises(FigureError, match=r"attention weights lie in \[0, 1\]"):
        attention_head(bad)


def test_patterns_that_are_not_numbers_or_do_not_fit_their_tokens_are_refused():
    with pytest.raises(FigureError, match="9 values that are NaN or infinite"):
        attention_head(np.full((3, 3), np.nan))
    with pytest.raises(FigureError, match="2 labels for 3 keys"):
        attention_head(np.eye(3), ["a", "b"])
    with pytest.raises(FigureError, match="is empty"):
        attention_sheet(np.zeros((2, 0, 3, 3)))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_the_stripe_is_every_position_after_an_earlier_occurrence(ids):
    brute = {(t, s + 1) for t in range(len(ids)) for s in range(t) if ids[s] == ids[t]}
    found = expected_stripe(ids)
    assert set(found) == brute
    assert len(found) == len(brute)


def test_perfect_induction_is_framed_and_scores_1_and_another_head_does_not():
    ids = [7, 3, 9, 4] * 2
    perfect = torch.eye(8)
    for query, key in expected_stripe(ids):
        perfect[query] = 0
        perfect[query, key] = 1
    figure = induction_stripe(perfect, ids)
    assert "induction score 1.00" in figure.title
    frames = next(item for item in figure.axes[0].collections if isinstance(item, PatchCollection))
    corners = {tuple((path.vertices.min(0) + 0.5).tolist()) for path in frames.get_paths()}
    assert corners == {(key, query) for query, key in expected_stripe(ids)}  # x is the key
    own = torch.eye(8)
    assert f"{float(induction_score(own, torch.tensor(ids))):.2f}" == "0.00"
    assert "induction score 0.00" in induction_stripe(own, ids).title


def test_induction_needs_a_repetition_and_a_square_map():
    with pytest.raises(FigureError, match="none of the 3 tokens occurs twice"):
        induction_stripe(np.eye(3), [1, 2, 3])
    with pytest.raises(FigureError, match="one square map"):
        induction_stripe(np.eye(3)[:2], [1, 1, 1])


def test_scores_are_written_and_those_without_meaning_stay_grey():
    grid = np.array([[0.974, np.nan], [0.0, 1.0]])
    figure = head_scores({"induction": grid, "copying": None})
    first = figure.axes[0]
    assert [text.get_text() for text in first.texts] == [".97", "", ".00", "1.0"]
    assert figure.axes[1].texts[0].get_text().startswith("undefined")
    assert first.get_ylim() == (1.5, -0.5)


def test_signed_scores_are_centred_on_zero_and_shares_reach_from_0_to_1():
    figure = head_scores(
        {"share": np.array([[0.1, 0.2]]), "copying": np.array([[-0.2, 0.5]]), "nats": np.array([[2.0, 4.0]])}
    )
    limits = [ax.images[0].get_clim() for ax in figure.axes[:3]]
    assert limits == [(0, 1), (-0.5, 0.5), (0, 4)]
    with pytest.raises(FigureError, match="no scores"):
        head_scores({})
