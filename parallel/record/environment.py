"""What is archived of a process's environment and command line: no secret. Torch-free.

    python -m parallel.record.environment FILE     of this process, for its owner alone
    python -m parallel.record.environment FILE --hide OTHER ...    and hide the secrets in others

Only variables that environment_variables.txt lists are archived: those of launchers, libraries,
threads, devices, modules and Slurm that can change how a run is started or how fast it is. In their
values, passwords in addresses and what looks like a token are hidden.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from base import errors

HIDDEN = "***"


def _read_names() -> set[str]:
    """Returns the names of environment_variables.txt; whole names stand under the prefix `-`."""
    names, prefix = set(), ""
    for line in Path(__file__).with_name("environment_variables.txt").read_text().splitlines():
        if line.startswith(" "):
            names |= {prefix + name for name in line.split()}
        elif not line.startswith("#"):
            prefix = line.strip("-")
    return names


_NAMES = _read_names()

# What sounds like a secret's name: words that never stand in another one, and short ones alone.
_SECRET_NAME = re.compile(
    r"token|secret|passw|passphrase|credential|cookie|jwt|bearer|apikey|private"
    r"|(?<![a-z])(?:(?:db|my|pg|ssh)?pass|pwd|pw|pat|keys?|auth|authorization|cert|creds?|pin"
    r"|sig|signature)(?![a-z])",
    re.IGNORECASE,
)
_COUNTS = re.compile(r"tokens|keys", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?[\d_]*\.?\d+(?:e[-+]?\d+)?[kmgbt]?", re.IGNORECASE)
_VALUES = (
    # Who knows the address of a webhook may write there.
    (re.compile(r"(://[^\s/]*(?:/\S*?)?\b(?:hooks|webhooks?)\b[^\s/]*/)[^\s\"']+"), rf"\1{HIDDEN}"),
    # A password may hold slashes and an at sign, so all up to the last one goes.
    (re.compile(r"://\S*@"), f"://{HIDDEN}@"),
    (re.compile(r"\b(bearer|basic|negotiate)([ :=]+)\S+", re.IGNORECASE), rf"\1\2{HIDDEN}"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.DOTALL), HIDDEN),
    # As they are issued: GitHub, GitLab, Hugging Face, npm, AWS, Slack, Google, others, any JWT.
    (
        re.compile(
            r"\b(?:gh[a-z]_\w{16}|github_pat_\w{16}|glpat-[\w-]{12}|(?:hf|npm)_[A-Za-z0-9]{20}"
            r"|A[KS]IA[0-9A-Z]{12}|xox[a-z]-[\w-]{8}|AIza[\w-]{20}|sk-[\w-]{20}"
            r"|eyJ[\w-]{8,}\.[\w-]+)[\w.-]*"
        ),
        HIDDEN,
    ),
)
# In a command line, an address, JSON, TOML or a script's quoted words.
_PAIR = re.compile(r"""([\w.-]+)(=["']*|\s*=\s*["']|["']?:\s*["'])([^\s,;&"']+)""")


def is_secret(name: str, value: str) -> bool:
    """Returns whether a value is to be hidden for its name; a number of tokens or keys is a
    count."""
    if _NUMBER.fullmatch(value):
        name = _COUNTS.sub("", name)
    return bool(_SECRET_NAME.search(name))


def hide(text: str) -> str:
    """Returns a text without the passwords and tokens that can be told by their own looks."""
    for pattern, without in _VALUES:
        text = pattern.sub(without, text)
    return _PAIR.sub(_without_secret, text)


def _without_secret(pair: re.Match[str]) -> str:
    # A value may be a pair itself, as in export=NAME=VALUE.
    value = HIDDEN if is_secret(pair[1], pair[3]) else _PAIR.sub(_without_secret, pair[3])
    return f"{pair[1]}{pair[2]}{value}"


def environment_facts(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that may be archived, by name."""
    return {name: hide(environment[name]) for name in sorted(_NAMES & environment.keys())}


def command_line(words: Sequence[str] | None = None) -> str:
    """Returns the command as typed (default: this process's), without the values of secret
    flags."""
    if words is None:
        words = [Path(sys.executable).name, *sys.orig_argv[1:]]
    shown, flag = [], ""
    for word in words:
        password = flag == "-p" and not _NUMBER.fullmatch(word)
        secret = flag and not word.startswith("--") and (password or is_secret(flag, word))
        shown.append(HIDDEN if secret else hide(word))
        flag = word if word.startswith("-") and "=" not in word else ""
    return " ".join(shown)


def write(path: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Writes the archived variables as NAME=value lines, in a file that its owner alone can
    read."""
    facts = environment_facts(environment)
    lines = [f"{name}={value}".replace("\n", "\\n") for name, value in facts.items()]
    lines.append(f"# {len(environment) - len(facts)} other variables are not archived")
    _write_private(path, "\n".join(lines) + "\n")


def _write_private(path: Path, text: str) -> None:
    private = {"opener": lambda name, flags: os.open(name, flags, 0o600)}
    with open(path, "w", errors="surrogateescape", **private) as file:
        os.fchmod(file.fileno(), 0o600)  # one that was there keeps its mode otherwise
        file.write(text)


@errors.command_line("parallel.record.environment")
def main(argv: list[str] | None = None) -> int:
    parser = errors.Parser(prog="python -m parallel.record.environment", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    options = {"nargs": "+", "default": [], "metavar": "OTHER", "help": "files to hide secrets in"}
    parser.add_argument("--hide", type=Path, **options)
    arguments = parser.parse_args(argv)
    for path in (arguments.file, *arguments.hide):
        if path.exists() and not path.is_file():  # a device's mode is not ours to change
            raise errors.UsageError(f"{path}: not a regular file")
    write(arguments.file)
    for path in arguments.hide:
        os.chmod(path, 0o600)
        with path.open(errors="surrogateescape", newline="") as file:  # a diff keeps its \r
            text = _PAIR.sub(_without_secret, file.read())
        # What is hidden ends at a quote, so that the file is as whole as before.
        _write_private(path, "".join(map(hide, re.split("([\"'])", text))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
