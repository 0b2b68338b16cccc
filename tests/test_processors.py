"""Equal bits, whatever kernels the libraries choose: in processes of their own."""

from __future__ import annotations

import pytest

from tests.processors import QUICK, Settings, quick_combinations, run, title


@pytest.mark.parametrize("settings", list(quick_combinations()), ids=title)
def test_bits_do_not_depend_on_company(settings: Settings) -> None:
    ended = run(settings, QUICK)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
