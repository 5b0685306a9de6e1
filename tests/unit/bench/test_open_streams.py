"""The benchmark of open streams: every stream is open during the requests, and gets tokens."""

import json
from pathlib import Path

from click.testing import CliRunner
from open_streams import main


def test_requests_and_tokens_are_measured_for_each_number_of_streams(tmp_path: Path) -> None:
    path = tmp_path / "open_streams.json"
    arguments = ["--streams", "3,70", "--clients", "2", "--engines", "2", "--requests", "20", "--prompt-tokens", "64"]
    result = CliRunner().invoke(main, [*arguments, "--rounds", "1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    results = json.loads(path.read_text())["results"]
    assert [entry["streams"] for entry in results] == [3, 70]
    for entry in results:
        assert entry["requests_per_second"] > 0
        assert entry["tokens_per_second"] > 0
        assert entry["mib"] > 10
