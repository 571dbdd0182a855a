"""Outputs take their place whole or not at all, and a bad place is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.core.errors import UserError
from mezzo.core.files import atomic, check_free


@pytest.mark.parametrize("place", ["file/out", "n" * 250, "n" * 300], ids=["parent is a file", "with .tmp", "alone"])
def test_a_bad_place_is_said_and_nothing_is_left(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match="cannot write: file"), atomic(tmp_path / place) as temporary:
        temporary.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_name_that_no_file_can_have_is_said_before_work_begins(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too long"):
        check_free(tmp_path / ("n" * 300))
