"""`glass serve`: the studio, a local page for a model."""

import contextlib
import socket
import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from glassformer import pretrained
from glassformer.cli.common import InputError, check_parent, option
from glassformer.errors import install, missing

if TYPE_CHECKING:
    from glassformer.studio import Settings


HELP = {
    "model": "A model folder or a hub name to serve next to the bundled models. A checkpoint of a run is named "
    "RUN/CHECKPOINT, such as code/best. Default: the bundled models only.",
    "adapter": "Folder of a LoRA or DoRA adapter to serve as one more model. It is merged into the model of --model, "
    "or else into the one that it names. Default: none.",
    "port": "TCP port to listen on; 0 chooses a free one.",
    "host": "Address to listen on. An address that other machines can reach needs --token.",
    "token": "A secret that every request must carry. Default: none, which only a local address allows.",
    "folder": "Folder for uploaded texts and training runs. Default: $GLASSFORMER_STUDIO, or else the user's "
    "data folder.",
    "open": "Open the page in a browser once the server answers.",
}


def serve(
    model: Annotated[tuple[str, ...], option(HELP["model"], "DIR|NAME")] = (),
    adapter: Annotated[tuple[str, ...], option(HELP["adapter"], "DIR")] = (),
    port: Annotated[int, option(HELP["port"])] = 8000,
    host: Annotated[str, option(HELP["host"])] = "127.0.0.1",
    token: Annotated[str | None, option(HELP["token"], "TEXT")] = None,
    folder: Annotated[Path | None, option(HELP["folder"], "DIR")] = None,
    open: Annotated[bool, option(HELP["open"])] = True,
) -> int:
    """Serve the studio, a local page for models, and an OpenAI-compatible API. Ctrl-C stops it."""
    require_extras()
    from glassformer.studio import Settings
    from glassformer.studio.settings import default_folder

    if not 0 <= port <= 65535:
        raise InputError(f"--port {port} must be between 0 and 65535; 0 chooses a free port.")
    adapters = adapted(adapter, model)
    settings = Settings(model_folders(model), adapters, host, port, token, folder or default_folder())
    kept = settings.folder
    check_parent(f"--folder {kept}", kept / ".studio" if kept.is_dir() else kept, makes_folders=True)
    with contextlib.closing(listen(host, port)) as listening:
        run(settings, listening, open)
    return 0


def require_extras() -> None:
    """Raise InputError if the packages of the studio are not installed."""
    if absent := missing("studio"):
        raise InputError(f"the studio needs {', '.join(absent)}: {install('studio')}.")


def model_folders(names: Sequence[str]) -> tuple[Path, ...]:
    """Return the folders of the models to serve. The bundled models are served in any case."""
    folders = []
    for name in names:
        path = Path(name).expanduser()
        if not path.is_dir() and name not in pretrained.FOLDERS:
            from glassformer.weights import resolve  # imports torch, which a server with folders only loads later

            path = resolve(name)
        if path.is_dir():
            folders.append(path)
    return tuple(folders)


def adapted(adapters: Sequence[str], names: Sequence[str]) -> tuple[tuple[Path, Path | None], ...]:
    """Return the folders of adapters, each with the model into which it is merged (None: the one that it names)."""
    if not adapters:
        return ()
    if len(names) > 1:
        raise InputError(f"--adapter {adapters[0]} needs one --model, or none if it names its own; {len(names)} given.")
    from glassformer.weights import resolve
    from glassformer.weights.formats.adapter import check_fits

    base = resolve(names[0]) if names else None
    found = tuple((resolve(adapter), base) for adapter in adapters)
    for folder, _ in found:
        check_fits(folder, base)  # before the server starts, not when the model is first chosen
    return found


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that a port in use is reported before anything is started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(128)  # connections that arrive before the server runs wait for it
    except (OSError, OverflowError) as error:
        made.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--host {host} --port {port} cannot be used ({reason}): give another port.") from None
    return made


def run(settings: "Settings", listening: socket.socket, open_page: bool) -> None:
    """Serve until interrupted."""
    import uvicorn

    from glassformer.studio.app import create_app

    config = uvicorn.Config(
        create_app(settings),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=3,
        ws="none",
    )
    address = page_address(settings, listening.getsockname()[1])

    class Announced(uvicorn.Server):
        """A server that prints its address once it accepts requests."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                print(f"the studio is at {address}", flush=True)
                if open_page and sys.stdout.isatty():
                    threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()

    Announced(config).run(sockets=[listening])


def page_address(settings: "Settings", port: int) -> str:
    """Return the address to open. It contains the token, which the browser then keeps as a cookie."""
    shown = "127.0.0.1" if settings.is_local or settings.host in ("0.0.0.0", "::") else settings.host
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"?token={settings.token}" if settings.token else "")
