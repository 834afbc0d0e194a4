"""Find wording that the project's style guide rules out.

    prose.py [--count] [PATHS]...

Reads Markdown, the comments, docstrings, messages and test names of Python files, and the comments of
other text files, but no code. Prints `file:line: "words" -> advice` for each hit and exits with 1 if there
are any. Without paths it reads every file that git tracks. `--count` prints the number of hits per rule.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Wording that must not come back, and what to write instead. A space matches any white space, and a
#: pattern matches whole words only.
WORDS: dict[str, str] = {
    # Metaphors for ordinary things.
    "houses?": "project, layout",
    "rooms|(?:an?|each|this|one|no other) room(?! for)": "package, section",
    "doors?": "make target, command, quick start",
    "strangers?": "third-party",
    "(?:somebody|someone) else's|other people's": "third-party",
    "lend(?:s|ing)?|lent": "exported",
    "(?<!git )blam(?:e[ds]?|ing)": "attribution, names the plugin",
    "(?<!to-)(?<!by )peers?(?!-to)": "the library's name, or the other rank",
    "settl(?:e[ds]?|ing)": "apply, resolve, flush, finish",
    "wires?": "protocol, transport, network",
    "(?<!of the )box(?:es)?": "tensor shard",
    "beneath": "below, under",
    "wish(?:es|ed)?": "request, setting",
    "(?:tak(?:e[ns]?|ing)|took) over": "adopts, replaces, continues",
    "(?:stand|stood|standing) in": "replaces",
    "(?<!it )stands|stood": "is, is defined, appears, means",
    "askers?|asker's": "caller",
    # Archaic words.
    "(?<!all )told(?! apart)": "receives, is passed; or: a warning is logged",
    "whoever|whomever|whom": "name the person or the part",
    "lest|whence|whilst|hitherto|henceforth|whereof|therein|thereof|thereto": "plain English",
    "nobody's|somebody's|no one's": "name the subject",
    "for want of": "without; because there is no",
    "be it|be they": "whether",
    "for ever": "forever, indefinitely",
    "holds? a clock": "measures",
    "what (?:wants?|waits?)": "name it: the tests that need ..., waiting time",
    "to be had": "available",
    "(?:and|or|nor) the like": "name the others",
    "at the latest": "within, no later than",
    # Word order and invented phrases.
    "which (?:is|are|was|were) (?:said|told|named|shown|logged)": "who does it, in a sentence",
    "(?:is|are|was|were) said": "the message says; is reported",
    "(?:that|which|who|it|one) (?:is|are|was|were) there": "exists, is installed, is available",
    "(?<!that )(?<!which )(?:is|are|was|were) not there": "is missing, does not exist",
    "(?:is|are|(?:is|are) then) there twice": "appears twice",
    "(?:is|are|was|were) (?:that|those) of": "is the same as, comes from",
    "(?:is|are|be|was|were) none of": "is not one of, is not divisible by",
    "(?<!there )(?<!it )is no (?!longer|more|less|different|better|worse|slower|faster|such)[a-z]+":
        "is not a ...",
    "(?:be|is|not|as) a text(?! (?:file|model|field))|as texts|one text": "string",
    "(?<!so )(?<!later )(?:goes|go|went|going) on(?! (?:this|the|an?|each|one|top)\\b)": "continues",
    "no longer (?:is|are|has|does)": "is no longer",
    "each by itself": "separately, one at a time",
    "things? that": "name the thing",
    "of (?:ours|theirs)": "our ..., their ...",
    "(?<!not )theirs": "the library's name",
    "nobody's fault|'s fault": "caused by",
    "who fits whom": "compatibility matrix",
    "made loaders?|loader makers?": "external loader, loader factory",
    "where (?:it|there|they|one) (?:has|have|is|are) (?:one|none|some|any)": "if it has one",
    "what (?:it|they) (?:is|are|was|were) (?:made|built) (?:of|from|with|for)": "name it",
}  # fmt: skip

#: Wording that is wrong at the start of a sentence.
OPENERS: dict[str, str] = {
    "Of (?:an?|each|every|all|these|those|the|what|several|two|three)": "For ...; make it the subject",
    "Whose|Whoever|Whom|Who(?! is| are)(?![^.]*[?])": "name the subject",
    "Which (?:is|are|was|were|has|have|does|do)(?![^.]*[?])": "make it a sentence of its own",
    "None of (?:whom|which|it|them)": "name the subject",
    "Nobody": "name the subject",
    "That an? ": "make a noun the subject",
    "What (?:is|are|does|do|has|have|was) (?:not|no|[a-z]+ed)(?![^.]*[?])": "name the subject",
}  # fmt: skip

#: Hits that are right: a pattern for the path, the words in lower case, and why they stay.
ALLOWED: tuple[tuple[str, str, str], ...] = (
    ("tools/prose.py", "*", "the list itself"),
    ("tests/core/test_prose.py", "*", "tests of the list"),
    ("docs/parallelism.md", "box", "a box in the diagram above the sentence"),
    ("tests/faults/faulty.py", "peer", "quotes a message of gloo"),
    ("tests/core/test_plugin_commands.py", "peer", "quotes a message of gloo"),
    ("tests/engines/*.py", "peer", "an argument of `ip link`"),
)

_SENTENCE_START = r"(?:\A|(?<=\n\n)|(?<=[.!?:;|]\s)|(?<=\n[-*|] ))"
_COMMENTED = (".toml", ".yml", ".yaml", ".cfg", ".txt", ".sh", "Makefile", ".gitignore", "ci/run")


@dataclass(frozen=True)
class Passage:
    """Some prose, and the line of the file where it begins."""

    text: str
    line: int


@dataclass(frozen=True)
class Hit:
    """Wording to replace."""

    path: str
    line: int
    words: str
    advice: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: "{self.words}" -> {self.advice}'


def _compiled() -> list[tuple[re.Pattern[str], str]]:
    def spaced(pattern: str) -> str:
        # A look-behind has a fixed width, so the spaces in it stay as they are.
        parts = re.split(r"(\(\?<![^)]*\))", pattern)
        return "".join(one if one.startswith("(?<!") else one.replace(" ", r"\s+") for one in parts)

    words = [
        (re.compile(rf"(?<![\w/.-])(?:{spaced(pattern)})(?![\w/-])", re.IGNORECASE), advice)
        for pattern, advice in WORDS.items()
    ]
    openers = [
        (re.compile(rf"{_SENTENCE_START}(?:{spaced(pattern)})(?![\w/-])"), advice)
        for pattern, advice in OPENERS.items()
    ]
    return words + openers


RULES = _compiled()


def without_code(text: str) -> str:
    """Return Markdown without code, comments and link targets, with the same number of lines."""

    def blank(match: re.Match[str]) -> str:
        return "X" + "\n" * match[0].count("\n")

    text = re.sub(r"(?ms)^[ \t]*(`{3,}|~{3,}).*?^[ \t]*\1[ \t]*$", blank, text)
    text = re.sub(r"(?s)<!--.*?-->", blank, text)
    text = re.sub(r"(`+)[^`]+?\1", blank, text)
    text = re.sub(r"(?<=\])\([^)\s]*\)", blank, text)
    return re.sub(r"https?://\S+", blank, text)


def _is_prose(text: str) -> bool:
    return re.search(r"[A-Za-z]+,? [a-z]+", text) is not None


class _Strings(ast.NodeVisitor):
    """Collects the strings and the test names of a module."""

    def __init__(self) -> None:
        self.passages: list[Passage] = []

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._add(node.value, node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                parts.append(str(part.value))
            else:
                parts.append("{}")
                self.generic_visit(part)
        self._add("".join(parts), node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name.startswith("test_"):
            self.passages.append(Passage(node.name.replace("_", " "), node.lineno))
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def _add(self, text: str, node: ast.expr) -> None:
        if _is_prose(text):
            self.passages.append(Passage(text, node.lineno))


def python_passages(source: str) -> Iterator[Passage]:
    """Return the strings, test names and comments of a Python file."""
    strings = _Strings()
    strings.visit(ast.parse(source))
    yield from strings.passages
    lines: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != last + 1:
            yield Passage("\n".join(lines), last - len(lines) + 1)
            lines = []
        lines.append(token.string.lstrip("#:"))
        last = token.start[0]
    if lines:
        yield Passage("\n".join(lines), last - len(lines) + 1)


def comment_passages(text: str) -> Iterator[Passage]:
    """Return the comments, descriptions and printed lines of a settings file or a Makefile."""
    lines = []
    for line in text.split("\n"):
        found = re.match(r"\s*(?:#+:?|@echo|description\s*[=:]|- (?:id|name):)\s*(.*)", line)
        trailing = re.search(r"\s#\s(.*)", line)
        lines.append(found[1].strip('"') if found else trailing[1] if trailing else "")
    yield Passage("\n".join(lines), 1)


def passages(path: Path, text: str) -> Iterable[Passage]:
    """Return what people read in a file; nothing for a file of another kind."""
    name = str(path).removesuffix(".in")
    if name.endswith(".md"):
        return [Passage(text, 1)]
    if name.endswith((".py", ".pyi")):
        try:
            return list(python_passages(text))
        except (SyntaxError, tokenize.TokenError):  # a template
            return comment_passages(text)
    if name.endswith(_COMMENTED):
        return comment_passages(text)
    return []


def _line(start: int, words: str, source: list[str]) -> int:
    """Return the line of some words: the first from `start` on that has them."""
    # A string in several pieces may begin some lines before the words.
    first = words.split("\n")[0].strip().lower()
    for number in range(start, min(start + 12, len(source) + 1)):
        if first in source[number - 1].lower().replace("_", " "):
            return number
    return start


def _is_allowed(path: str, words: str) -> bool:
    return any(fnmatch(path, where) and fnmatch(words, what) for where, what, _ in ALLOWED)


def hits_in(path: Path, text: str) -> list[Hit]:
    """Return the wording to replace in a file, in the order of its lines."""
    found = []
    source = text.split("\n")
    for passage in passages(path, text):
        prose = "\n".join(line.strip() for line in without_code(passage.text).split("\n"))
        for pattern, advice in RULES:
            for match in pattern.finditer(prose):
                words = " ".join(match[0].split())
                if _is_allowed(str(path), words.lower()):
                    continue
                start = passage.line + prose.count("\n", 0, match.start())
                line = _line(start, match[0], source)
                found.append(Hit(str(path), line, words, advice))
    return sorted(set(found), key=lambda hit: (hit.line, hit.words))


def tracked(paths: Iterable[str] = (), root: Path = ROOT) -> list[Path]:
    """Return the files below some paths that git tracks, relative to the root."""
    command = ["git", "ls-files", "-z", "--", *paths]
    listed = subprocess.check_output(command, cwd=root, text=True).split("\0")
    return [Path(one) for one in listed if one and (root / one).is_file()]


def check(files: Iterable[Path], root: Path = ROOT) -> list[Hit]:
    """Return the wording to replace in some files."""
    found = []
    for path in files:
        try:
            text = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += hits_in(path, text)
    return found


def main(arguments: list[str]) -> int:
    paths = [one for one in arguments if one != "--count"]
    absolute = [str(Path(one).resolve()) for one in paths]
    found = check(tracked(absolute))
    if "--count" in arguments:
        for (advice, words), count in Counter(
            (h.advice, h.words.lower()) for h in found
        ).most_common():
            print(f"{count:5} {words} -> {advice}")
    else:
        for hit in found:
            print(hit)
    print(f"{len(found)} hits", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
