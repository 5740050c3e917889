"""Text is found by name or path and read as it is; what is no text is refused with the place."""

import hashlib
import http.server
import os
import threading
import time
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from glassformer.training.data import corpus
from glassformer.training.data.corpus import Corpus, DataError, Document, find

SHARED = Path(os.environ.get("GLASSFORMER_DATA", "../shared/data")) / corpus.SHAKESPEARE


def refusal(act):
    with pytest.raises(DataError) as refused:
        act()
    message = str(refused.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def read(data: bytes) -> str:
    return "".join(Document("x", content=data).read())


def file_with(tmp_path, data, name="text.txt"):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


# reading


@hypothesis.given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",))), st.integers(1, 7))
def test_chunk_boundaries_never_cut_a_character(text, chunk):
    hypothesis.assume(not text.startswith("\ufeff"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHUNK", chunk)
        document = Document("x", content=text.encode())
        assert "".join(document.read()) == text
    assert document.hash() == hashlib.sha256(text.encode()).hexdigest()


@hypothesis.given(st.binary(max_size=30), st.integers(1, 7))
def test_bytes_are_refused_exactly_when_python_refuses_them_and_at_the_same_offset(data, chunk):
    data = data.replace(b"\0", b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHUNK", chunk)
        try:
            wrong, expected = None, data.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            wrong, expected = error.start, ""
        if wrong is None:
            assert read(data) == expected
        else:
            assert f"offset {wrong} " in refusal(lambda: read(data))


def test_line_ends_stay_and_a_byte_order_mark_goes():
    assert read(b"\xef\xbb\xbfa\r\nb\rc\n") == "a\r\nb\rc\n"


def test_reading_is_lazy_and_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 1000)
    file = file_with(tmp_path, b"x" * 5000)
    assert [len(text) for text in Document("x", file).read()] == [1000] * 5


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"good text\xffbad", ["byte 0xff", "offset 9", "iconv"]),
        (b"caf\xc3", ["byte 0xc3", "offset 3", "unexpected end"]),
        (b"\xff\xfea\0", ["NUL", "offset 3"]),
        (b"\x89PNG\r\n\x1a\n", ["byte 0x89", "offset 0"]),
        (b"PK\x03\x04\0\0", ["NUL byte at offset 4", "binary"]),
    ],
)
def test_binary_and_foreign_encodings_are_refused_with_file_and_offset(tmp_path, data, words):
    file = file_with(tmp_path, data)
    message = refusal(lambda: list(Document("x", file).read()))
    assert all(word in message for word in [*words, str(file)])


def test_a_nul_far_into_a_file_has_its_offset_in_the_file(tmp_path):
    file = file_with(tmp_path, b"x" * (corpus.CHUNK + 123) + b"\0")
    assert f"offset {corpus.CHUNK + 123}," in refusal(lambda: list(Document("x", file).read()))


# finding


def test_a_file_is_a_corpus_of_one(tmp_path):
    file = file_with(tmp_path, b"abc", "poem.txt")
    for name in (file, str(file)):
        found = find(name)
        assert (found.name, found.paths) == ("poem", (file,))
        assert [document.name for document in found.documents()] == ["poem.txt"]


def test_a_folder_is_its_visible_files_sorted_by_path(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/c.md", ".hidden", ".git/config", "a/.cache/x", "empty.txt", "B.txt"):
        file_with(tmp_path, b"" if name == "empty.txt" else name.encode(), name)
    documents = find(tmp_path).documents()
    assert [document.name for document in documents] == ["B.txt", "a/b/c.md", "a/z.txt", "b.txt"]
    assert ["".join(document.read()) for document in documents] == ["B.txt", "a/b/c.md", "a/z.txt", "b.txt"]


@pytest.mark.parametrize("name", ["", "no/such/file.txt", "shakespear", "/dev/null"])
def test_what_is_no_corpus_is_refused_with_what_is(name):
    message = refusal(lambda: find(name))
    assert "shakespeare or embedded" in message


def test_empty_files_and_folders_are_refused(tmp_path):
    assert "has no files" in refusal(lambda: find(tmp_path))
    file = file_with(tmp_path, b"")
    assert f"{file} is empty (0 bytes)" in refusal(lambda: find(file).documents())
    assert "only empty files" in refusal(lambda: find(tmp_path).documents())


def test_a_file_that_went_away_is_a_sentence(tmp_path):
    found = find(file_with(tmp_path, b"abc"))
    (tmp_path / "text.txt").unlink()
    assert "cannot be read" in refusal(found.documents)
    assert "cannot be read" in refusal(lambda: list(Document("x", tmp_path / "text.txt").read()))
    assert "cannot be read" in refusal(lambda: Document("x", tmp_path / "text.txt").hash())


def test_the_embedded_corpus_is_english_that_every_python_has():
    found = find("embedded")
    (document,) = found.documents()
    text = "".join(document.read())
    assert len(text) > 300_000
    assert text.split().count("the") > 3_000
    assert text == "".join(find("embedded").documents()[0].read())


# shakespeare


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("GLASSFORMER_DATA", raising=False)
    monkeypatch.setattr(corpus, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(corpus, "URL", "http://127.0.0.1:9/nothing-listens-here")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def genuine(monkeypatch):
    """A short text that counts as tiny Shakespeare."""
    text = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"
    monkeypatch.setattr(corpus, "SIZE", len(text))
    monkeypatch.setattr(corpus, "SHA256", hashlib.sha256(text).hexdigest())
    return text


@pytest.fixture
def server(cache, genuine, monkeypatch):
    class Handler(http.server.BaseHTTPRequestHandler):
        reply, status, asked = genuine, 200, 0

        def do_GET(self):
            Handler.asked += 1
            self.send_response(Handler.status)
            self.end_headers()
            self.wfile.write(Handler.reply)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(corpus, "URL", f"http://127.0.0.1:{running.server_port}/input.txt")
        yield Handler
        running.shutdown()


def test_shakespeare_comes_from_the_data_folder_first(cache, genuine, tmp_path, monkeypatch):
    file = file_with(tmp_path, genuine, f"data/{corpus.SHAKESPEARE}")
    file_with(cache, genuine, corpus.SHAKESPEARE)
    monkeypatch.setenv("GLASSFORMER_DATA", str(tmp_path / "data"))
    assert find("shakespeare") == Corpus("shakespeare", (file,))


def test_then_from_the_cache(cache, genuine, tmp_path, monkeypatch):
    file = file_with(cache, genuine, corpus.SHAKESPEARE)
    monkeypatch.setenv("GLASSFORMER_DATA", str(tmp_path / "nothing"))
    assert find("shakespeare").paths == (file,)


def test_then_it_is_downloaded_once(cache, server, genuine):
    assert find("shakespeare").paths == find("shakespeare").paths == (cache / corpus.SHAKESPEARE,)
    assert (cache / corpus.SHAKESPEARE).read_bytes() == genuine
    assert server.asked == 1
    assert os.listdir(cache) == [corpus.SHAKESPEARE]


def test_a_damaged_cache_is_downloaded_again(cache, server, genuine):
    file = file_with(cache, genuine[:-1] + b"?", corpus.SHAKESPEARE)
    assert find("shakespeare").paths == (file,)
    assert file.read_bytes() == genuine


@pytest.mark.parametrize("reply", [b"", b"<html>log in to the hotel</html>", b"x" * 61, b"y" * 100_000])
def test_a_wrong_download_is_refused_and_leaves_nothing(cache, server, reply):
    server.reply = reply
    assert "is not tiny Shakespeare" in refusal(lambda: find("shakespeare"))
    assert not cache.exists()


def test_a_refusing_server_is_a_sentence(cache, server):
    server.status = 404
    assert "cannot be downloaded" in refusal(lambda: find("shakespeare"))


def test_without_network_the_sentence_says_which_file_to_put_where(cache, tmp_path, monkeypatch):
    start = time.monotonic()
    message = refusal(lambda: find("shakespeare"))
    assert time.monotonic() - start < 60
    assert str(cache / corpus.SHAKESPEARE) in message
    assert corpus.URL in message
    assert "--set data.corpus=embedded" in message
    monkeypatch.setenv("GLASSFORMER_DATA", str(tmp_path / "mine"))
    assert f"or in {tmp_path / 'mine'}" in refusal(lambda: find("shakespeare"))


def test_a_silent_server_is_given_up_soon(cache, monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(corpus, "URL", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        monkeypatch.setattr(corpus, "CONNECT_SECONDS", 0.2)
        start = time.monotonic()
        assert "cannot be downloaded" in refusal(lambda: find("shakespeare"))
        assert time.monotonic() - start < 30


def test_another_text_under_that_name_is_refused(cache, tmp_path, monkeypatch):
    file = file_with(tmp_path, b"not by him", corpus.SHAKESPEARE)
    monkeypatch.setenv("GLASSFORMER_DATA", str(tmp_path))
    assert f"{file} is not tiny Shakespeare" in refusal(lambda: find("shakespeare"))


def test_a_cache_that_cannot_be_written_is_a_sentence(cache, server):
    cache.write_text("a file where the folder should be")
    message = refusal(lambda: find("shakespeare"))
    assert "GLASSFORMER_DATA" in message
    assert "--set data.corpus=embedded" in message


def test_the_cache_is_the_users_with_and_without_platformdirs(monkeypatch):
    import sys

    with_it = corpus.cache_folder()
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert with_it.name == "glassformer"
    assert corpus.cache_folder() == Path.home() / ".cache" / "glassformer"


@pytest.mark.skipif(not SHARED.exists(), reason="tinyshakespeare.txt is not here; set GLASSFORMER_DATA")
def test_the_recorded_size_and_hash_are_those_of_the_real_file(monkeypatch):
    monkeypatch.setenv("GLASSFORMER_DATA", str(SHARED.parent))
    assert find("shakespeare").paths == (SHARED,)
