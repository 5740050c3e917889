"""Variants and sound models for the tests of this folder, by the name of their style and bug."""

from glassformer.doctor.probes import subject_of
from glassformer.doctor.probes.structure.recording import recorded
from tests.bugs.styles.variants import STYLES


def styled(style: str, bug: str | None = None, **changes):
    """A subject and its recording."""
    module, kind = STYLES[style]
    subject = subject_of(module.build(bug, **changes), kind=kind)
    subject.warmth = 6.0
    return subject, recorded(subject)


def bugs_of(diagnosis: str) -> list[tuple[str, str]]:
    """(style, bug) of every variant with a diagnosis."""
    return [(style, bug) for style in SOUND for bug, name in STYLES[style][0].BUGS.items() if name == diagnosis]


SOUND = ("nano", "hugging", "functional", "contracted", "encoder", "pair")
"""Styles that were written for the probes of this folder."""
