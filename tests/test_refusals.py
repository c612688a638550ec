"""Settings that cannot run are refused in one line, with the numbers."""

import tomllib
from dataclasses import asdict

import pytest

from base.errors import UsageError
from models.config import PRESETS
from parallel.config.resolve import resolve
from tests.conftest import ROOT

GROUPS = tomllib.loads((ROOT / "tests" / "refusals.toml").read_text())
ROWS = [(group["settings"] | row, why) for group in GROUPS.values() for row, why in group["rows"]]
ROWS.append(({"tp": 10**4000}, "not 100000000000... (4001 digits)"))


@pytest.mark.parametrize(("settings", "why"), ROWS, ids=[why for _, why in ROWS])
def test_what_cannot_run_is_refused_in_one_line(settings, why):
    if "experts" in settings:  # the preset's but for those
        experts = asdict(PRESETS[settings["preset"]].experts) | settings["experts"]
        settings = settings | {"experts": experts}
    with pytest.raises(UsageError) as refused:
        resolve(("test", settings))
    said = str(refused.value)
    assert why in said and "\n" not in said
    if "experts" in settings:  # and nothing else is wrong with them, but that they are compiled
        assert said.count("; ") == ("compile" in settings)
