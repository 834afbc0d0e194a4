"""The conformance suite for stores: correct stores pass, and each fault fails the intended check."""

from __future__ import annotations

from pathlib import Path

import pytest
import storage_mutants

from accelerate_testing import StorageSuite, storage_suite
from accelerate_testing.storage_suite import STORAGE_CHECKS, Shelf


class TestLocal(StorageSuite):
    storage = "accelerate_checkpoint:LocalStorage"


class TestPlain(StorageSuite):
    storage = "plain_storage:PlainStorage"


@pytest.mark.parametrize("mutant", storage_mutants.MUTANTS)
def test_suite_finds_the_fault(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_suite, "_RELEASED", 1.0)
    check = storage_mutants.MUTANTS[mutant]
    shelf = Shelf(f"storage_mutants:{mutant}", "{path}", tmp_path)
    with pytest.raises((AssertionError, OSError, pytest.fail.Exception)):
        STORAGE_CHECKS[check](shelf)


def test_every_check_of_the_suite_has_a_fault() -> None:
    assert {*storage_mutants.MUTANTS.values()} == {*STORAGE_CHECKS}
