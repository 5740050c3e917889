"""The sites of a model: their names, their shapes, and why a model lacks one.

A site is a named tensor in the forward pass; `model.context.Tap` describes each. Its name starts with the name of
the module that computes it: `blocks.3.attention.pattern` is the attention pattern of
`model.get_submodule("blocks.3.attention")`. The names that TransformerLens uses are accepted too (`lens.aliases`).
"""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from glassformer import config as c
from glassformer.errors import GlassformerError, listing
from glassformer.lens.aliases import aliases_of
from glassformer.model import Model


class LensError(GlassformerError):
    """A request that the lens cannot serve. The message gives the value, the rule and the remedy."""


class MissingSite(LensError, KeyError):  # noqa: N818
    """A site that does not exist or was not recorded. It is also a KeyError, as `Mapping.get` expects."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Site:
    """A named tensor: its shape in the letters of docs/shapes.md and, once recorded, in numbers."""

    name: str
    letters: str
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        numbers = "" if self.shape is None else f"  ({','.join(map(str, self.shape))})"
        return f"{self.name}  ({self.letters}){numbers}"


class Sites(Mapping[str, Site]):
    """Sites by name in the order of computation, printed as a table."""

    def __init__(self, sites: Iterable[Site]):
        self._sites = {site.name: site for site in sites}

    def __getitem__(self, name: str) -> Site:
        return self._sites[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __str__(self) -> str:
        rows = [str(site).split("  ") for site in self._sites.values()]
        widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(3)]
        return "\n".join(
            "  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=False)).rstrip() for row in rows
        )

    __repr__ = __str__


ATTENTION = {
    **{"normed": "B,T,D", "q": "B,H,T,K", "k": "B,G,S,K", "v": "B,G,S,U", "scores": "B,H,T,S", "pattern": "B,H,T,S"},
    **{"heads": "B,H,T,U", "out": "B,T,D"},
}
FEEDFORWARD = {
    **{"normed": "B,T,D", "pre": "B,T,F", "post": "B,T,F", "router": "B,T,E", "choice": "B,T,A", "out": "B,T,D"},
}


def sites_of(model: Model | c.ModelConfig) -> Sites:
    """Return every site of a model. The model is not run."""
    return _sites(model if isinstance(model, c.ModelConfig) else model.config)


@lru_cache(maxsize=32)
def _sites(config: c.ModelConfig) -> Sites:
    return Sites(site for site, absent in _catalogue(config) if not absent)


def stacks_of(config: c.ModelConfig) -> dict[str, int]:
    """Return the site prefix of each stack and its number of layers."""
    if isinstance(config, c.Seq2SeqConfig):
        return {"encoder.": config.n_encoder_layers, "decoder.": config.n_layers}
    return {"": config.n_layers}


def output_stack(config: c.ModelConfig) -> str:
    """Return the site prefix of the stack whose output the head reads."""
    return list(stacks_of(config))[-1]


def _catalogue(config: c.ModelConfig) -> Iterator[tuple[Site, str]]:
    """Yield every possible site with the reason why this model lacks it; the reason is empty if it exists."""
    for prefix, layers in stacks_of(config).items():
        yield Site(f"{prefix}embed", "B,T,D"), ""
        for layer in range(layers):
            for name, letters, absent in _block_catalogue(config, cross=prefix == "decoder."):
                yield Site(f"{prefix}blocks.{layer}.{name}", letters), absent
        yield Site(f"{prefix}final", "B,T,D"), ""
    yield Site("logits", "B,T,V"), "" if config.head else "the model has no head (config.head is None)"


def _block_catalogue(config: c.ModelConfig, cross: bool) -> Iterator[tuple[str, str, str]]:
    post = "with placement='post' a sublayer reads the residual stream itself: see resid_pre and resid_mid"
    unnormed = post if config.placement == "post" else ""
    parallel = "with placement='parallel' both sublayers share one norm of resid_pre: see attention.normed"
    shared_norm = parallel if config.placement == "parallel" else ""
    yield "resid_pre", "B,T,D", ""
    for name, letters in ATTENTION.items():
        yield f"attention.{name}", letters, unnormed if name == "normed" else ""
    for name, letters in ATTENTION.items():
        absent = "" if cross else "only the decoder of an encoder-decoder has cross-attention"
        yield f"cross.{name}", letters, absent or (unnormed if name == "normed" else "")
    attention_only = isinstance(config.feedforward, c.NoFeedForward)
    without = "the blocks of this model have attention only and no feed-forward" if attention_only else ""
    yield "resid_mid", "B,T,D", shared_norm
    for name, letters in FEEDFORWARD.items():
        absent = unnormed or shared_norm if name == "normed" else ""
        if name in ("pre", "post") and isinstance(config.feedforward, c.MoE):
            absent = "each expert receives only its own tokens, so there is no single tensor: see feedforward.choice"
        if name in ("router", "choice") and not isinstance(config.feedforward, c.MoE):
            absent = "only a mixture of experts has a router"
        yield f"feedforward.{name}", letters, without or absent
    yield "resid_post", "B,T,D", ""


def select(config: c.ModelConfig, wanted: str | Iterable[str] | None) -> list[str]:
    """Return the sites that names or patterns such as "blocks.*.attention.pattern" select; None selects all."""
    known = sites_of(config)
    if wanted is None:
        return list(known)
    chosen: set[str] = set()
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        chosen.update(fnmatch.filter(known, pattern) or _select_aliases(config, pattern))
    return [name for name in known if name in chosen] if chosen else []


def _select_aliases(config: c.ModelConfig, pattern: str) -> list[str]:
    """Return the sites whose TransformerLens names match; raise MissingSite if there are none."""
    known, aliases = sites_of(config), aliases_of(config)
    names = fnmatch.filter(aliases, pattern)
    found = [aliases[name].site for name in names if not aliases[name].refused and aliases[name].site in known]
    return found or [site_name(config, names[0] if names else pattern)]


def site_name(config: c.ModelConfig, name: str) -> str:
    """Return the site that a name means: the name of a site itself, or a name that TransformerLens uses for it."""
    known, alias = sites_of(config), aliases_of(config).get(name)
    if name in known:
        return name
    if alias is not None and alias.refused:
        raise MissingSite(f"{name} of TransformerLens does not exist in this model: {alias.refused}.")
    if alias is None or alias.site not in known:
        raise missing_site(config, name if alias is None else alias.site)
    return alias.site


def missing_site(config: c.ModelConfig, wanted: str) -> MissingSite:
    """Return the error for a name that is not a site of this model, with the reason or the nearest names."""
    known, stacks = list(sites_of(config)), stacks_of(config)
    seq2seq = isinstance(config, c.Seq2SeqConfig)
    prefix = next((p for p in ("encoder.", "decoder.") if wanted.startswith(p)), "")
    if seq2seq and not prefix and re.match(r"blocks\.|embed$|final$", wanted):
        return MissingSite(f"{wanted} could be in either stack: write encoder.{wanted} or decoder.{wanted}.")
    if prefix and not seq2seq:
        bare = wanted.removeprefix(prefix)
        return MissingSite(f"{wanted} is a site of an encoder-decoder, which this model is not: write {bare}.")
    layer = re.match(rf"{re.escape(prefix)}blocks\.(\d+)\.", wanted)
    if layer and prefix in stacks and int(layer[1]) >= stacks[prefix]:
        last = stacks[prefix] - 1
        return MissingSite(f"{wanted} is beyond the last layer: layers are 0 to {last}, use one of those.")
    for site, absent in _catalogue(config):
        if absent and fnmatch.fnmatchcase(site.name, wanted):
            return MissingSite(f"{wanted} does not exist in this model: {absent}.")
    close = difflib.get_close_matches(wanted, [*known, *aliases_of(config)], n=3, cutoff=0.5)
    hint = f"Did you mean {listing(close)}?" if close else "sites_of(model) lists them all."
    return MissingSite(f"{wanted!r} is not a site. {hint}")
