"""Text that breaks a page which does not escape it, and a reader that notices."""

import re
from html.parser import HTMLParser
from urllib.parse import unquote
from xml.etree import ElementTree

HOSTILE = (
    """</script><script>x()</script><b onload="x" style='y'>&amp;\x00\x0c\ud800 """
    """"quoted" 'single' </svg></pre></style>"""
)
VISIBLE = HOSTILE.replace("\x00", "\ufffd").replace("\x0c", "\ufffd").replace("\ud800", "\ufffd")
ALLOWED = {
    *("div", "p", "b", "br", "span", "code", "details", "summary", "img", "ul", "li"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}
"""Elements of a display in a notebook. Code hosts keep all of them."""
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Reader(HTMLParser):
    """Checks that elements are nested, and collects what tests ask for."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append((tag, given))
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[name] for name in ("href", "src", "xlink:href") if given.get(name)]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page: str) -> Reader:
    """Parse a page and check its nesting."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def assert_escaped(page: str, same_page_with_a_plain_word: str) -> None:
    """The hostile text is shown as text: the page has the same elements and attributes as with a plain word."""
    reader, plain = read(page), read(same_page_with_a_plain_word)
    assert [(tag, sorted(given)) for tag, given in reader.tags] == [(tag, sorted(given)) for tag, given in plain.tags]
    assert not any(tag == "script" for tag, _ in reader.tags)
    assert not any(name.startswith("on") for _, given in reader.tags for name in given)
    assert VISIBLE in "".join(reader.text)
    assert not {"\x00", "\x0c", "\ud800"} & set(page)
    page.encode("utf-8")


def assert_static_fragment(fragment: str, most: int = 200_000) -> Reader:
    """A display for a notebook: no script, no style sheet, no names that could clash, nothing fetched, not too long."""
    reader = read(fragment)
    assert {tag for tag, _ in reader.tags} <= ALLOWED
    assert not {name for _, given in reader.tags for name in given} - {
        "style",
        "src",
        "alt",
        "width",
        "open",
        "colspan",
    }
    for link in reader.links:
        kind, _, data = link.partition(",")
        assert kind == "data:image/svg+xml"
        assert_static_svg(unquote(data))
    assert len(fragment.encode()) <= most
    return reader


def assert_static_svg(svg: str) -> None:
    """An SVG that is valid XML, runs nothing and refers only to itself."""
    for element in ElementTree.fromstring(svg).iter():
        assert element.tag.rpartition("}")[2] not in ("script", "foreignObject", "a", "iframe")
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            assert not name.endswith("href") or value.startswith(("#", "data:image/png;base64,"))
            assert "url(" not in value.replace("url(#", "")
        assert not re.search(r"@import|url\((?!#)", element.text or "")


def assert_self_contained(page: str) -> None:
    """Nothing is loaded, nothing runs, and the content security policy would forbid both."""
    reader = read(page)
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert all(link.startswith(("#", "data:")) for link in reader.links)
    policy = next(given["content"] for tag, given in reader.tags if tag == "meta" and "http-equiv" in given)
    assert policy.startswith("default-src 'none';")
    assert "script" not in policy
