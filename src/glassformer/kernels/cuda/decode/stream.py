"""Weights in the order in which the blocks of the persistent kernel use them: a stream of stages for each block.

Blocks form clusters. A cluster has the heads cluster, cluster + clusters, ..., and a part of the hidden units. A block
has, for each layer: some rows of the query, key and value projections of its cluster's heads; its share of the rows of
the output projection (columns of the cluster's heads); some rows of the up projection; the same share of the rows of
the down projection (columns of the cluster's hidden units). Then it has some rows of the head. Each of these starts
with a new stage.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer import config as c
from glassformer.shapes import Float, Int, Shaped

AIM = 12288
"""Target size of a stage in bytes."""
MEMORY, DECLARED = 227 * 1024, 48 * 1024
"""Bytes of shared memory of a block (H100, H200), and how many its code can declare; the ring has the rest."""
LONGEST, SHORTEST = 16, 4
"""Stages in the ring: about 200 KB of weights are in flight to each multiprocessor."""


def _up(number: int, unit: int) -> int:
    return -(-number // unit)


@dataclass(frozen=True)
class Layout:
    """Sizes of the weight stream of one model on one GPU; stream.cuh and decode.cu explain them."""

    config: c.DecoderConfig
    dtype: torch.dtype
    clusters: int
    neighbours: int
    warps: int

    @property
    def blocks(self) -> int:
        return self.clusters * self.neighbours

    @property
    def gated(self) -> int:
        return int(isinstance(self.config.feedforward, c.Gated))

    @property
    def of_head(self) -> int:
        """Rows of the query, key and value projections of one head."""
        return 2 * self.config.d_head + self.config.d_value

    @property
    def macros(self) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        cfg, size, n = self.config, self.dtype.itemsize, self.neighbours
        wide = max(1, AIM // (cfg.d_model * size))
        header = _up(wide * 4, 16) * 16
        heads, hidden = _up(cfg.n_heads, self.clusters), _up(cfg.d_ff, self.blocks)
        hidden = _up(hidden * n, 8) * 8 // n if 8 % n == 0 else hidden
        longest = max(header + wide * cfg.d_model * size, heads * cfg.d_value * size, hidden * n * size)
        stage = _up(longest, 128) * 128
        rows = {"QKV": _up(heads * self.of_head, n), "UP": hidden * (1 + self.gated),
                "HEAD": _up(cfg.vocab_size, self.blocks)}  # fmt: skip
        stages = {name: _up(count, wide) for name, count in rows.items()}
        for name, width in (("OUT", heads * cfg.d_value), ("DOWN", hidden * n)):
            stages[name] = _up(cfg.d_model // n, stage // (width * size))
        return {
            "CLUSTERS": self.clusters, "NEIGHBOURS": n, "STAGE": stage, "HEADER": header, "WIDE_ROWS": wide,
            "RING": min(LONGEST, (MEMORY - self.declared) // stage), "HEADS_EACH": heads, "HIDDEN_EACH": hidden,
            **{f"{name}_ROWS": count for name, count in rows.items()},
            "LAYER_STAGES": sum(stages[name] for name in ("QKV", "OUT", "UP", "DOWN")),
            **{f"{name}_STAGES": count for name, count in stages.items()},
        }  # fmt: skip

    @property
    def declared(self) -> int:
        """Upper bound of the bytes of shared memory that the code declares."""
        cfg, n = self.config, self.neighbours
        heads, lines = _up(cfg.n_heads, self.clusters), _up(cfg.d_model // n, 3)
        vectors = max(cfg.d_model, heads * cfg.d_value) + 2 * cfg.d_model + (3 * self.warps + 3) * lines
        hidden = _up(cfg.d_ff, self.blocks) * n + 8
        of_heads = (heads + 1) * self.of_head + heads * n * (2 + cfg.d_value) + self.warps * (2 + cfg.d_value)
        return 4 * (vectors + hidden + of_heads) + 1024

    @property
    def fits(self) -> bool:
        """Whether a multiprocessor has enough shared memory for a block."""
        return self.declared <= DECLARED and self.macros["RING"] >= SHORTEST

    def empty(self, device: torch.device) -> Shaped[Tensor, "blocks stages bytes"]:
        """Return an empty buffer for the streams of all blocks."""
        m = self.macros
        stages = self.config.n_layers * m["LAYER_STAGES"] + m["HEAD_STAGES"]
        return torch.zeros(self.blocks, stages, m["STAGE"], dtype=torch.uint8, device=device)


def fill(out: Shaped[Tensor, "blocks stages bytes"], layout: Layout, held: dict[str, Any]) -> None:
    """Copy the stacked weights of a model (pack.stacked_weights) into the streams."""
    cfg, m, blocks = layout.config, layout.macros, layout.blocks
    body = out[:, : cfg.n_layers * m["LAYER_STAGES"]].unflatten(1, (cfg.n_layers, m["LAYER_STAGES"]))
    of_phase, at = {}, 0
    for name in ("QKV", "OUT", "UP", "DOWN"):
        of_phase[name] = body[:, :, at : at + m[f"{name}_STAGES"]]
        at += m[f"{name}_STAGES"]
    device = out.device
    which = _qkv_rows(layout).to(device)
    _wide(of_phase["QKV"], layout, _taken(held["w_qkv"], which), _taken(held["b_qkv"], which))
    which = _hidden_rows(layout).to(device)
    _wide(of_phase["UP"], layout, _taken(held["w_up"], which), _taken(held["b_up"], which))
    heads = _taken(held["w_out"].mT, _head_columns(layout).to(device))  # L, clusters, columns, D
    _narrow(of_phase["OUT"], layout, heads)
    spare = layout.blocks * m["HIDDEN_EACH"] - cfg.d_ff
    _narrow(of_phase["DOWN"], layout, F.pad(held["w_down"].mT, (0, 0, 0, spare)).unflatten(1, (layout.clusters, -1)))
    spare = blocks * m["HEAD_ROWS"] - cfg.vocab_size
    head = F.pad(held["head"], (0, 0, 0, spare)).unflatten(0, (blocks, -1))
    bias = held["head_bias"] if held["head_bias"].numel() > 1 else held["head_bias"].expand(cfg.vocab_size)
    tail = out[:, cfg.n_layers * m["LAYER_STAGES"] :].unsqueeze(1)
    _wide(tail, layout, head[None], F.pad(bias, (0, spare)).unflatten(0, (blocks, -1))[None])


def _taken(rows: Tensor, which: Int[Tensor, "..."]) -> Tensor:
    """Select indices of the second dimension of (L, n, ...); zeros for index -1."""
    found = rows.index_select(1, which.flatten().clamp(min=0)).unflatten(1, which.shape)
    return found.masked_fill_((which < 0).view(1, *which.shape, *[1] * (rows.dim() - 2)), 0)


def _wide(
    region: Tensor, layout: Layout, rows: Float[Tensor, "L blocks n D"], bias: Float[Tensor, "L blocks n"]
) -> None:
    """Write rows of D weights: each stage holds the biases of its rows, then the rows, as many as fit."""
    m, size = layout.macros, layout.dtype.itemsize
    spare = region.shape[2] * m["WIDE_ROWS"] - rows.shape[2]
    rows = F.pad(rows, (0, 0, 0, spare)).unflatten(2, (-1, m["WIDE_ROWS"])).flatten(3).transpose(0, 1)
    shifts = F.pad(bias, (0, spare)).unflatten(2, (-1, m["WIDE_ROWS"])).transpose(0, 1)
    begin = m["HEADER"]
    region[..., begin : begin + rows.shape[-1] * size].view(layout.dtype).copy_(rows)
    region[..., : m["WIDE_ROWS"] * 4].view(torch.float32).copy_(shifts)


def _narrow(region: Tensor, layout: Layout, columns: Float[Tensor, "L clusters W D"]) -> None:
    """Write rows of the output or down projection, cut to the columns of the cluster, as many per stage as fit."""
    m, size, width = layout.macros, layout.dtype.itemsize, columns.shape[2]
    fit = m["STAGE"] // (width * size)
    rows = columns.mT.unflatten(2, (layout.neighbours, -1))  # L, clusters, neighbours, rows, W
    rows = F.pad(rows, (0, 0, 0, region.shape[2] * fit - rows.shape[3])).unflatten(3, (-1, fit)).flatten(4)
    rows = rows.permute(1, 2, 0, 3, 4).flatten(0, 1)
    region[..., : fit * width * size].view(layout.dtype).copy_(rows)


def _qkv_rows(layout: Layout) -> Int[Tensor, "blocks n"]:
    """Return which rows of the stacked projections each block has; -1 for none."""
    cfg, m = layout.config, layout.macros
    k, u, group = cfg.d_head, cfg.d_value, cfg.n_heads // cfg.n_kv_heads
    keys, values = cfg.n_heads * k, (cfg.n_heads + cfg.n_kv_heads) * k
    lists = []
    for cluster in range(layout.clusters):
        rows: list[int] = []
        for head in range(cluster, cfg.n_heads, layout.clusters):
            g = head // group
            rows += [*range(head * k, (head + 1) * k), *range(keys + g * k, keys + (g + 1) * k)]
            rows += range(values + g * u, values + (g + 1) * u)
        lists.append(rows + [-1] * (m["QKV_ROWS"] * layout.neighbours - len(rows)))
    return torch.tensor(lists).unflatten(1, (layout.neighbours, -1)).flatten(0, 1)


def _head_columns(layout: Layout) -> Int[Tensor, "clusters W"]:
    """Return which columns of the output projection belong to the heads of each cluster; -1 for none."""
    cfg, each = layout.config, layout.macros["HEADS_EACH"]
    heads = torch.arange(each)[None] * layout.clusters + torch.arange(layout.clusters)[:, None]
    columns = heads[..., None] * cfg.d_value + torch.arange(cfg.d_value)
    return columns.masked_fill((heads >= cfg.n_heads)[..., None], -1).flatten(1)


def _hidden_rows(layout: Layout) -> Int[Tensor, "blocks n"]:
    """Return which rows of the up projection each block has: each unit, followed by its gate if there is one."""
    cfg, each = layout.config, layout.macros["HIDDEN_EACH"]
    units = torch.arange(layout.blocks * each).unflatten(0, (layout.blocks, each))
    rows = torch.stack([units, units + cfg.d_ff], -1) if layout.gated else units[..., None]
    return rows.masked_fill((units >= cfg.d_ff)[..., None], -1).flatten(1)
