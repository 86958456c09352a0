"""Words of our own for what has a name are neither names in the code nor words in messages.

    python -m tests.test_language    # prints every message of the product, to be read as a list
"""

import ast
import io
import re
import tokenize
from pathlib import Path

PROJECT = Path(__file__).parent.parent
PRODUCT = "*.py", "data/**/*.py", "utils/**/*.py"
SAY_NOTHING = "found one wanted own given there here some how kept made told mine apart whole things".split()
OF_OUR_OWN = "anew told ours things wanted likewise thereof".split()


def python_files(*patterns: str) -> list[Path]:
    return [path for pattern in patterns for path in PROJECT.glob(pattern)]


def names_in(line_or_file: str) -> list[str]:
    """The names in Python code, which may be a part of a file, as the lines of a diff are."""
    names = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(line_or_file).readline):
            names += [token.string] * (token.type == tokenize.NAME)
    except (tokenize.TokenError, IndentationError):
        pass
    return names


def messages(path: Path) -> dict[int, str]:
    """{line: text} of the texts of four words or more that are no docstrings: messages and helps."""
    texts, skipped = {}, set()
    for node in ast.walk(ast.parse(path.read_text())):  # a parent comes before its children
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)  # a docstring
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                     for part in node.values)  # fmt: skip
            texts[node.lineno] = "".join(parts)
            skipped.update(node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            texts[node.lineno] = node.value
    return {line: text for line, text in texts.items() if text.count(" ") >= 3}


def test_names_say_what_they_hold():
    code = {path: path.read_text() for path in python_files(*PRODUCT, "tests/**/*.py", "docs/**/*.py")}
    for path in PROJECT.glob("docs/**/*.diff"):
        lines = path.read_text().splitlines()
        code[path] = "\n".join(line[1:].strip() for line in lines if line.startswith("+"))
    assert len(code) > 100
    assert not [f"{path.relative_to(PROJECT)}: {name}" for path, text in code.items()
                for name in names_in(text) if name.strip("_") in SAY_NOTHING]  # fmt: skip


def test_messages_use_words_that_everybody_knows():
    texts = [f"{path.relative_to(PROJECT)}:{line}: {text}" for path in python_files(*PRODUCT)
             for line, text in messages(path).items()]  # fmt: skip
    assert len(texts) > 300
    assert not [text for text in texts if {*re.findall(r"\w+", re.sub(r"{.*?}", "", text))} & {*OF_OUR_OWN}]


if __name__ == "__main__":
    for path in python_files(*PRODUCT):
        for line, text in messages(path).items():
            print(f"{path.relative_to(PROJECT)}:{line}: {text}")
