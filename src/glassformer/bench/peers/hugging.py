"""transformers: `generate` with its growing cache, and with the static one and a compiled forward."""

from collections.abc import Callable
from typing import Any

from glassformer.bench.peers.base import SAMPLING, Mark, Order, config_of, library


def quiet_package() -> Any:
    """Return transformers, which then reports errors only."""
    package = library("transformers")
    package.logging.set_verbosity_error()
    package.logging.disable_progress_bar()
    return package


class Times:
    """A streamer that records the time of every token."""

    def __init__(self, mark: Callable[[], None]):
        self.mark, self.seen = mark, 0

    def put(self, value: Any) -> None:
        if self.seen:  # the first call hands over the prompt
            self.mark()
        self.seen += 1

    def end(self) -> None:
        pass


class Peer:
    def __init__(self, order: Order):
        import torch

        torch.set_num_threads(order.threads)
        package = quiet_package()
        self.version, self.device = str(package.__version__), order.device
        dtype = getattr(torch, order.precision)
        config = config_of(order)
        # config.json need not say so: some classes have it as their default
        self.is_seq2seq = bool(package.AutoConfig.from_pretrained(order.model).is_encoder_decoder)
        kind = package.AutoModelForSeq2SeqLM if self.is_seq2seq else package.AutoModelForCausalLM
        self.model = kind.from_pretrained(order.model, dtype=dtype).eval().to(order.device)
        settings: dict[str, Any] = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
        for name in ("forced_bos_token_id", "forced_eos_token_id"):  # which our engine reads in config.json
            settings[name] = config.get(name)
        if order.name == "transformers-compiled":
            # as its documentation advises; on a CPU there are no CUDA graphs to reduce the overhead with
            mode = "default" if order.device == "cpu" else "reduce-overhead"
            compiling = package.CompileConfig(fullgraph=True, mode=mode)
            compiling._compile_all_devices = True  # on a CPU it is off unless asked for
            settings |= {"cache_implementation": "static", "compile_config": compiling}
            if order.task == "prefill":  # generate compiles the steps after the prompt only
                self.model.forward = torch.compile(self.model.forward)
        # a setting that is None is read from the model's own, which would end a sequence early
        self.model.generation_config.eos_token_id = None
        self.settings = package.GenerationConfig(**settings)

    def generate(
        self, prompts: tuple[tuple[int, ...], ...], new: int, mark: Mark, sampled: bool = False, beams: int = 1
    ) -> list[list[int]]:
        import torch

        ids = torch.tensor(prompts, device=self.device)
        self.settings.update(max_new_tokens=new, do_sample=sampled, num_beams=beams, **(SAMPLING if sampled else {}))
        streamer = None if beams > 1 else Times(mark)  # it has none for beams
        made = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=self.settings, streamer=streamer
        )
        rows: list[list[int]] = made[:, 1 if self.is_seq2seq else ids.shape[1] :].tolist()
        return rows


class Encoder:
    """A padded batch with its mask, as `transformers` computes it."""

    def __init__(self, order: Order):
        import torch

        torch.set_num_threads(order.threads)
        package = quiet_package()
        self.version, self.device = str(package.__version__), order.device
        model = package.AutoModel.from_pretrained(order.model, dtype=getattr(torch, order.precision))
        self.model = model.eval().to(order.device)

    def encode(self, texts: tuple[tuple[int, ...], ...]) -> list[Any]:
        import torch

        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        lengths = torch.tensor([len(text) for text in texts])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        with torch.inference_mode():
            given = {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}
            states = self.model(**given).last_hidden_state.cpu()
        return [row[:n].float() for row, n in zip(states, lengths.tolist(), strict=True)]
