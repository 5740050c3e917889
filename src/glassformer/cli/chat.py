"""`glass chat`: talk to a model in the terminal."""

import contextlib
import dataclasses
import json as json_module
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from glassformer.cli.common import (
    BUNDLED,
    Adapter,
    Device,
    InputError,
    MinP,
    ModelSource,
    Precision,
    RepetitionPenalty,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    check_seed,
    check_writable,
    fitted,
    option,
    set_threads,
)
from glassformer.config import choices
from glassformer.errors import GlassformerError, listing

if TYPE_CHECKING:
    from glassformer.chat.session import Chat

System = Annotated[str, option("System message. Default: none, or the one that the template writes.", "TEXT")]
MaxNewTokens = Annotated[
    int | None,
    option(
        "Largest number of tokens of one answer. Default: what the context holds, at most 8192; 64 without a template.",
        "INT",
    ),
]
Engine = Annotated[
    choices.Engine,
    option(
        "Implementation. `native` is compiled kernels. `auto` uses them if they support the model and there is a "
        "compiler, and torch otherwise."
    ),
]
JsonLines = Annotated[bool, option("Print one JSON object for each answer and nothing else.")]
HELP = """\
/reset             forget the conversation
/undo              forget the last question and its answer
/system [TEXT]     show or set the system message
/set NAME=VALUE    temperature, top_k, top_p, min_p, repetition_penalty, seed or max_new_tokens
/save FILE         write the conversation as a row of JSON, which `glass train --chat` reads
/quit              end the program (also Ctrl-D)
//TEXT             send a message that begins with /
Ctrl-C             stop the answer"""


def chat(
    model: ModelSource = None,
    adapter: Adapter = None,
    system: System = "",
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    engine: Engine = "auto",
    precision: Precision = "auto",
    device: Device = "auto",
    threads: Threads = None,
    json: JsonLines = False,
) -> int:
    """Chat with a model, line by line. Commands begin with a slash, such as /help; Ctrl-C stops an answer."""
    check_seed(seed)
    from glassformer.chat.render import load_renderer
    from glassformer.chat.session import Chat
    from glassformer.cli.sample import load_to_sample
    from glassformer.generation import Sampling
    from glassformer.weights import load_tokenizer, resolve

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if threads is not None:
        set_threads(threads)
    source = model or BUNDLED
    # an adapter that was trained on conversations brings its template and the tokens of that
    template = adapter if adapter is not None and (resolve(adapter) / "chat_template.jinja").is_file() else source
    renderer = load_renderer(template)
    loaded = load_to_sample(source, precision, device, adapter)
    how: dict[str, Any] = {"engine": engine, "precision": precision}
    talk = Chat(loaded, load_tokenizer(template), renderer, sampling, seed, max_new_tokens, **how)
    talk.system = system
    if renderer is None:
        print(f"note: {source} has no chat template, so it continues your text instead of answering.", file=sys.stderr)
    elif not talk.stops:
        print(f"note: the template of {source} has no token that ends an answer.", file=sys.stderr)
    return Terminal(talk, json).run()


class Terminal:
    """Reads lines, answers messages and obeys commands."""

    def __init__(self, chat: "Chat", json: bool):
        self.chat, self.json = chat, json
        self.interactive = sys.stdin.isatty()

    def run(self) -> int:
        if self.interactive and not self.json:
            print("/help lists the commands.", file=sys.stderr)
        for line in self.lines():
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if not self.command(line[1:]):
                        return 0
                elif line.strip():
                    self.answer(line.removeprefix("/") if line.startswith("//") else line)
            except GlassformerError as error:
                if not self.interactive:
                    raise
                print(f"glass: {error}", file=sys.stderr)
        return 0

    def lines(self) -> Iterator[str]:
        """Yield the lines of the user. In a terminal, Ctrl-C abandons a line and Ctrl-D ends."""
        if not self.interactive:
            yield from (line.removesuffix("\n").removesuffix("\r") for line in sys.stdin)
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # lets `input` edit and recall lines
        while True:
            try:
                yield input("> ")
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /quit ends)", file=sys.stderr)
            except EOFError:
                print(file=sys.stderr)
                return

    def answer(self, text: str) -> None:
        """Print the answer to a message while it grows. Ctrl-C ends it; what came so far stays in the history."""
        answer = self.chat.ask(text)
        if (note := answer.note()) is not None:
            print(f"note: {note}", file=sys.stderr)
        if self.chat.answers == 0 and not self.json:
            print(fitted(f"engine: {answer.engine.text()}", sys.stderr), file=sys.stderr)
        try:
            for piece in answer:
                if not self.json:
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            answer.end()
        if not self.json:
            print(flush=True)
            return
        facts: dict[str, Any] = {"user": text, "assistant": answer.text, "finished": answer.finished}
        facts |= {"prompt_tokens": len(answer.prompt), "reused_tokens": answer.reused, "new_tokens": len(answer.new)}
        facts |= {"engine": answer.engine.to_dict()}
        facts |= {"dropped_messages": answer.dropped, "seed": answer.seed}
        print(json_module.dumps(facts, ensure_ascii=False), flush=True)

    def command(self, line: str) -> bool:
        """Obey a command; return False if the program should end."""
        name, _, rest = line.strip().partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self.say(HELP),
            "reset": lambda _: self.chat.reset(),
            "undo": self.undo,
            "system": self.system,
            "set": self.set,
            "save": self.save,
        }
        if name in ("quit", "exit"):
            return False
        if name not in commands:
            known = [f"/{one}" for one in (*commands, "quit")]
            raise InputError(f"/{name} is not a command: use {listing(known)}, or // for a message that begins with /.")
        commands[name](rest.strip())
        return True

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)

    def undo(self, rest: str) -> None:
        if not self.chat.undo():
            raise InputError("/undo has nothing to forget: there is no question yet.")

    def system(self, rest: str) -> None:
        if rest:
            self.chat.system = rest
        else:
            self.say(self.chat.system or "(no system message)")

    def set(self, rest: str) -> None:
        names = [*(field.name for field in dataclasses.fields(self.chat.sampling)), "seed", "max_new_tokens"]
        name, equals, value = (part.strip() for part in rest.partition("="))
        if not equals or name not in names:
            raise InputError(f"/set {rest} must read NAME=VALUE, and NAME must be {listing(names)}.")
        whole = name in ("top_k", "seed", "max_new_tokens")
        try:
            number = int(value) if whole else float(value)
        except ValueError:
            raise InputError(f"/set {rest}: {name} must be a {'whole ' if whole else ''}number.") from None
        if name in ("seed", "max_new_tokens"):
            if not (0 if name == "seed" else 1) <= number < 2**63:
                raise InputError(f"/set {rest}: {name} must be {'0' if name == 'seed' else '1'} or more.")
            setattr(self.chat, name, number)
            return
        changed: dict[str, Any] = {name: number}
        try:
            self.chat.sampling = dataclasses.replace(self.chat.sampling, **changed)
        except ValueError as error:
            raise InputError(str(error)) from None

    def save(self, rest: str) -> None:
        from glassformer.files import write_atomically

        if not rest:
            raise InputError("/save needs the name of a file, such as /save talk.jsonl.")
        path = Path(rest).expanduser()
        if path.exists():  # there is no --force here
            raise InputError(f"/save {path} already exists: give another name.")
        check_writable("/save", path)
        row = json_module.dumps({"messages": self.chat.messages}, ensure_ascii=False)
        write_atomically(path, f"{row}\n".encode())
        count = len(self.chat.messages)
        self.say(f"{path} has {count} {'message' if count == 1 else 'messages'}.")
