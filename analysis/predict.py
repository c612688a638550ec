"""How well the time and memory models predict published runs that they were not fitted on.

    python -m analysis.predict --validate FILE.csv... [--calibrate-rows 20]
        [--split random|leave-model-out|leave-tp-out|leave-one-out] [--memory]
        [--format text|markdown|csv|json] [--columns A,B,C]

FILE is a CSV with the columns gpu_type, gpus, hidden, tp, pp, micro_batch and step_s (or
seconds_per_iteration). It may have id, cluster, gpu_mem_gb, gpus_per_node, params_b, layers, heads,
kv_heads, ffn, glu, vocab, seq, vpp, dp, cp, global_batch, gas, zero_stage, zero_ranks (that share
one copy of the optimizer), offload, act_recompute, seq_parallel, precision, engine, tokens_per_s,
tflops_per_gpu, tflops_formula, mem_gb, status, lint, warm_up, gradients and notes, as the files of
logs/published have. Each row is predicted by constants that were fitted on at most --calibrate-rows
other rows of its cluster: rows of the other folds (random: five folds; up to 31 rows, each row is
its own fold), of other model sizes, or of other tensor-parallel sizes. The fitted rows are chosen
by their layouts, never by their times. --calibrate-rows 0 uses the data sheet's priors.

Context-parallel ranks (cp) exchange keys and values in a ring. Gradients of bf16 rows are fp32,
unless `gradients` (or a note) says bf16. FP8 speeds up the layers' four GEMMs and nothing else. The
memory of fp8 rows is not scored: published rows do not say whether they hold the weights in bf16,
too.

Not scored are: a row that contradicts itself (`lint`, or LINT in its notes), a first iteration
(`warm_up`, or a note), a row whose model has no published width, and a row on a slow network (1.3
times slower than a row with no less to do; both MAPEs are printed). `repeat noise` is the least
MAPE that any prediction can reach on identical runs. `choice` is computed over groups of at least 5
layouts of one model, batch and GPU count: how much slower than the group's best the predicted first
is (the mean and the 90th percentile), and the best of the predicted first three. Intervals cover 80
%.
"""

if not __package__:
    import as_script

import sys
from pathlib import Path

from analysis.common.table import add_table_flags, json_object, show
from analysis.planner.fitting import add_rows_flag
from analysis.planner.rows import read_rows
from analysis.planner.validate import SPLITS, summary, table, validate_memory, validate_time
from base.bounds import check_flags
from base.errors import Parser, command_line


@command_line("analysis.predict")
def main(argv: list[str] | None = None) -> int:
    """Validate, print."""
    parser = Parser(prog="python -m analysis.predict", description=__doc__)
    add = parser.add_argument
    files = {"nargs": "+", "type": Path, "metavar": "FILE"}
    add("--validate", **files, required=True, help="published tables (CSV)")
    add_rows_flag(parser)
    held_out = "which rows are held out (default: random)"
    add("--split", choices=SPLITS, default="random", help=held_out)
    add("--memory", action="store_true", help="predict gigabytes, not seconds")
    add_table_flags(parser)
    arguments = parser.parse_args(argv)
    check_flags(arguments, calibrate_rows=(0, 10_000))
    rows = read_rows(arguments.validate)
    validate = validate_memory if arguments.memory else validate_time
    result = summary(validate(rows, arguments.calibrate_rows, arguments.split))
    if arguments.format == "json" and arguments.columns is None:
        print(json_object(result))
        return 0
    show([table(result)], arguments.format, arguments.columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
