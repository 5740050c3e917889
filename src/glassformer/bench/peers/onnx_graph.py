"""GPT-2 as an ONNX graph with its cache as inputs and outputs, and BERT with the fused operators of ONNX Runtime.

    ids (B,T), positions (T), past_k_i and past_v_i (B,H,P,K)
        -> logits (B,V) of the last position, present_k_i and present_v_i (B,H,P+T,K)

Opset 20: LayerNormalization and Gelu are operators of their own there. Matrices stay as GPT-2 stores them, (in, out),
as MatMul wants them; the head is the token table transposed, a second copy, because an initialiser cannot be read both
ways.
"""

from typing import Any

import numpy as np

from glassformer.bench.peers.base import library

OPSET = 20
IR_VERSION = 9
"""The file format of that opset's time: newer ones are refused by older runtimes."""


class Graph:
    """Nodes and initialisers under construction; every method returns the name of what it computes."""

    def __init__(self) -> None:
        self.onnx = library("onnx")
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def weight(self, name: str, value: Any) -> str:
        self.weights.append(self.onnx.numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"{kind.lower()}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def linear(self, x: str, name: str, tensors: dict[str, Any]) -> str:
        product = self.op("MatMul", x, self.weight(f"{name}.weight", tensors[f"{name}.weight"]))
        return str(self.op("Add", product, self.weight(f"{name}.bias", tensors[f"{name}.bias"])))

    def norm(self, x: str, name: str, tensors: dict[str, Any], eps: float) -> str:
        names = [self.weight(f"{name}.{part}", tensors[f"{name}.{part}"]) for part in ("weight", "bias")]
        return str(self.op("LayerNormalization", x, *names, axis=-1, epsilon=eps))

    def named(self, value: str, name: str) -> str:
        """Give the last node's output a name that callers use."""
        node = self.nodes[-1]
        assert node.output[0] == value
        node.output[0] = name
        return name


def build(cfg: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """The ONNX model of a Hugging Face GPT-2: its config.json and its tensors without prefix."""
    graph, eps = Graph(), float(cfg["layer_norm_epsilon"])
    n_heads, n_layers, width = cfg["n_head"], cfg["n_layer"], cfg["n_embd"]
    for name, values in {
        "split_heads": [0, 0, n_heads, width // n_heads], "join_heads": [0, 0, width], "first": [0], "second": [1],
        "last": [-1], "end": [2**31], "axis_positions": [2], "axis_time": [1],
    }.items():  # fmt: skip
        graph.weight(name, np.array(values, dtype=np.int64))
    graph.weight("zero", np.array(0, dtype=np.int64))
    graph.weight("one", np.array(1, dtype=np.int64))
    graph.weight("open", np.array(0.0, dtype=np.float32))
    graph.weight("shut", np.array(-1e30, dtype=np.float32))
    graph.weight("scale", np.array((width // n_heads) ** -0.5, dtype=np.float32))
    token = graph.op("Gather", graph.weight("wte", tensors["wte.weight"]), "ids")
    position = graph.op("Gather", graph.weight("wpe", tensors["wpe.weight"]), "positions")
    x = graph.op("Add", token, position)
    mask = _causal_mask(graph)
    for i in range(n_layers):
        normed = graph.norm(x, f"h.{i}.ln_1", tensors, eps)
        x = graph.op("Add", x, _attention(graph, normed, i, mask, tensors))
        normed = graph.norm(x, f"h.{i}.ln_2", tensors, eps)
        hidden = graph.op("Gelu", graph.linear(normed, f"h.{i}.mlp.c_fc", tensors), approximate="tanh")
        x = graph.op("Add", x, graph.linear(hidden, f"h.{i}.mlp.c_proj", tensors))
    final = graph.op("Slice", x, "last", "end", "axis_time")
    final = graph.norm(graph.op("Squeeze", final, "axis_time"), "ln_f", tensors, eps)
    logits = graph.op("MatMul", final, graph.weight("head", tensors["wte.weight"].T))
    graph.named(logits, "logits")
    return _model(graph, cfg)


def _causal_mask(graph: Graph) -> str:
    """(T,S): 0 where key s is not after query t, else -1e30, which softmax maps to 0. Computed once for all layers."""
    past = graph.op("Shape", "past_k_0", start=2, end=3)
    new = graph.op("Shape", "ids", start=1, end=2)
    total = graph.op("Squeeze", graph.op("Add", past, new), "first")
    keys = graph.op("Unsqueeze", graph.op("Range", "zero", total, "one"), "first")
    queries = graph.op("Unsqueeze", "positions", "second")
    return str(graph.op("Where", graph.op("LessOrEqual", keys, queries), "open", "shut"))


def _attention(graph: Graph, x: str, i: int, mask: str, tensors: dict[str, Any]) -> str:
    """Softmax(q kᵀ / sqrt(K) + mask) v over the past and the new keys."""
    joined = graph.linear(x, f"h.{i}.attn.c_attn", tensors)
    parts = graph.op("Split", joined, outputs=3, axis=-1, num_outputs=3)
    q, k, v = (graph.op("Transpose", graph.op("Reshape", p, "split_heads"), perm=[0, 2, 1, 3]) for p in parts)
    keys = graph.named(graph.op("Concat", f"past_k_{i}", k, axis=2), f"present_k_{i}")
    values = graph.named(graph.op("Concat", f"past_v_{i}", v, axis=2), f"present_v_{i}")
    scores = graph.op("MatMul", graph.op("Mul", q, "scale"), graph.op("Transpose", keys, perm=[0, 1, 3, 2]))
    pattern = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
    mixed = graph.op("Transpose", graph.op("MatMul", pattern, values), perm=[0, 2, 1, 3])
    return graph.linear(graph.op("Reshape", mixed, "join_heads"), f"h.{i}.attn.c_proj", tensors)


def _model(graph: Graph, cfg: dict[str, Any]) -> Any:
    helper, kinds = graph.onnx.helper, graph.onnx.TensorProto
    n_heads, width = cfg["n_head"], cfg["n_embd"] // cfg["n_head"]

    def tensor(name: str, shape: list[Any], kind: int = kinds.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    inputs = [tensor("ids", ["B", "T"], kinds.INT64), tensor("positions", ["T"], kinds.INT64)]
    outputs = [tensor("logits", ["B", cfg["vocab_size"]])]
    for i in range(cfg["n_layer"]):
        for part in "kv":
            inputs.append(tensor(f"past_{part}_{i}", ["B", n_heads, "P", width]))
            outputs.append(tensor(f"present_{part}_{i}", ["B", n_heads, "S", width]))
    made = helper.make_graph(graph.nodes, "gpt2", inputs, outputs, graph.weights)
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(made, opset_imports=[opset], ir_version=IR_VERSION, producer_name="glassformer")


def build_bert(cfg: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """The ONNX model of a Hugging Face BERT without its head: ids and mask (B,T) to states (B,T,D).

    Attention, sums with norms, and GELU are the operators to which ONNX Runtime's own optimizer fuses an export.
    """
    graph, eps = Graph(), float(cfg["layer_norm_eps"])
    fused: dict[str, Any] = {"domain": "com.microsoft"}
    prefix = "bert." if "bert.embeddings.word_embeddings.weight" in tensors else ""
    tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    length = graph.op("Shape", "ids", start=1, end=2)
    graph.weight("first", np.array([0], dtype=np.int64))
    table = tensors["embeddings.position_embeddings.weight"] + tensors["embeddings.token_type_embeddings.weight"][:1]
    tokens = graph.op("Gather", graph.weight("tokens", tensors["embeddings.word_embeddings.weight"]), "ids")
    x = graph.op("Add", tokens, graph.op("Slice", graph.weight("positions", table), "first", length, "first"))
    x = graph.norm(x, "embeddings.LayerNorm", tensors, eps)
    mask = graph.op("Cast", "mask", to=graph.onnx.TensorProto.INT32)
    for i in range(cfg["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        parts = [f"{layer}.attention.self.{name}" for name in ("query", "key", "value")]
        joined = np.concatenate([tensors[f"{name}.weight"].T for name in parts], 1)
        biases = np.concatenate([tensors[f"{name}.bias"] for name in parts])
        mixed = graph.op(
            "Attention", x, graph.weight(f"{layer}.qkv", joined), graph.weight(f"{layer}.qkv_bias", biases), mask,
            num_heads=cfg["num_attention_heads"], **fused,
        )  # fmt: skip
        x = _add_norm(graph, x, mixed, f"{layer}.attention.output", tensors, eps)
        up = graph.op("MatMul", x, _transposed(graph, f"{layer}.intermediate.dense", tensors))
        bias = graph.weight(f"{layer}.up_bias", tensors[f"{layer}.intermediate.dense.bias"])
        x = _add_norm(graph, x, graph.op("BiasGelu", up, bias, **fused), f"{layer}.output", tensors, eps)
    graph.named(x, "states")
    helper, kinds = graph.onnx.helper, graph.onnx.TensorProto
    inputs = [helper.make_tensor_value_info(name, kinds.INT64, ["B", "T"]) for name in ("ids", "mask")]
    outputs = [helper.make_tensor_value_info("states", kinds.FLOAT, ["B", "T", cfg["hidden_size"]])]
    made = helper.make_graph(graph.nodes, "bert", inputs, outputs, graph.weights)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=IR_VERSION, producer_name="glassformer")


def _transposed(graph: Graph, name: str, tensors: dict[str, Any]) -> str:
    return graph.weight(f"{name}.weight", tensors[f"{name}.weight"].T)


def _add_norm(graph: Graph, x: str, branch: str, name: str, tensors: dict[str, Any], eps: float) -> str:
    """Project a branch, add it and its bias to x, and normalise."""
    projected = graph.op("MatMul", branch, _transposed(graph, f"{name}.dense", tensors))
    parts = [
        graph.weight(f"{name}.LayerNorm.{part}", tensors[f"{name}.LayerNorm.{part}"]) for part in ("weight", "bias")
    ]
    bias = graph.weight(f"{name}.dense.bias", tensors[f"{name}.dense.bias"])
    return str(graph.op("SkipLayerNormalization", x, projected, *parts, bias, domain="com.microsoft", epsilon=eps))
