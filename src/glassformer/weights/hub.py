"""Find the folder of a hub name: in the Hugging Face cache, or by a download."""

import os
import re
import socket
import threading
from pathlib import Path
from urllib.parse import urlparse

from glassformer.errors import install
from glassformer.weights.errors import WeightsError, pickled
from glassformer.weights.tensors import PICKLES, loads_in_transformers

FILES = ("config.json", "model.safetensors", "tokenizer.json")
PATTERNS = ("*.json", "*.safetensors", "*.txt", "tokenizer.model", "spiece.model", "*.jinja")
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_ID = re.compile(rf"{_PART}(?:/{_PART})?")
CONNECT_SECONDS = 4.0


def find(name: str | Path) -> Path:
    """Return the folder of a hub name.

    Raises:
        WeightsError: the name is not one of a model. An unreachable hub is reported within seconds.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() in PICKLES:
            known = path.name.startswith("pytorch_model") and loads_in_transformers(path.parent)
            raise pickled(f"{path} is a pickle", known)
        held = any((path.parent / name).exists() for name in (*FILES, "model.toml"))
        remedy = f"give {path.parent} instead" if held else f"give a folder with {_listed()}"
        raise WeightsError(f"{path} is a file, but a model is a folder: {remedy}.")
    text = str(name)
    if isinstance(name, Path) or not _is_id(text):
        raise WeightsError(f"{text!r} does not exist: give a folder with {_listed()}, or a hub name such as gpt2.")
    return _cached(text) or _download(text)


def _is_id(text: str) -> bool:
    """Return True if the text can be a hub name. A name that starts like a local path is never looked up online."""
    if not _ID.fullmatch(text) or ".." in text or "--" in text:
        return False
    first, _, rest = text.partition("/")
    if rest and Path(first).is_dir():
        return False
    return not text.lower().endswith((".safetensors", ".json", ".toml", ".gguf", *PICKLES))


def _listed() -> str:
    return ", ".join(FILES[:-1]) + f" and {FILES[-1]}"


def _cached(name: str) -> Path | None:
    """Return the newest complete snapshot of a model in the local cache, without using huggingface_hub."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    repository = cache / ("models--" + name.replace("/", "--"))
    reference = repository / "refs" / "main"
    snapshots = repository / "snapshots"
    named = [snapshots / reference.read_text(encoding="utf-8").strip()] if reference.is_file() else []
    others = sorted(snapshots.glob("*"), key=lambda p: p.stat().st_mtime, reverse=True) if snapshots.is_dir() else []
    return next((folder for folder in [*named, *others] if _is_complete(folder)), None)


def _is_complete(folder: Path) -> bool:
    weights = any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json"))
    return weights and (folder / "config.json").exists()


def _download(name: str) -> Path:
    put = f"put its {_listed()} in a folder and give that folder"
    try:
        import huggingface_hub
    except ImportError:
        raise WeightsError(
            f"{name!r} is not a folder here, and huggingface_hub is not installed to download it: "
            f"{install('hub')}, or {put}."
        ) from None
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise WeightsError(f"{name!r} is neither a folder nor in the cache, and HF_HUB_OFFLINE is set: {put}.")
    if not _reachable():
        raise WeightsError(f"{name!r} is not a folder here, and the hub cannot be reached to download it: {put}.")
    try:
        # subfolders hold the same weights for other frameworks
        found = huggingface_hub.snapshot_download(
            name, allow_patterns=list(PATTERNS), ignore_patterns=["*/*"], etag_timeout=CONNECT_SECONDS
        )
    except Exception as error:  # several libraries raise many types; the first line of the message is enough
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(
            f"{name!r} could not be downloaded ({reason.rstrip('.')}): check the name, or {put}."
        ) from None
    return Path(found)


def _reachable() -> bool:
    """Return True if the hub answers within CONNECT_SECONDS.

    The connection is made in a thread, because a socket timeout does not limit the DNS lookup.
    """
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True  # whether the hub can be reached is known only to the proxy
    url = urlparse(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = url.port or (80 if url.scheme == "http" else 443)
    answered = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((url.hostname or "huggingface.co", port), timeout=CONNECT_SECONDS).close()
            answered.set()
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    return answered.is_set()
