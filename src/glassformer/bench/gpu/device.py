"""What the commands of this folder share: the parser of their options, and the check that there is a GPU."""

import argparse
import sys

import torch


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose `--help` prints a module's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def require_gpu() -> None:
    """Exit with code 2 and one sentence if this machine has no CUDA device."""
    if not torch.cuda.is_available():
        print(
            "this benchmark needs a CUDA device, and torch finds none: run it on a machine with a GPU.", file=sys.stderr
        )
        sys.exit(2)
