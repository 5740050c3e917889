"""The progress of one student: a small JSON file on this machine, replaced in one step. Nothing is sent anywhere."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from glassformer.files import write_atomically
from glassformer.theory.course.problem import CourseError

VERSION = 1


@dataclass
class Record:
    """What happened with one item."""

    solved: bool = False
    attempts: int = 0
    hints: int = 0
    """Hints shown for the present numbers."""
    draw: int = 0
    """The seed of the present numbers."""


@dataclass
class Progress:
    """Records by the id of a problem or an exercise."""

    file: Path
    records: dict[str, Record] = field(default_factory=dict)

    def record(self, id: str) -> Record:
        return self.records.setdefault(id, Record())

    def solved(self, id: str) -> bool:
        return id in self.records and self.records[id].solved

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        records = {id: asdict(record) for id, record in sorted(self.records.items()) if record != Record()}
        write_atomically(self.file, json.dumps({"version": VERSION, "items": records}, indent=1).encode())


def default_file() -> Path:
    """Return the file of this user: $GLASSFORMER_COURSE, or course.json in the user's data folder."""
    configured = os.environ.get("GLASSFORMER_COURSE")
    if configured:
        return Path(configured)
    import platformdirs

    return Path(platformdirs.user_data_dir("glassformer", appauthor=False)) / "course.json"


def load(file: Path | None = None) -> Progress:
    """Read the progress; a file that does not exist is an empty progress."""
    file = file or default_file()
    if not file.exists():
        return Progress(file)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}")
        records = {str(id): Record(**facts) for id, facts in data["items"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CourseError(f"{file} is not a progress file ({error}): move it away, or name another one.") from None
    return Progress(file, records)
