r"""Render a study to sbatch scripts: slurm/<study>/<run>.slurm.

    python -m slurm.render slurm/layouts.toml
    python -m slurm.render slurm/*.toml                        # or: make render
    python -m slurm.render slurm/layouts.toml --cluster dgx-a100 --dry-run
    sbatch slurm/layouts/megatron-tp2-pp2.slurm
    sbatch slurm/layouts/*.slurm
    for script in slurm/layouts/*.slurm; do sbatch "$script"; done

Points that cannot run are listed with their reasons and left out; --strict refuses them instead.
Slurm itself takes one script and hands it the other names as arguments; the script then submits
those, once, and of such a list only what is not complete yet runs. Submit from the repository's
root: paths in the scripts are relative to it.
"""

import argparse
import errno
import json
import os
import re
import shlex
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote as percent_encode

from models.errors import Parser, UsageError, command_line
from models.files import check_keys
from parallel.clusters import CLUSTERS, OPTION, Cluster, check_environment
from parallel.facts import planned
from parallel.spec import RunSpec
from parallel.study import Study, load_study

ROOT = Path(__file__).resolve().parent.parent
MARK = "# Rendered by python -m slurm.render"
SWITCHES = ("nsys", "nccl_logs", "torchrun_logs", "dist_debug")


@dataclass(frozen=True)
class Ask:
    """What a study's [slurm] table asks for, beyond the run itself.

    time: the limit, as Slurm writes it. requeue: start again when a node dies, and when the run has
    saved before its limit; it goes on from there, so it needs save_interval. max_restarts: how
    often at most, whoever restarts it. The four switches leave proof beside the run; at submission
    the environment variable of the same name in capitals (NSYS=1 sbatch ...) overrides each.
    """

    time: str = ""
    memory: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    nsys: bool = False
    nccl_logs: bool = False
    torchrun_logs: bool = False
    dist_debug: bool = False
    requeue: bool = False
    max_restarts: int = 3
    tp_across_nodes: bool = False
    budget_gpu_hours: float = 1000.0


def ask_of(table: dict[str, Any], source: str) -> Ask:
    """The [slurm] table, checked.

    Raises:
        UsageError: an unknown key, a value of another type, or one that no #SBATCH line can hold.
    """
    known = {f.name: f.type for f in fields(Ask)}
    check_keys(table, known, f"{source} [slurm]")
    for name, value in table.items():
        kind = {bool: bool, int: int, str: str, float: (int, float)}.get(known[name], dict)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f"{source} [slurm]: {name} cannot be {value!r}")
        if name in ("max_restarts", "budget_gpu_hours") and not value >= 0:
            raise UsageError(f"{source} [slurm]: {name} cannot be {value!r}")
        if name in ("time", "memory") and not OPTION.fullmatch(value):
            raise UsageError(f"{source} [slurm]: {name} {value!r} cannot stand in an #SBATCH line")
    check_environment(table.get("environment", {}), f"{source} [slurm]")
    return Ask(**table)


def seconds(limit: str) -> int:
    """A Slurm time limit: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        UsageError: it is none of these, a part is larger than its unit holds, or it is zero.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not match:
        raise UsageError(f"time limit {limit!r} is not Slurm's: H:M:S or D-H:M:S")
    days, *rest = match.groups()
    numbers = [int(n) for n in rest if n is not None]
    if days is None and len(numbers) < 3:  # M or M:S
        numbers = [0, *numbers]
    hours, minutes, secs = (numbers + [0, 0])[:3]
    # Slurm takes 99:99:99 for more than four days: whoever wrote it meant something else.
    in_hours = days is not None or None not in rest
    if secs > 59 or (minutes > 59 and in_hours) or (hours > 23 and days is not None):
        raise UsageError(
            f"time limit {limit!r}: a day has 24 hours, an hour 60 minutes, a minute 60 seconds"
        )
    total = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + secs
    if total == 0:
        raise UsageError(f"time limit {limit!r} is no time")
    return total


@dataclass(frozen=True)
class Job:
    """One run's place on a cluster: what Slurm is asked for."""

    run: str
    nodes: int
    ranks_per_node: int
    time: str
    gpu_hours: float  # of all GPUs that are ours alone, until the time limit of the last restart


def job_of(study: Study, name: str, cluster: Cluster) -> Job:
    """The nodes, ranks and worst cost of one run.

    Raises:
        UsageError: what its [slurm] table asks for cannot be.
    """
    spec, ask = study.specs[name], ask_of(study.slurm[name], str(study.path))
    if ask.requeue and not spec.save_interval:
        raise UsageError(
            f"{study.path}: {name} asks for requeue without save_interval: nothing would be saved,"
            " and every restart would begin at step 0"
        )
    time = ask.time or cluster.time
    nodes = cluster.nodes(spec.gpus)
    ours = nodes * cluster.gpus_per_node if "--exclusive" in cluster.options else spec.gpus
    attempts = 1 + ask.max_restarts if ask.requeue else 1
    return Job(name, nodes, spec.gpus // nodes, time, attempts * ours * seconds(time) / 3600)


def script_folder(study: Study) -> Path:
    """Where the study's scripts are: beside the study file, in a folder of its name."""
    return study.path.parent / study.name


def cluster_of(study: Study) -> Cluster:
    """Raises: UsageError: neither the study nor the command line names a cluster."""
    if study.cluster is None:
        raise UsageError(f"study {study.path} names no cluster: add cluster = ... or --cluster")
    return study.cluster


def words(text: str) -> str:
    """Text for a comment: on one line, in printable ASCII, whatever it was."""
    return text.encode("unicode_escape").decode("ascii")


def shell_path(path: str) -> str:
    """A path as a shell word in which ${NAME} alone is expanded."""
    parts = re.split(r"(\$\{[A-Za-z_][A-Za-z0-9_]*\})", path)
    return "".join(
        f'"${{{part[2:-1]}:?}}"' if number % 2 else shlex.quote(part) if part else ""
        for number, part in enumerate(parts)
    )


def shown(path: Path) -> str:
    """A path relative to the repository's root where it lies below it."""
    path = path.absolute()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def comment_of(study: Study, logs: Path) -> str:
    """The job's comment: by it and its name slurm.status knows whose job it is. `logs` is told
    where it is not the usual folder."""
    place = shown(ROOT / logs)
    text = study.name if place == "logs" else f"{study.name} in {place}"
    return percent_encode(os.fsencode(text), safe="")


def planned_text(study: Study, name: str) -> str:
    """<jobid>.submitted: what the run is, for a job that may die before it has a run.json."""
    return json.dumps(planned(study.specs[name], study.name, name, study.baseline))


def summary(spec: RunSpec) -> str:
    layout = spec.layout
    sizes = " ".join(f"{axis}{getattr(layout, axis)}" for axis in ("tp", "pp", "vpp", "dp"))
    return (
        f"{spec.engine}, {spec.model.n_params / 1e9:.3g}B parameters, {sizes},"
        f" {layout.n_micro} x {layout.micro_batch} x dp {layout.dp}"
        f" = {layout.global_batch} sequences of {spec.seq_len}, {spec.precision},"
        f" {spec.steps} steps"
    )


def render(study: Study, name: str, cluster: Cluster, logs: Path = Path("logs")) -> str:
    """The sbatch script of one run; the same arguments always give the same text.

    Raises:
        UsageError: a value that no #SBATCH line can hold.
    """
    spec = study.specs[name]
    ask = ask_of(study.slurm[name], str(study.path))
    job = job_of(study, name, cluster)
    share = cluster.cores_per_node * job.ranks_per_node // cluster.gpus_per_node
    lead = max(10, min(120, seconds(job.time) // 5))
    request = {"gres": f"--gres=gpu:{job.ranks_per_node}", "none": ""}.get(
        cluster.gpu_request, f"--gpus-per-node={job.ranks_per_node}"
    )
    memory = ask.memory or cluster.memory
    comment = comment_of(study, logs)
    options = [
        f"--job-name={name}",
        f"--comment={comment}",
        f"--account={cluster.account}" if cluster.account else "",
        f"--partition={cluster.partition}" if cluster.partition else "",
        f"--qos={cluster.qos}" if cluster.qos else "",
        f"--constraint={cluster.constraint}" if cluster.constraint else "",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={max(1, share)}",
        request,
        f"--mem={memory}" if memory else "",
        *cluster.options,
        f"--time={job.time}",
        f"--signal=B:USR1@{lead}",
        "--requeue" if ask.requeue else "--no-requeue",
        "--open-mode=append",
        "--output=%x-%j.out",
    ]
    environment = cluster.environment | cluster.network | ask.environment
    set_up = [
        f'{line} || fail {shlex.quote(f"{line} ended with status")}" $?"'
        for line in (f"module load {shlex.quote(module)}" for module in cluster.modules)
    ]
    set_up += [
        f"export {key}={shlex.quote(value)} || fail 'export {key}: not possible'"
        for key, value in environment.items()
    ]
    if cluster.scratch:
        needed = re.findall(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", cluster.scratch)
        set_up += [
            f"[[ -n ${{{name}:-}} ]] || fail 'scratch: {name} is not set'" for name in needed
        ]
        set_up += [
            f"scratch={shell_path(cluster.scratch)}",
            'export TORCH_EXTENSIONS_DIR="$scratch/torch_extensions"',
            'export TRITON_CACHE_DIR="$scratch/triton"',
        ]
    values = {
        "run": name,
        "study_file": shown(study.path),
        "cluster": cluster.name,
        "own": shown(script_folder(study) / f"{name}.slurm"),
        "folder": str(logs / study.name / name),
        "comment": comment,
        "planned": planned_text(study, name),
    }
    return BODY.format(
        options="\n".join(f"#SBATCH {option}" for option in options if option),
        mark=MARK,
        source=words(shown(study.path)),
        question=words(study.question),
        summary=words(summary(spec)),
        values="\n".join(f"{key}={shlex.quote(value)}" for key, value in values.items()),
        ranks=job.ranks_per_node,
        switches="\n".join(
            f': "${{{switch.upper()}:={int(getattr(ask, switch))}}}"' for switch in SWITCHES
        ),
        requeue=int(ask.requeue),
        max_restarts=ask.max_restarts,
        lead=lead,
        patience=lead * 2 // 3,
        set_up="\n".join(set_up) or ": # this cluster needs nothing more",
    )


# bash, with {{ and }} for its own braces. Values from a study or a cluster come in through
# shlex.quote alone, so they are data whatever they hold.
BODY = r"""#!/bin/bash
{options}

{mark} {source}
# {question}
# {summary}
set -uo pipefail

{values}
ranks={ranks} # on each node
requeue={requeue}
max_restarts={max_restarts}
job=${{SLURM_JOB_ID:?submit this script with sbatch}}
restart=${{SLURM_RESTART_COUNT:-0}}
{switches}

if [[ ! -f $study_file ]]; then
  printf 'not the repository (no %s here): submit from its root\n' "$study_file" >&2
  exit 2
fi

fail() {{ # REASON [STATUS]: end this job before its run, and say why
  echo "slurm: failed: $1"
  "${{PYTHON:-.venv/bin/python}}" -m slurm.mark "$folder" "$1" "$folder/$attempt.out"
  echo "${{2:-1}}" >"$folder/$attempt.exit"
  exit "${{2:-1}}"
}}

# Slurm opened this job's log before there was a folder for it, where there surely was one. It stays
# open when it gets a name in there; on another file system it gets a link, and a copy at the end.
mkdir -p -- "$folder" || exit 2
attempt=$job
((restart == 0)) || attempt=$job.restart$restart
log=$SLURM_JOB_NAME-$job.out
# shellcheck disable=SC2317 # the trap calls it
copy_log() {{
  for kept in "$folder/$attempt.out" "$folder/$job.skipped"; do
    [[ ! -L $kept ]] || {{ cp --remove-destination -- "$log" "$kept" && rm -- "$log"; }}
  done
}}
if [[ -f $log ]] && ln -- "$log" "$folder/$attempt.out" 2>/dev/null; then
  rm -- "$log"
elif [[ -f $log ]]; then
  mv -- "$log" "$PWD/.$SLURM_JOB_NAME-$attempt.out" && log=$PWD/.$SLURM_JOB_NAME-$attempt.out
  ln -s -- "$log" "$folder/$attempt.out"
  trap copy_log EXIT
fi

# "sbatch slurm/<study>/*.slurm" names this script to Slurm and the others to us: submit them, once.
# Each is given its own name, by which it knows that it is one of a list.
submit_others() (
  export SBATCH_ACCOUNT="${{SBATCH_ACCOUNT:-${{SLURM_JOB_ACCOUNT:-}}}}" # as of sbatch --account
  [[ -n $SBATCH_ACCOUNT ]] || unset SBATCH_ACCOUNT
  for name in "${{!SLURM_@}}"; do # the others are not part of this job
    [[ $name == SLURM_CONF ]] || unset "$name"
  done
  declare -A seen=()
  for script in "$@"; do
    [[ -z ${{seen[$script]:-}} && ! $script -ef $own ]] || continue
    seen[$script]=1
    if [[ $script == *.slurm && -f $script ]]; then
      sbatch -- "$script" "$script"
    else
      printf 'slurm: not submitted, no script: %q\n' "$script"
    fi
  done
)
if (($# > 0)) && mkdir -- "$folder/$job.others" 2>/dev/null; then
  submit_others "$@"
fi

# Two jobs never share a run folder; a list runs only what is not complete; and a job that Slurm
# restarted after it had done its work does not do it again.
skip() {{
  echo "slurm: not run: $1"
  ((restart > 0)) || mv -n -- "$folder/$attempt.out" "$folder/$job.skipped" 2>/dev/null
  exit 0
}}
while IFS='|' read -r id its_comment where; do
  [[ $id =~ ^[0-9]+$ && $its_comment == "$comment" && $where -ef . ]] || continue
  ((restart == 0 && id >= job)) || ((id == job)) || skip "job $id is running it"
done < <(squeue --noheader --me --states=RUNNING --name="$run" --format='%i|%k|%Z' 2>/dev/null)
if [[ -f $folder/RUN_COMPLETE.txt ]]; then
  (($# == 0)) || ((restart > 0)) || skip "it is complete (to run it again, submit it alone)"
  if ((restart > 0)) && grep -qsx 0 "$folder/$job.exit" "$folder/$job.restart"*.exit; then
    skip "complete before restart $restart"
  fi
fi
printf '%s\n' "$planned" >"$folder/$job.submitted"

if ((restart > max_restarts)); then # Slurm's own restarts, as of a lost node, count too
  echo "slurm: not run: restarted $max_restarts times already (max_restarts)"
  fail "max_restarts: $max_restarts used up" 75
fi
set +u # a site's module function may use what is not set
{set_up}
set -u
python=${{PYTHON:-.venv/bin/python}}
export PYTHONPATH="$PWD${{PYTHONPATH:+:$PYTHONPATH}}"
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"

# The environment without secrets; the job as Slurm sees it; this very script.
"$python" -m parallel.environment "$folder/$attempt.env" ||
  fail "no working Python: $python ended with status $?"
scontrol show job "$job" >"$folder/$attempt.job"
cp -- "$0" "$folder/$attempt.slurm"

# The first node is the master. A test cluster's node names are in no DNS; there Slurm knows where.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if ! getent hosts "$MASTER_ADDR" >/dev/null; then
  MASTER_ADDR=$(scontrol show node "$MASTER_ADDR" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
fi
# Below the kernel's ephemeral ports, far from the ports of other jobs on this node, and not taken.
MASTER_PORT=$((20000 + (job * 7 + restart) % 12000))
while (exec 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do
  MASTER_PORT=$((MASTER_PORT + 1))
done
export MASTER_ADDR MASTER_PORT

have() {{ # whether a tool is here; else it says what is skipped
  command -v "$1" >/dev/null || {{ echo "slurm: skipped $2: no $1 here"; return 1; }}
}}
launch=()
torchrun=(
  "$python" -m torch.distributed.run "--nnodes=$SLURM_JOB_NUM_NODES" "--nproc-per-node=$ranks"
  --max-restarts=0 --rdzv-backend=c10d "--rdzv-id=$job.$restart"
  "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT"
)
if [[ $NCCL_LOGS == 1 ]]; then
  mkdir -p -- "$folder/$attempt.nccl"
  export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH
  export NCCL_DEBUG_FILE="$PWD/$folder/$attempt.nccl/nccl_rank_%h_%p.log"
  export NCCL_TOPO_DUMP_FILE="$PWD/$folder/$attempt.nccl/nccl_topo.xml"
  have ibstat ibstat.txt && ibstat >"$folder/$attempt.nccl/ibstat.txt"
  have nvidia-smi topo.txt && nvidia-smi topo -m >"$folder/$attempt.nccl/topo.txt"
fi
if [[ $TORCHRUN_LOGS == 1 ]]; then
  torchrun+=(--log-dir "$folder/$attempt.torchrun" --redirects 3 --tee 3)
fi
if [[ $DIST_DEBUG == 1 ]]; then
  # Not DETAIL unless asked for: it checks every collective, and with gloo on CPU ranks crash.
  export TORCH_DISTRIBUTED_DEBUG="${{TORCH_DISTRIBUTED_DEBUG:-INFO}}" TORCH_CPP_LOG_LEVEL=INFO
fi
if [[ $NSYS == 1 ]] && have nsys "the profile"; then
  mkdir -p -- "$folder/$attempt.profiles"
  launch=(nsys profile "--trace=cuda,nvtx,osrt" --force-overwrite=true
    "--output=$folder/$attempt.profiles/nsys_${{job}}_%h")
fi

# Before the time limit every rank hears SIGUSR1 (slurm.node passes it on), may save and end; who is
# deaf to it hears SIGTERM when two thirds of what is left are over.
# shellcheck disable=SC2317 # the traps call it
stop() {{
  stopped=${{stopped:-$2}}
  echo "slurm: $2"
  kill "-$1" "$step" 2>/dev/null
}}
# shellcheck disable=SC2317
before_the_limit() {{
  stop USR1 "time limit: stopped {lead} s or more before it"
  (sleep {patience}; kill -TERM "$step") &>/dev/null &
  patience=$!
}}
step="" stopped="" patience=""
trap before_the_limit USR1
trap 'stop TERM "SIGTERM: cancelled, preempted or requeued"' TERM

srun "--nodes=$SLURM_JOB_NUM_NODES" "--ntasks=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  "--cpus-per-task=${{SLURM_CPUS_PER_TASK:-1}}" --kill-on-bad-exit=1 \
  "$python" -m slurm.node "${{launch[@]}}" "${{torchrun[@]}}" -m parallel.train \
  --study "$study_file" --cluster "$cluster" --run-name "$run" --out "$folder" &
step=$!
status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do # a signal interrupted wait: the step is still ending
  status=0
  wait "$step" || status=$?
done
[[ -z $patience ]] || kill "$patience" 2>/dev/null

for report in "$folder/$attempt.profiles"/*.nsys-rep; do
  [[ -f $report ]] || continue
  host=${{report##*_}}
  nsys stats "$report" >"$folder/$attempt.profiles/nsys_stats_${{host%.nsys-rep}}.txt"
done
if ((status != 0)); then
  "$python" -m slurm.mark "$folder" "${{stopped:-exit status $status}}" "$folder/$attempt.out"
  # torchrun says 1 whatever its ranks said; theirs is 75 (try again) where they stopped and saved.
  if [[ $folder/status.json -nt $folder/$attempt.job ]] &&
    grep -qsF '"state": "interrupted"' "$folder/status.json"; then
    status=75
  fi
fi
printf '%s\n' "$status" >"$folder/$attempt.exit"
# Whoever got on and saved before the limit goes on from there, where the study wants it.
if ((requeue && status == 75)) && [[ $stopped == "time limit"* ]] &&
  [[ $folder/steps.csv -nt $folder/$attempt.job ]]; then
  if ((restart < max_restarts)); then
    scontrol requeue "$job"
  else
    echo "slurm: not started again: restarted $max_restarts times already (max_restarts)"
  fi
fi
exit "$status"
"""


def estimate(study: Study, names: list[str]) -> tuple[list[Job], float]:
    """What the named runs cost at worst: each job, and GPU-hours in total."""
    jobs = [job_of(study, name, cluster_of(study)) for name in names]
    return jobs, sum(job.gpu_hours for job in jobs)


def tell(study: Study, jobs: list[Job], total: float) -> list[str]:
    """The presubmit estimate and what is left out, as lines."""
    wide = max((len(job.run) for job in jobs), default=3)
    lines = [f"{'run':{wide}}  nodes  ranks/node  time limit   GPU-hours at worst"]
    lines += [
        f"{job.run:{wide}}  {job.nodes:5}  {job.ranks_per_node:10}  {job.time:>10}"
        f"  {job.gpu_hours:19.2f}"
        for job in jobs
    ]
    lines.append(f"{len(jobs)} runs on {cluster_of(study).name}: {total:.2f} GPU-hours at worst")
    asked = [ask_of(study.slurm[job.run], str(study.path)) for job in jobs]
    if most := max((ask.max_restarts for ask in asked if ask.requeue), default=0):
        lines.append(f"with requeue, max_restarts are counted: {most} of a run at most")
    lines += study.assumed
    lines += [f"left out: {what}: {why}" for what, why in study.left_out]
    return lines


def write(study: Study, logs: Path = Path("logs"), dry_run: bool = False) -> list[Path]:
    """Write every script, and remove those of runs that the study no longer has; with `dry_run`,
    find out only whether that can be done.

    Raises:
        UsageError: they cannot be rendered or written.
    """
    folder, cluster = script_folder(study), cluster_of(study)
    texts = {name: render(study, name, cluster, logs) for name in study.settings}
    paths = [folder / f"{name}.slurm" for name in texts]
    try:
        if dry_run:
            _check_writable(folder, paths)
            return paths
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.slurm"):
            if old.stem not in texts and MARK in old.read_text(errors="replace"):
                old.unlink()
        for path in paths:
            path.write_text(texts[path.stem])
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from error
    return paths


def _check_writable(folder: Path, paths: list[Path]) -> None:
    """Raises: OSError: as writing these files into the folder would."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    for place in (there, *(path for path in paths if (there / path.name).exists())):
        if place != there and place.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(place))
        if place.exists() and not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))


@command_line("slurm.render")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m slurm.render",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("studies", type=Path, metavar="TOML", nargs="+", help="study files")
    parser.add_argument("--cluster", metavar="NAME", help="of slurm/clusters.toml")
    parser.add_argument("--logs", type=Path, default=Path("logs"), metavar="DIR")
    parser.add_argument("--strict", action="store_true", help="refuse what cannot run")
    parser.add_argument("--dry-run", action="store_true", help="write nothing; print the estimate")
    arguments = parser.parse_args(argv)
    for path in arguments.studies:
        if os.path.realpath(path) == str(CLUSTERS) and len(arguments.studies) > 1:
            continue  # slurm/*.toml names it too
        study = load_study(path, arguments.cluster, arguments.strict)
        jobs, total = estimate(study, list(study.settings))
        if len(arguments.studies) > 1:
            print(f"{shown(path)}:")
        print("\n".join(tell(study, jobs, total)))
        paths = write(study, arguments.logs, arguments.dry_run)
        if not arguments.dry_run:
            print(f"wrote {len(paths)} scripts to {shown(script_folder(study))}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
