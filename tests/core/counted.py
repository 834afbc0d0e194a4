"""Lines of code: docstrings, comments and blank lines are not counted."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

__all__ = ["code_lines"]

_NOTHING = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def code_lines(path: Path) -> int:
    """Return the number of lines of a file that hold code."""
    source = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*_NOTHING, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            if isinstance(first.value.value, str):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)
