"""What `moebius-rollout serve` refuses before anything starts."""

import pytest
from typer.testing import CliRunner

from rollout.cli import app


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "rollout"], "policy='rollout' is unknown: use one of ['interactive', 'ep', 'tp']"),
        (["--threshold", "0"], "threshold=0: at least 1 request"),
        (["--calibrate", "yes"], "calibrate='yes' is unknown"),
        (["--set", "port=1"], "--set port=1: use its option, --port"),
        (["--set", "model_path=x"], "use its option, --model"),
        (["--set", "api_key"], "give argument=value"),
        (["--ranks", "3"], "ranks=3"),
        (["--ranks", "64"], "ranks=64"),
        (["--port", "70000"], "port=70000 must lie between 1 and 55535"),
        (["--set", "tp_size=2"], "tp_size=2: a switching engine sets it from ranks=2"),
        (["--set", "enable_http2=true"], "enable_http2=True: only False works"),
        (["--max-samples", "0"], "--max-samples=0: at least 1"),
        (["--max-body-mb", "-1"], "--max-body-mb=-1: at least 1"),
        (["--set", "api_key=two words"], "api_key must be of printable ASCII characters"),
        (["--set", "no_such_argument=1"], "['no_such_argument'] are no server arguments"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_starts(tiny_moe, options, message):
    result = CliRunner().invoke(app, ["serve", "--model", tiny_moe, *options])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ") and message in result.stderr, result.stderr
