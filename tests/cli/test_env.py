"""`glass env` as a user meets it."""

from tests.cli.asking import run, run_json


def test_env_gives_its_reason(capsys):
    code, out, _ = run(capsys, "env")
    assert code == 0
    assert "GFLOP/s in float32" in out
    code, facts = run_json(capsys, "env")
    assert facts["dtype"] in ("float32", "bfloat16")
    assert facts["versions"]["torch"].startswith("2.")
