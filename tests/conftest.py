"""Shared switches: shape annotations are executed, torch uses one thread per worker, hypothesis is deterministic."""

import collections
import gc
import os
import pathlib
import signal

# If a shell starts the suite in the background, Ctrl-C is ignored, also in the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also in the processes that tests start: two workers fill two cores
os.environ["GLASSFORMER_NATIVE"] = "0"  # the tests run the plain model, unless a test requests the kernels

from tests import annotations, sampled

# Before anything imports them: every annotated shape and dtype in the engine is checked at each call. The modules that
# take a user's input (generation.loop, generation.feed) are left out: their own error messages are tested there.
TESTS = pathlib.Path(__file__).parent
_CHECKED = [
    "glassformer.model",
    "glassformer.generation.sampling",
    "glassformer.generation.beam",
    *(f"glassformer.lens.{module}" for module in ("heads", "copying", "residual", "patch", "logit_lens", "figures")),
]
annotations.check_calls_of(_CHECKED)

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
)
hypothesis.settings.register_profile("thorough", hypothesis.settings.get_profile("suite"), max_examples=100)


def pytest_configure(config):
    """Where the slow tests run too, hypothesis tries more examples."""
    sampled.thorough = "not slow" not in config.option.markexpr
    hypothesis.settings.load_profile("thorough" if sampled.thorough else "suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Disable garbage collection while tests are collected: it took a fifth of that time and found nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Before pytest deselects the slow tests."""
    sampled.mark_the_rest(items)


def pytest_collection_finish():
    """Exclude everything that is imported from garbage collection: it stays until the end."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Print one line for each skip reason that names a command with which the tests would run."""
    skipped = collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in skipped.items():
        if ": run " in reason:
            tests = "1 test was" if count == 1 else f"{count} tests were"
            terminalreporter.write_line(f"{tests} skipped because {reason}", yellow=True)


def executes_annotations(path: pathlib.Path) -> bool:
    """Whether a test file is that of a checked module, or stands in the root: others would only take longer."""
    *folders, name = path.relative_to(TESTS).with_suffix("").parts
    module = ".".join(("glassformer", *folders, name.removeprefix("test_")))
    return not folders or any(f"{module}.".startswith(f"{checked}.") for checked in _CHECKED)


@pytest.fixture(autouse=True)
def _same_conditions(request):
    """Two workers on two cores: one thread each, the same summation order and the same random numbers everywhere."""
    annotations.active = executes_annotations(request.path)
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes 2 ms where there is no GPU
