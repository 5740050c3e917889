from xml.etree import ElementTree

from glassformer.studio import mathml as module
from glassformer.studio.mathml import mathml, pieces


def test_a_formula_is_wellformed_mathml():
    root = ElementTree.fromstring(mathml(r"\frac{a}{b} + \sqrt{c}", True))
    assert root.tag.endswith("math")
    assert root.attrib["display"] == "block"


def test_a_formula_that_cannot_be_read_is_escaped_text(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(module.converter, "mathml", fail)
    module.mathml.cache_clear()
    assert "&lt;script&gt;" in mathml("<script>")
    module.mathml.cache_clear()


def test_a_text_comes_in_pieces():
    parts = pieces("For $x$ we have <b>: $$y$$")
    assert [set(part) for part in parts] == [{"text"}, {"mathml", "display"}, {"text"}, {"mathml", "display"}]
    assert parts[2]["text"] == " we have <b>: "
    assert (parts[1]["display"], parts[3]["display"]) == (False, True)


def test_text_in_a_formula_never_becomes_an_element():
    root = ElementTree.fromstring(mathml(r"\text{<script>alert(1)</script>}"))
    assert not [element for element in root.iter() if element.tag.endswith("script")]
