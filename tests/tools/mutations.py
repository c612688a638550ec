"""Change the arithmetic a little, one place at a time, and count what the tests notice.

    python tests/tools/mutations.py --n 40 --seed 0 --out mutations.md [--only FILE ...]

A mutation is one changed operator, comparison, number, condition, branch or statement of a file
without torch or processes. `--n` of each file's mutations are drawn with `--seed` (0: all of them).
A forked process imports the changed module instead of the file and runs the tests that FAMILIES
names. A mutation is killed when a test fails. One that uses up its processor time is timed out and
counts as killed. Text (docstrings, messages), types and `main` are not changed.

Prints a line per survivor, and a table, which goes to `--out`, too. Exit status 1 when less than
--least percent of all were killed.
"""

import argparse
import ast
import gc
import importlib.abc
import importlib.util
import os
import random
import re
import resource
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from analysis.common.table import Column, Table  # noqa: E402
from base.errors import Parser, command_line  # noqa: E402

MEMORY_FILES = ("pipeline", "model_states", "activations", "output", "buffers", "peak")
TIME_FILES = ("machine", "compute", "links", "layer", "stages", "replicas", "step")
# Each file and its family: what of tests/ notices its changes, but for tests LEFT_OUT (slow ones).
FAMILIES = {
    "models/flops.py": "test_flops.py",
    **dict.fromkeys(
        [f"analysis/planner/memory/{name}.py" for name in MEMORY_FILES],
        "test_memory_by_hand.py test_megatron_memory.py"
        " test_predictions_on_record.py::test_a_record_is_predicted_again_from_itself",
    ),
    "models/gpus.py": "test_data_sheets.py",
    "base/storage.py": "test_saved_bytes.py",
    "parallel/config/layout.py": "test_layout.py",
    "analysis/planner/columns.py": "test_layout.py",
    "parallel/measure/steady_time.py": "test_steady_step_time.py",
    "analysis/planner/messages.py": "test_messages_by_hand.py",
    "parallel/config/duration.py": "test_fixed_work.py",
    "parallel/checkpoint/folders.py": "test_checkpoint_folders.py",
    "parallel/checkpoint/attempts.py": "test_checkpoint_folders.py",
    "parallel/checkpoint/contents.py": "test_checkpoints_on_disk.py",
    "parallel/checkpoint/rank_files.py": "test_checkpoints_on_disk.py",
    "parallel/checkpoint/checkpointer.py": "test_checkpoints_on_disk.py",
    "parallel/checkpoint/loading.py": "test_checkpoints_on_disk.py",
    "parallel/engines/devices.py": "test_gpus_are_set_up.py",
    "parallel/engines/optim.py": "test_training_rules.py test_checkpoints_on_disk.py",
    "slurm/states.py": "test_slurm_states.py",
    "slurm/submit.py": "test_slurm_states.py",
    "slurm/status.py": "test_slurm_states.py",
    "slurm/record_end.py": "test_slurm_states.py",
    "slurm/render.py": "test_render.py test_studies.py",
    "parallel/measure/training_metrics.py": "test_metrics_by_hand.py",
    "analysis/runs/fairness.py": "test_scaling_by_hand.py test_comparisons_by_hand.py"
    " test_studies_compare.py",
    "analysis/runs/scaling_curve.py": "test_scaling_by_hand.py test_scaling_rows_are_honest.py",
    "analysis/runs/pairs.py": "test_comparisons_by_hand.py",
    "analysis/runs/ratio.py": "test_scaling_by_hand.py test_comparisons_by_hand.py",
    "analysis/runs/repeats.py": "test_studies_compare.py test_comparisons_by_hand.py",
    "analysis/runs/shared_hosts.py": "test_scaling_by_hand.py",
    "analysis/runs/verdict.py": "test_quality_by_hand.py test_verdicts_and_flags.py",
    **dict.fromkeys(
        [f"analysis/planner/timemodel/{name}.py" for name in TIME_FILES],
        "test_time_model_by_hand.py test_time_of_experts.py test_predictions_on_record.py",
    ),
    "analysis/common/statistics.py": "test_comparisons_by_hand.py test_time_to_target.py"
    " test_scaling_laws.py",
    "analysis/common/convergence.py": "test_time_to_target.py",
    "analysis/runs/time_to_target.py": "test_time_to_target.py",
}
LEFT_OUT = "not (loader or help_costs or ultrascale) or again"
OURS = ("analysis", "base", "models", "parallel", "slurm")
ENDS = ("survived", "killed", "timed out")  # tests pass, fail, or are stopped
HEAVY = ("numpy", "torch", "pytest")  # imported once, not in every fork
MEMORY = 16 * 2**30  # bytes of address space of a mutant

_COMPARE = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
}
_PAIRS = ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
_COMPARE |= {a: (b,) for pair in _PAIRS for a, b in (pair, pair[::-1])}
_PAIRS = ((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitOr, ast.BitAnd), (ast.And, ast.Or))
_OPERATE = {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
_OPERATE |= {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
_CALL = {"min": "max", "any": "all", "minimum": "maximum", "floor": "ceil", "fmean": "median"}
_CALL |= {other: one for one, other in _CALL.items()}
_WORDS = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)
_HOLDERS = (ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.DictComp, ast.Set, ast.SetComp)


@dataclass(frozen=True)
class Mutation:
    """One change: the place, the lines before and after, and the whole source after."""

    file: str
    line: int
    before: str
    after: str
    source: str


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(what is replaced, by what) for one node; what is inside it is not looked at."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in _OPERATE:
            words = any(isinstance(v, (*_WORDS, *_HOLDERS)) or _text(v) for v in (left, right))
            if not words:
                yield node, ast.BinOp(left, _OPERATE[type(op)](), right)
        case ast.AugAssign(target, op, value):
            yield node, ast.Pass()
            if type(op) in _OPERATE and not isinstance(value, (*_WORDS, *_HOLDERS)):
                yield node, ast.AugAssign(target, _OPERATE[type(op)](), value)
        case ast.Expr(ast.Call()):
            yield node, ast.Pass()
        case ast.Compare(left, ops, rights):
            for i, op in enumerate(ops):
                for other in _COMPARE[type(op)]:
                    yield node, ast.Compare(left, [*ops[:i], other(), *ops[i + 1 :]], rights)
        case ast.BoolOp(op, values):
            yield node, ast.BoolOp(_OPERATE[type(op)](), values)
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                yield node, ast.BoolOp(op, rest) if len(rest) > 1 else rest[0]
        case ast.UnaryOp(ast.Not() | ast.Invert() | ast.USub(), operand):
            yield node, operand
        case ast.IfExp(_, body, orelse):
            yield from ((node, body), (node, orelse))
        case ast.If(test) | ast.While(test):
            yield test, ast.Constant(False)
            if isinstance(node, ast.If):
                yield test, ast.Constant(True)
        case ast.comprehension(ifs=conditions):
            yield from ((condition, ast.Constant(True)) for condition in conditions)
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            if value < 1e6:  # adding one to a large number changes too little to notice
                yield node, ast.Constant(value + 1)
            if value not in (0, 1):
                yield node, ast.Constant(value * 2)
        case ast.Call(ast.Attribute(attr="where"), [_, one, other]):
            yield from ((node, one), (node, other))
        case ast.Call(ast.Name(name), arguments, keywords) if name in _CALL:
            yield node, ast.Call(ast.Name(_CALL[name]), arguments, keywords)
        case ast.Call(ast.Attribute(of, name), arguments, keywords) if name in _CALL:
            yield node, ast.Call(ast.Attribute(of, _CALL[name]), arguments, keywords)


def _text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _walk(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    yield from _changes(node)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "format_spec"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, _WORDS):
                continue
            match child:
                case ast.FunctionDef(name="main") | ast.keyword(arg="strict"):
                    continue
                case ast.If(test) if re.search("__|TYPE_CHECKING", ast.unparse(test)):
                    continue  # how the file is started
            yield from _walk(child)


def mutations(file: str) -> list[Mutation]:
    """Every mutation of a file of this repository, in the file's order."""
    source = (ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[str, Mutation] = {}
    for old, new in _walk(ast.parse(source)):
        begin = starts[old.lineno - 1] + old.col_offset
        end = starts[old.end_lineno - 1] + old.end_col_offset
        text = ast.unparse(ast.fix_missing_locations(new))
        text = text if isinstance(new, ast.stmt) else f"({text})"
        head, tail = source[starts[old.lineno - 1] : begin], source[end : starts[old.end_lineno]]
        before = " ".join((head + source[begin:end] + tail).decode().split())
        after = " ".join((head + text.encode() + tail).decode().split())
        changed = (source[:begin] + text.encode() + source[end:]).decode()
        found.setdefault(changed, Mutation(file, old.lineno, before, after, changed))
    return list(found.values())


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder that returns a module's changed code."""

    def __init__(self, file: str, code: CodeType):
        self.name, self.path, self.code = file.removesuffix(".py").replace("/", "."), file, code

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, ROOT / self.path, loader=self)

    def exec_module(self, module) -> None:
        exec(self.code, module.__dict__)


def start(tests: str, limit_s: float, folder: str, mutation: Mutation | None = None) -> int:
    """Run tests in a fork, with a mutation or without one; returns the process id."""
    code = None
    if mutation is not None:
        with warnings.catch_warnings(action="ignore"):  # of comparing a number by `is`
            code = compile(mutation.source, str(ROOT / mutation.file), "exec", dont_inherit=True)
    child = os.fork()
    if child:
        return child
    import pytest

    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2) if mutation else (0,):
        os.dup2(quiet, stream)
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.alarm(int(30 * limit_s))  # a process that waits for ever uses no processor time
    if mutation is not None:
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]  # this script may have imported what imports the changed file
        sys.meta_path.insert(0, _Instead(mutation.file, code))
    flags = ["-x", "-q", "-m", "not slow", "--tb=no", "--assert=plain", "-p", "no:cacheprovider"]
    flags += ["-k", LEFT_OUT, "--basetemp", f"{folder}/{os.getpid()}"]
    os._exit(pytest.main([*flags, *(f"tests/{name}" for name in tests.split())]))


def ended() -> tuple[int, int, float]:
    """(process, exit status or minus its signal, seconds of processor time) of the next to end."""
    child, status, used = os.wait3(0)
    try:
        os.killpg(child, signal.SIGKILL)  # processes that its tests may have started
    except ProcessLookupError:
        pass
    return child, os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def campaign(file: str, n: int, seed: int, jobs: int, folder: str) -> list[tuple[Mutation, str]]:
    """(mutation, "killed", "timed out" or "survived") of n of a file's mutations, in its order.

    Raises:
        SystemExit: the tests do not even pass without a mutation.
    """
    tests = FAMILIES[file]
    start(tests, 600, folder)
    _, status, alone_s = ended()
    if status:
        raise SystemExit(f"{file}: {tests} fail without any mutation ({status})")
    every = mutations(file)
    chosen = sorted(random.Random(f"{seed} {file}").sample(range(len(every)), min(n, len(every))))
    waiting = [every[i] for i in chosen][::-1] or every
    running: dict[int, Mutation] = {}
    results: list[tuple[Mutation, str]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            mutation = waiting.pop()
            running[start(tests, 5 * alone_s + 5, folder, mutation)] = mutation
        child, status, _ = ended()
        mutation = running.pop(child)
        if status not in (0, 1, 2, -signal.SIGXCPU, -signal.SIGKILL, -signal.SIGALRM):
            raise SystemExit(f"{file}:{mutation.line}: {mutation.after}: pytest ended {status}")
        results.append((mutation, ENDS[(status > 0) - (status < 0)]))
        if status == 0:
            print(f"{file}:{mutation.line}: {mutation.before}  ->  {mutation.after}", flush=True)
    return sorted(results, key=lambda result: result[0].line)


def report(results: list[tuple[Mutation, str]]) -> str:
    """The table of all files."""
    rows = []
    for file in [*dict.fromkeys(m.file for m, _ in results), "all"]:
        count = Counter(end for m, end in results if file in (m.file, "all"))
        noticed = 1 - count["survived"] / count.total()
        rows.append({"file": file, "mutations": count.total(), "noticed": noticed})
        rows[-1] |= dict.fromkeys(ENDS, 0) | count
    columns = [Column("file", "file"), Column("mutations", "mutations", "d")]
    columns += [Column(end, end, "d") for end in ("killed", "timed out", "survived")]
    return Table([*columns, Column("noticed", "noticed", ".0%")], rows).render("markdown")


@command_line("mutations")
def main(argv: list[str] | None = None) -> int:
    """Run the campaign and print its table."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=40, help="mutations of a file; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="at a time")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, metavar="FILE", default=[*FAMILIES])
    parser.add_argument("--least", type=float, default=90.0, help="percent to be killed")
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["SCALING_TEST_ROOT"] = str(ROOT)  # no copy of the repository for each mutant
    os.chdir(ROOT)
    for name in HEAVY:
        importlib.import_module(name)
    gc.freeze()  # so that the collector of a fork does not scan the libraries' objects
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for file in arguments.only:
            results += campaign(file, arguments.n, arguments.seed, arguments.jobs, folder)
    if arguments.out:
        arguments.out.write_text(report(results))
    print(report(results), end="")
    noticed = sum(end != "survived" for _, end in results)
    return 0 if noticed >= arguments.least / 100 * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
