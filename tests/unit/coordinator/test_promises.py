"""Every test that README.md of this directory names exists."""

import re
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1]


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(?:([\w./]+\.py)::)?(test_\w+)(…?)`", (HERE / "README.md").read_text())
    everywhere = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    assert len(named) > 50
    for file, name, cut in named:
        source = (HERE / file).read_text() if file else everywhere
        end = "" if cut else r"\b"
        assert re.search(rf"def {name}{end}", source), f"{file}::{name} is not there"
