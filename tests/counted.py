"""Count lines of code without docstrings, comments and blank lines."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

__all__ = ["code_lines"]

_NOTHING = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def code_lines(path: Path) -> int:
    """Return the number of lines of code in a file."""
    source = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*_NOTHING, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        constant = first.value if isinstance(first, ast.Expr) else None
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            lines -= set(range(constant.lineno, (constant.end_lineno or constant.lineno) + 1))
    return len(lines)
