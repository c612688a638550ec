"""The commands of this folder, one line each: python -m analysis."""

import ast
import sys
from pathlib import Path

from base.errors import Parser, command_line


def commands() -> dict[str, str]:
    """name -> the first line of its docstring, which is read and not imported."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return {
        path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
        for path in files
        if not path.stem.startswith("_")
    }


@command_line("analysis")
def main(argv: list[str] | None = None) -> int:
    """Print the list."""
    Parser(prog="python -m analysis", description=__doc__).parse_args(argv)
    first_lines = commands()
    width = max(map(len, first_lines))
    for name, line in first_lines.items():
        print(f"python -m analysis.{name:{width}}  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
