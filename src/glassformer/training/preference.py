"""What a run on conversations needs before its first step: its template in the run folder, and reference logits.

Direct preference optimization compares the model with the one that it started from. The log-probabilities of that one
are computed once, before the first step, and kept in RUN/reference.safetensors for a run that is resumed.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from glassformer.config import ConfigError
from glassformer.files import write_atomically
from glassformer.training.data.packing import Row, collate
from glassformer.training.objective import sequence_logprobs

if TYPE_CHECKING:
    from glassformer.training.data.chats import ChatData
    from glassformer.training.loop import TrainState

FILE = "reference.safetensors"


def prepare_chat_run(state: "TrainState", data: Any, resumed: bool) -> None:
    """Write the files of the template into the run folder, and compute or read the reference of preferences."""
    chats: ChatData = data
    folder = Path(state.run.out)

    def write() -> None:
        for name, text in chats.files().items():
            write_atomically(folder / name, text.encode())

    state.group.on_main(write)
    if not chats.preferences:
        return
    rows = {"train": chats.train, "val": chats.val}
    if resumed:
        chats.references = _read(folder / FILE, {name: len(some) for name, some in rows.items()})
        return
    chats.references = {name: reference_logprobs(state, some) for name, some in rows.items()}
    state.group.on_main(lambda: write_atomically(folder / FILE, save(chats.references)))


def _read(path: Path, sizes: dict[str, int]) -> dict[str, Tensor]:
    try:
        held: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): without it the run cannot be resumed.") from None
    if {name: len(values) for name, values in held.items()} != sizes:
        raise ConfigError(f"{path} belongs to other data than the run has now: restore the data of the run.")
    return held


@torch.no_grad()
def reference_logprobs(state: "TrainState", rows: list[Row]) -> Tensor:
    """Return the log-probabilities (rows, 2) of chosen and rejected sequences under the current model.

    Ranks share the rows of each batch, and get the values of all.
    """
    group = state.group
    run, size = state.run, max(1, state.run.loop.batch // state.run.loop.accumulate // 2)
    found = []
    was_training = state.model.training
    state.model.eval()
    try:
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            batch = collate(some, [[i] for i in range(len(some))], run.context, torch.zeros(len(some), 2))
            share = batch.share(group.rank, group.world)
            with state.autocast():
                values = group.run(sequence_logprobs, state.model, share.to(state.device)).float().cpu()
            found.append(values.view(-1, 2) if share.reference is not None else torch.zeros(0, 2))
    finally:
        state.model.train(was_training)
    by_batch = zip(*group.gather(found), strict=True)
    return torch.cat([values for ranks in by_batch for values in ranks])
