"""The style guide's list of ruled-out wording: the rules themselves, and all files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_spec = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
assert _spec is not None
assert _spec.loader is not None
prose = sys.modules["prose"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(prose)


def words(path: str, text: str) -> list[tuple[int, str]]:
    return [(hit.line, hit.words.lower()) for hit in prose.hits_in(Path(path), text)]


@pytest.mark.parametrize(
    "sentence",
    [
        "Of a wrong setting the traceback ends at the line of the script that made it.",
        "Which is told, and training goes on.",
        "The checkpointer refuses what is damaged, which is said.",
        "None waits for whom makes progress.",
        "That a plugin is not there is nobody's fault but its asker's.",
        "`{batch_size}` is none of `{num_processes}`.",
        "Steps between the checkpoint and the kill are then there twice.",
        "Who fits whom",
        "The house",
        "Two doors",
    ],
)
def test_examples_of_the_style_guide_are_flagged(sentence: str) -> None:
    assert words("page.md", sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "For an invalid setting, the traceback ends at the line in your script that set it.",
        "A warning is logged and training continues.",
        "`batch_size=5` is not divisible by `num_processes=2`.",
        "There is no checkpoint, so there is no need to read one, and so on.",
        "It works out of the box if there is room for it; it is no longer slower.",
        "What is the difference? Which is faster?",
        "Who is it for?",
        "As it stands, `git blame` can be told apart from peer-to-peer copies.",
    ],
)
def test_plain_english_is_not_flagged(sentence: str) -> None:
    assert words("page.md", sentence) == []


def test_code_in_markdown_is_not_checked() -> None:
    text = "The `told` [page](told.md):\n\n```\nwhoever\n```\n<!-- whom -->\nA door.\n"
    assert words("page.md", text) == [(7, "door")]


def test_strings_comments_and_test_names_are_checked_but_other_names_are_not() -> None:
    source = '''
def told(whom):
    """Return what is there.

    Whose it is.
    """
    # A wire, or
    # the door.
    raise ValueError(
        f"{whom} is "
        f"no tensor, which is said"
    )

def test_the_house(): ...
'''
    assert words("module.py", source) == [
        (5, "whose"),
        (7, "wire"),
        (8, "door"),
        (10, "is no tensor"),
        (11, "is said"),
        (11, "which is said"),
        (14, "house"),
    ]


def test_comments_and_printed_lines_of_other_files_are_checked() -> None:
    text = '# A door.\ntarget: told\n\t@echo "the strangers"\nkey = 1  # lent\n'
    assert words("Makefile", text) == [(1, "door"), (3, "strangers"), (4, "lent")]
