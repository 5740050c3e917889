"""nanoGPT from a checkout runs the same model: a checkout in miniature, with nanoGPT's names."""

import pytest

from glassformer.bench.peers import nanogpt
from tests.bench import checkout, tiny

pytestmark = pytest.mark.usefixtures("clean_imports")


def test_its_tokens_are_those_of_the_engine(subject, tmp_path):
    order = tiny.order(subject, "nanogpt", "nanogpt", checkout=str(checkout.nanogpt(tmp_path)))
    marks = []
    made = nanogpt.Peer(order).generate(order.prompts, order.new, lambda: marks.append(1))
    assert made == tiny.engine_ids(subject, order)
    assert len(marks) == order.new


def test_another_model_under_its_name_is_refused(subject, tmp_path):
    text = checkout.NANOGPT.replace("self.c_fc", "self.c_other")
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(ValueError, match="nanoGPT has other tensors"):
        nanogpt.Peer(tiny.order(subject, "nanogpt", "nanogpt", checkout=str(tmp_path)))
