"""List of the presets and devices that `glass size` knows: `glass size --list` and docs/presets.md."""

import re
from collections.abc import Sequence
from typing import Any

from glassformer.config import presets
from glassformer.sizing.devices import ASSUMED, DEVICES, Device
from glassformer.sizing.layout import columns, with_note, wrap
from glassformer.sizing.parameters import count

PRESETS_INTRO = "Models that `glass size NAME`, `gf.build(NAME)` and `preset = NAME` in a run file accept."
DEVICES_INTRO = "GPUs that `glass size plan --gpu NAME` accepts. A TOML file with the rates of a device works too."
DEVICES_NOTE = (
    "TFLOP/s are dense bfloat16 with float32 accumulation, without sparsity. Links are both directions together. Only "
    f"the H200 was measured. For the others a plan assumes that matmuls reach {ASSUMED['matmuls']:.0%} of the peak, "
    f"attention {ASSUMED['attention']:.0%} and memory traffic {ASSUMED['memory']:.0%} of the bandwidth, as on the H200."
)
HEADINGS = ("name", "TFLOP/s", "memory GB", "GB/s", "link GB/s", "link", "watts", "rates")


def summary(name: str) -> str:
    """Return one line about a preset: the first line of its docstring without the parameter count."""
    line = (presets.ALL[name].__doc__ or "").strip().splitlines()[0]
    return re.sub(r"[,:.]? [\d,]+ parameters(?:, [\d,]+ active)?(?=[.:,])", "", line)


def figures(device: Device) -> tuple[str, ...]:
    """Return the data sheet of a device as text, in the order of HEADINGS."""
    sheet = device.sheet
    assert sheet is not None
    return (
        device.name,
        f"{sheet.peak / 1e12:,.4g}",
        f"{sheet.gigabytes}",
        f"{sheet.bandwidth / 1e9:,.0f}",
        f"{sheet.link / 1e9:,.0f}",
        sheet.link_kind,
        f"{sheet.watts:,}",
        "measured" if device.measured else "assumed",
    )


class Catalogue:
    """All presets and devices: as text for a terminal, as a dict for JSON, or as a page of the documentation."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "presets": [
                {"name": name, "parameters": count(presets.get(name)), "summary": summary(name)} for name in presets.ALL
            ],
            "devices": [_device(device) for device in DEVICES.values()],
        }

    def text(self, width: int | None = None) -> str:
        names = max(map(len, presets.ALL))
        lines = ["PRESETS", wrap(PRESETS_INTRO, width), ""]
        for name in presets.ALL:
            lines.append(with_note(f"  {name:<{names}}  {count(presets.get(name)):>14,}", summary(name), width))
        lines += ["", "DEVICES", wrap(DEVICES_INTRO, width), ""]
        lines += columns([HEADINGS, *map(figures, DEVICES.values())], width)
        lines += ["", wrap(DEVICES_NOTE, width), "", "Sources:"]
        lines += [wrap(f"  {name}: {_document(device)}", width, "  ") for name, device in DEVICES.items()]
        return "\n".join(lines)

    def page(self) -> str:
        """Return the page docs/presets.md, in Markdown."""
        rows = [(f"`{name}`", f"{count(presets.get(name)):,}", summary(name)) for name in presets.ALL]
        described = [(*figures(device), _document(device)) for device in DEVICES.values()]
        return (
            "\n\n".join(
                [
                    "# Presets and devices",
                    "<!-- Written by `make docs` from presets.toml and sizing/devices.py: edit those, not this. -->",
                    "`glass size --list` prints the same tables.",
                    "## Presets",
                    PRESETS_INTRO,
                    _table(("name", "parameters", "model"), rows),
                    "## Devices",
                    DEVICES_INTRO,
                    _table((*HEADINGS, "source"), described),
                    DEVICES_NOTE,
                ]
            )
            + "\n"
        )


def _device(device: Device) -> dict[str, Any]:
    sheet = device.sheet
    assert sheet is not None
    return {
        "name": device.name,
        "peak_flops": sheet.peak,
        "memory_gb": sheet.gigabytes,
        "bandwidth": sheet.bandwidth,
        "link": sheet.link,
        "link_kind": sheet.link_kind,
        "watts": sheet.watts,
        "measured": device.measured,
        "source": _document(device),
    }


def _document(device: Device) -> str:
    assert device.sheet is not None
    return device.sheet.document


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
