"""ONNX Runtime on a graph that is built here; int8 by its own dynamic quantisation of the matrices, per channel."""

from pathlib import Path
from typing import Any

from glassformer.bench.peers.base import Mark, Order, arrays, config_of, convert_once, library
from glassformer.bench.peers.onnx_graph import build, build_bert

FILE, DATA = "model.onnx", "model.data"


def folder(order: Order) -> Path:
    return order.root / f"onnx-{order.precision}"


def prepare(order: Order) -> None:
    """Build the graph, and quantise it for int8."""

    cfg = config_of(order)
    make = build if cfg["model_type"] == "gpt2" else build_bert

    def convert(made: Path) -> None:
        plain = made.with_name("plain") if order.precision == "int8" else made
        plain.mkdir()
        library("onnx").save_model(
            make(cfg, arrays(order)), plain / FILE, save_as_external_data=True,
            all_tensors_to_one_file=True, location=DATA,
        )  # fmt: skip
        if order.precision == "int8":
            quantization = library("onnxruntime.quantization")
            made.mkdir()
            quantization.quantize_dynamic(
                plain / FILE, made / FILE, op_types_to_quantize=["MatMul"], per_channel=True,
                weight_type=quantization.QuantType.QInt8, use_external_data_format=True,
                # types of results of fused operators cannot be inferred: everything here is float32
                extra_options={"MatMulConstBOnly": True, "DefaultTensorType": library("onnx").TensorProto.FLOAT},
            )  # fmt: skip

    convert_once(folder(order), convert)


class Peer:
    """A greedy loop over the session: outputs of a step are bound as inputs of the next and never copied."""

    def __init__(self, order: Order):
        package = library("onnxruntime")
        self.package, self.version = package, str(package.__version__)
        self.cfg = config_of(order)
        self.session = _session(package, order)
        self.names = [f"{part}_{i}" for i in range(self.cfg["n_layer"]) for part in "kv"]

    def generate(self, prompts: tuple[tuple[int, ...], ...], new: int, mark: Mark) -> list[list[int]]:
        import numpy as np

        heads = self.cfg["n_head"]
        empty = np.zeros((len(prompts), heads, 0, self.cfg["n_embd"] // heads), dtype=np.float32)
        past: dict[str, Any] = {name: self.package.OrtValue.ortvalue_from_numpy(empty) for name in self.names}
        ids, positions = np.array(prompts, dtype=np.int64), np.arange(len(prompts[0]), dtype=np.int64)
        found = []
        for _ in range(new):
            binding = self.session.io_binding()
            binding.bind_cpu_input("ids", ids)
            binding.bind_cpu_input("positions", positions)
            for name in self.names:
                binding.bind_ortvalue_input(f"past_{name}", past[name])
            binding.bind_output("logits", "cpu")
            for name in self.names:
                binding.bind_output(f"present_{name}", "cpu")
            self.session.run_with_iobinding(binding)
            logits, *present = binding.get_outputs()
            past = dict(zip(self.names, present, strict=True))
            ids = logits.numpy().argmax(-1)[:, None]
            positions = positions[-1:] + 1
            found.append(ids[:, 0].tolist())
            mark()
        return [list(row) for row in zip(*found, strict=True)]


class Encoder:
    """A padded batch with its mask."""

    def __init__(self, order: Order):
        package = library("onnxruntime")
        self.version, self.session = str(package.__version__), _session(package, order)

    def encode(self, texts: tuple[tuple[int, ...], ...]) -> list[Any]:
        import numpy as np

        lengths = [len(text) for text in texts]
        ids = np.zeros((len(texts), max(lengths)), dtype=np.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        mask = (np.arange(ids.shape[1]) < np.array(lengths)[:, None]).astype(np.int64)
        (states,) = self.session.run(None, {"ids": ids, "mask": mask})
        return [row[:n] for row, n in zip(states, lengths, strict=True)]


def _session(package: Any, order: Order) -> Any:
    options = package.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = order.threads, 1
    options.graph_optimization_level = package.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    return package.InferenceSession(str(folder(order) / FILE), options, providers=["CPUExecutionProvider"])
