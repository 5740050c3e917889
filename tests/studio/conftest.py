"""A studio in this process with five small models, and a client that asks it."""

import contextlib

import pytest
from starlette.testclient import TestClient

import glassformer as gf
from glassformer import config as c
from glassformer.studio import Settings
from glassformer.studio.app import create_app
from tests import folders
from tests.chat import models as chat_models
from tests.studio.page import Opened, opened, served
from tests.studio.serving import Asker, serving


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """Folders named `tiny` (decoder, byte tokenizer), `both` (encoder), `pair` (encoder-decoder), `table` (learned) and
    `chatty` (decoder with a chat template)."""
    root = tmp_path_factory.mktemp("models")
    folders.write(root / "tiny")
    small = {"vocab_size": 37, "d_model": 24, "n_layers": 2, "feedforward": c.Dense(d_ff=20), "max_len": 48}
    heads = c.Attention(n_heads=4, n_kv_heads=2, d_head=8)
    gf.save(gf.build(c.EncoderConfig(attention=c.Attention(n_heads=4), init_std=0.3, **small)), root / "both", "glass")
    pair = c.Seq2SeqConfig(n_encoder_layers=2, attention=heads, init_std=0.3, position=c.T5Bias(), **small)
    gf.save(gf.build(pair), root / "pair", "glass")
    gf.save(gf.build(c.DecoderConfig(attention=heads, init_std=0.3, **small)), root / "table", "glass")
    chat_models.write(root / "chatty")
    return [root / name for name in ("tiny", "both", "pair", "table", "chatty")]


@pytest.fixture(scope="session")
def app(model_folders, tmp_path_factory):
    return create_app(Settings(tuple(model_folders), folder=tmp_path_factory.mktemp("studio"), warm=False))


@pytest.fixture(scope="session")
def studio(app):
    return app.state.studio


@pytest.fixture(scope="session")
def models(studio):
    return studio.models


@pytest.fixture(scope="session")
def client(app):
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as opened:
        yield opened


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """`glass serve` as a process of its own."""
    with serving(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="session")
def page_folder(tmp_path_factory):
    """Where the studio of the page tests keeps its runs."""
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="session")
def address(page_folder, model_folders):
    """One studio for all tests of the page, with the four small models next to the bundled ones."""
    with served(page_folder, models=tuple(model_folders)) as found:
        yield found


OPEN = contextlib.ExitStack()
"""Holds the browser while tests of the page follow one another."""
BROWSERS: list[Opened] = []


@pytest.fixture(scope="module")
def browser(address, model_folders):
    """A browser, which the next module of page tests uses as well, because starting one takes seconds."""
    if not BROWSERS:
        BROWSERS.append(OPEN.enter_context(opened(address)))
        BROWSERS[0].folders = {folder.name: folder for folder in model_folders}
    yield BROWSERS[0]
    BROWSERS[0].close_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Close the browser when other tests follow: playwright's loop is in the way of tests that run their own."""
    try:
        return (yield)
    finally:
        if BROWSERS and (nextitem is None or "test_page_" not in nextitem.nodeid):
            BROWSERS.clear()
            OPEN.close()


@pytest.fixture
def well_behaved(browser):
    """No console error, no exception, no request to elsewhere."""
    yield
    assert browser.problems == []


@pytest.fixture
def site(browser):
    """The browser for a test that opens pages of its own."""
    yield browser
    assert browser.close_all() == []


@pytest.fixture(scope="session")
def ask(client):
    return Asker(client)
