"""Peak memory of `glass data prepare` on a large generated JSONL file, also after a kill -9 in the middle.

    python -m glassformer.bench.developer.prepare_memory --bytes 2e9 --processes 2 [--tokenizer byte] [--kill-after 20]

It prints one JSON object: the peak resident memory of the largest process (the command or one of its processes), and
the tokens. With --kill-after, the command and its processes are killed after so many seconds, once, and started again.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from glassformer.bench.commands import parser

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "naïve", "dog", "ate", "hat", "of", "man", "in"]


def generate(file: Path, size: int) -> int:
    """Write rows of about 2,000 characters until the file has `size` bytes. Return their number."""
    rows = 0
    with file.open("wb") as out:
        while out.tell() < size:
            block = []
            for _ in range(500):
                text = " ".join(WORDS[(rows * 7 + i * i) % len(WORDS)] for i in range(20))
                block.append(
                    json.dumps({"id": rows, "text": f"Row {rows}.\n" + (text + ".\n") * 24}, ensure_ascii=False)
                )
                rows += 1
            out.write(("\n".join(block) + "\n").encode())
    return rows


def main() -> int:
    """Generate, prepare, print."""
    options = parser(__doc__)
    options.add_argument("--bytes", type=float, default=2e9)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--tokenizer", default="byte")
    options.add_argument("--kill-after", type=float, default=0.0)
    given = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prepare-memory-"))
    try:
        rows = generate(folder / "x.jsonl", int(given.bytes))
        command = [sys.executable, "-m", "glassformer", "data", "prepare", str(folder / "x.jsonl"), "--json"]
        command += [
            "--out",
            str(folder / "tokens"),
            "--processes",
            str(given.processes),
            "--tokenizer",
            given.tokenizer,
        ]
        kept = None
        if given.kill_after:
            child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
            try:
                child.wait(given.kill_after)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            held = (folder / "tokens" / ".parts").glob("*.json")
            kept = sum("-" not in file.name for file in held)  # records of parts; tokenizers and counts have a "-"
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        facts = json.loads(done.stdout)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        report = {
            "rows": rows,
            "bytes": (folder / "x.jsonl").stat().st_size,
            "peak_mib": round(peak),
            "kept_parts": kept,
        }
        print(json.dumps(report | {name: facts[name] for name in ("tokens", "files", "documents")}))
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
