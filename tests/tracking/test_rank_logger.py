"""Loggers that log an event once per run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from accelerate_core.errors import ConfigurationError
from accelerate_tracking.rank_logger import get_logger


@pytest.fixture
def no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate_core.distributed import process as runtime

    monkeypatch.setattr(runtime, "_current", None)


@pytest.mark.usefixtures("no_runtime")
def test_logger_works_without_an_accelerator(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = get_logger("tests.rank", "INFO")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    logger.info("of the main process")
    logger.info("of every process", main_process_only=False)
    logger.info("in order", main_process_only=False, in_order=True)
    monkeypatch.setenv("RANK", "0")
    logger.info("of rank %d", 0)
    assert caplog.messages == ["of every process", "in order", "of rank 0"]
    assert {Path(record.pathname).name for record in caplog.records} == {"test_rank_logger.py"}


@pytest.mark.usefixtures("no_runtime")
def test_warning_once_logs_each_text_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("tests.once", "INFO")
    for number in (1, 1, 2):
        logger.warning_once("seen %d", number)
    assert caplog.messages == ["seen 1", "seen 2"]
    assert {Path(record.pathname).name for record in caplog.records} == {"test_rank_logger.py"}


@pytest.mark.usefixtures("no_runtime")
def test_log_records_name_the_calling_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("tests.line", "INFO")

    def told(*texts: str) -> None:
        for text in texts:
            logger.info(text, stacklevel=3)  # counted as in Accelerate, where 2 is this line

    first = told.__code__.co_firstlineno + 5
    logger.info("by itself")
    logger.log(logging.INFO, "by its level", main_process_only=False)
    logger.warning_once("once", stacklevel=2)
    told("for", "another")
    found = [(record.lineno - first, record.funcName) for record in caplog.records]
    assert found == [(line, "test_log_records_name_the_calling_line") for line in (0, 1, 2, 3, 3)]


def test_log_level_is_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert get_logger("tests.level").logger.level == logging.ERROR
    with pytest.raises(ConfigurationError, match="Did you mean 'WARNING'"):
        get_logger("tests.level", "warnin")
