"""The page holds everything, escaped, and draws the leak."""

from html.parser import HTMLParser

from glassformer.doctor.html import to_html
from glassformer.doctor.report import Report
from tests.doctor.test_report import FAILED, SICK


class Balanced(HTMLParser):
    """Every tag that is opened is closed."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_draws_the_leak():
    page = to_html(
        Report("<thing>", "decoder", (SICK,), (FAILED,), ("a note",), 1.0, {"leak": [[1.0, 0.5], [1.0, 1.0]]})
    )
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert "&lt;thing&gt;" in page
    assert "<thing>" not in page
    assert page.count("<rect") == 4
    assert "output 0, input 1: 0.5" in page
    assert "http" not in page
    assert 'name="viewport"' in page
    assert ">input that changed</text>" in page
