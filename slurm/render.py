r"""What a study asks of Slurm: its runs, their highest cost, and the script of each.

    python -m slurm.render slurm/layouts.toml                  # the runs and their GPU-hours
    python -m slurm.render slurm/layouts.toml --list           # the runs' names
    python -m slurm.render slurm/layouts.toml --run-name ddp        # the whole script of one run
    python -m slurm.render slurm/*.toml --cluster dgx-a100 --dry-run
    sbatch slurm/layouts.slurm                                 # submit every run of the study
    sbatch slurm/*.slurm                                       # and of every study

The first form also writes the study's script beside it (slurm/layouts.slurm), which submits the
runs; --dry-run writes nothing. Only --force replaces a script that this command did not write.
Combinations that cannot run are left out, with one line for each reason. Submit from the
repository's root: paths in the scripts are relative to it.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import quote as percent_encode

from base.bounds import Bounds, Text, key
from base.errors import Parser, UsageError, by_reason, command_line
from base.files import ROOT, add_force_flag, named_folder
from base.storage import check_output, output
from parallel.config.clusters import CLUSTERS, Cluster, JobSettings
from parallel.config.resolve import merge_tables
from parallel.config.study import Study, load_study
from parallel.record.facts import planned

JOB = ROOT / "slurm" / "job.sh"
CALIBRATIONS = ROOT / "analysis" / "planner" / "calibrations"
MARK = "exec bash slurm/study.sh"
# What slurm/job.sh and slurm.submit give, or take for granted, beside the options of `header`.
BESIDE = ("--error=%x-%j.out", f"--chdir={ROOT}", "--array (none)")
OF_SRUN = ("--nodes", "--ntasks", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--output")
OF_TORCHRUN = ("--nnodes", "--nproc-per-node", "--max-restarts=0", "--rdzv-endpoint")
SHORT = {"J": "job-name", "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time"}
SHORT |= {"o": "output", "e": "error", "A": "account", "p": "partition", "q": "qos"}
SHORT |= {"C": "constraint", "D": "chdir", "a": "array", "K": "kill-on-bad-exit"}
SWITCHES = ("nsys", "nccl_logs", "torchrun_logs")


@dataclass(frozen=True, kw_only=True)
class Ask(JobSettings):
    """What the [slurm] table of a study and the `slurm` tables of its runs may ask for, beyond the
    run itself.

    The three switches leave proof beside the run; at submission the environment variable of the
    same name in capitals (NSYS=1 sbatch ...) overrides each.
    """

    nsys: bool = key(False, "profile with Nsight Systems")
    nccl_logs: bool = key(False, "keep NCCL's logs")
    torchrun_logs: bool = key(False, "keep each rank's output")
    requeue: bool = key(False, "start again when a node dies, or time is over and it has saved")
    max_restarts: int = key(3, "how often at most", Bounds(0, 10**6))
    tp_across_nodes: bool = key(False, "let tp be larger than a node")
    preflight: bool = key(False, "measure the nodes before training")
    leave_out_nodes: bool = key(False, "let jobs leave out nodes that slurm.nodes suspects")
    leave_out_days: int = key(7, "how long", Bounds(1, 3650))
    budget_gpu_hours: float = key(1000.0, "that submit may spend", Bounds(0, 10**12))
    after: str = key(
        "", "the study beside this one whose runs must be complete first", Text(r"[^/]*", "a name")
    )
    only_if: str = key("", "a shell command that must succeed first")


def ask_of(study: Study, name: str) -> Ask:
    """Returns what a run asks for, checked: what its cluster's table says, unless the study, or the
    run itself, says otherwise."""
    site = study.cluster
    said_by_site = {f.name: getattr(site, f.name) for f in fields(JobSettings)} if site else {}
    ask = Ask(**merge_tables(Ask, said_by_site, *study.runs[name].slurm))
    ask.check_together(f"{study.path}: {name}")
    return ask


def seconds(time: str) -> int:
    """Returns the seconds of a time as Slurm writes it: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S.
    99:99:99, which Slurm takes for more than four days, is refused: it was meant otherwise."""
    match = re.fullmatch(r"((\d+)-)?(\d+)(:[0-5]?\d)?(:[0-5]?\d)?", time)
    if match is None:
        raise UsageError(f"time limit {time!r} is none of Slurm's: M:S, H:M:S, D-H:M:S")
    days, *numbers = (int(number.strip(":")) for number in match.groups("0")[1:])
    if match[1] is None and match[5] is None:  # M or M:S
        numbers = [0, *numbers]
    return ((days * 24 + numbers[0]) * 60 + numbers[1]) * 60 + numbers[2]


@dataclass(frozen=True)
class Job:
    """One run's place on a cluster: what Slurm is asked for."""

    run: str
    cluster: Cluster
    ask: Ask
    nodes: int
    ranks_per_node: int
    lead_s: int  # before the time limit, at which the run gets the signal to save and end
    gpus: int  # that are ours alone
    gpu_hours: float  # of them all, until the time limit of the last restart


def job_of(study: Study, name: str) -> Job:
    """Returns the nodes, ranks and worst cost of one run; what cannot be is refused."""
    spec, ask, cluster = study.runs[name].spec, ask_of(study, name), cluster_of(study)
    asker = f"{study.path}: {name} asks for"
    if ask.requeue and not spec.save_interval:
        raise UsageError(f"{asker} requeue without save_interval: it would restart at step 0")
    if ask.gpu_type and cluster.gpu_request == "none":
        raise UsageError(f"{asker} gpu_type {ask.gpu_type}, and {cluster.name} has no GPUs")
    lead_s, limit_s = ask.signal_lead_s, seconds(ask.time)
    if lead_s >= limit_s:
        raise UsageError(f"{asker} signal_lead_s {lead_s}, not below the time limit {ask.time}")
    lead_s = lead_s or max(10, min(120, limit_s // 5))
    nodes = cluster.nodes(spec.gpus)
    job_gpus = nodes * cluster.gpus_per_node if "--exclusive" in ask.options else spec.gpus
    attempts = 1 + ask.max_restarts if ask.requeue else 1
    gpu_hours = attempts * job_gpus * limit_s / 3600
    return Job(
        run=name,
        cluster=cluster,
        ask=ask,
        nodes=nodes,
        ranks_per_node=spec.gpus // nodes,
        lead_s=lead_s,
        gpus=job_gpus,
        gpu_hours=gpu_hours,
    )


def cluster_of(study: Study) -> Cluster:
    """Returns the cluster that the study, or the command line, names."""
    if study.cluster is None:
        raise UsageError(f"study {study.path} names no cluster: add cluster = ... or --cluster")
    return study.cluster


def words(text: str) -> str:
    """Returns text for a comment: on one line, in printable ASCII, whatever it was."""
    return text.encode("unicode_escape").decode("ascii")


def shown(path: Path) -> str:
    """Returns a path relative to the repository's root where it lies below it."""
    path = path.absolute()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def comment_of(study: Study, logs: Path) -> str:
    """Returns the job's comment, by which slurm.status finds the jobs of a study. It holds `logs`
    where that is not the usual folder."""
    place = shown(ROOT / logs)
    text = study.name if place == "logs" else f"{study.name} in {place}"
    return percent_encode(os.fsencode(text), safe="")


def planned_text(study: Study, name: str) -> str:
    """Returns <jobid>.submitted: what the run is, for a job that may die before it has a
    run.json."""
    return json.dumps(planned(study, name))


def header(study: Study, job: Job, logs: Path) -> list[str]:
    """Returns the options of sbatch; one of the cluster that contradicts ours is refused."""
    cluster, ask = job.cluster, job.ask
    cores = cluster.cores_per_node * job.ranks_per_node // cluster.gpus_per_node
    card = f"{ask.gpu_type}:" if ask.gpu_type else ""
    request = {
        "gres": f"--gres=gpu:{card}{job.ranks_per_node}",
        "gpus-per-node": f"--gpus-per-node={card}{job.ranks_per_node}",
        "gpus": f"--gpus={card}{job.ranks_per_node * job.nodes}",
        "none": "",
    }
    stated = {
        f.metadata["sbatch"]: getattr(ask, f.name) for f in fields(ask) if "sbatch" in f.metadata
    }
    stated = {"clusters": cluster.slurm_cluster, **stated}
    first = [
        f"--job-name={job.run}",
        f"--comment={comment_of(study, logs)}",
        *(f"--{name}={value}" for name, value in stated.items() if value),
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={max(1, cores)}" if cluster.cpus_per_task else "",
        request[cluster.gpu_request],
        f"--mem={ask.memory}" if ask.memory else "",
    ]
    last = [
        f"--time={ask.time}",
        f"--signal=B:USR1@{job.lead_s}",
        "--requeue" if ask.requeue else "--no-requeue",
        "--open-mode=append",
        "--output=%x-%j.out",
    ]
    waits = ["--dependency"] if study.runs[job.run].after else []
    ours = {"sbatch": [*first, *last, *BESIDE, *waits], "srun": OF_SRUN, "torchrun": OF_TORCHRUN}
    added = {"sbatch": ask.options, "srun": ask.srun, "torchrun": ask.torchrun}
    for command, options in added.items():
        for option in options:
            same_option = (own for own in ours[command] if _about(own).startswith(_about(option)))
            if (own := next(same_option, option)) != option:
                raise UsageError(
                    f"{job.run} on {cluster.name}: {command}'s option {option} contradicts {own},"
                    " which each job gives: take it out"
                )
    more = {_about(option): option for option in ask.options}  # a run's replaces the site's
    return [option for option in (*first, *more.values(), *last) if option]


def _about(option: str) -> str:
    """Returns what an option is about: nodes of --nodes=2 and -N2, requeue of --no-requeue."""
    if not option.startswith("--"):
        return SHORT.get(option[1:2], option)
    name = option[2:].partition("=")[0].replace("_", "-")
    return "requeue" if name == "no-requeue" else name


def settings(study: Study, job: Job, logs: Path) -> list[str]:
    """Returns the settings of slurm/job.sh, as NAME=VALUE."""
    cluster, ask = job.cluster, job.ask
    calibration = CALIBRATIONS / f"{cluster.name}.toml"
    single = {
        "run": f"{job.run} {planned_text(study, job.run)}",
        "study_file": shown(study.path),
        "study_folder": str(logs / study.name),
        "clusters_file": shown(cluster.source),
        "comment": comment_of(study, logs),
        "ranks": job.ranks_per_node,
        "lead": job.lead_s,
        "requeue": int(ask.requeue),
        "max_restarts": ask.max_restarts,
        "gpus": int(cluster.gpu_request != "none"),
        "scratch": cluster.scratch,
        "python": ask.python,
        "environment_tar": ask.environment_tar,
        "master_addr_suffix": cluster.master_addr_suffix,
        "preflight": int(ask.preflight),
        "calibration": shown(calibration) if calibration.exists() else "",
        **{switch: int(getattr(ask, switch)) for switch in SWITCHES},
    }
    several = {
        "setup": ask.setup,
        "teardown": ask.teardown,
        "export": [f"{key}={value}" for key, value in ask.environment.items()],
        "srun": ask.srun,
        "torchrun": ask.torchrun,
    }
    if inside := ask.container:
        single |= {f"container_{k}": getattr(inside, k) for k in ("runtime", "image", "python")}
        several |= {"mount": inside.mounts, "container_command": inside.command}
    lines = [f"{name}={value}" for name, value in single.items() if value != ""]
    return lines + [f"{name}={value}" for name, values in several.items() for value in values]


def script(study: Study, name: str, logs: Path = Path("logs")) -> str:
    """Returns the whole script of a run: the header, the settings and slurm/job.sh. The same
    arguments always give the same text."""
    job = job_of(study, name)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in header(study, job, logs)),
            "",
            f"# {words(study.question)}",
            f"# Rendered by python -m slurm.render {words(shown(study.path))} --run-name NAME",
            "# shellcheck disable=SC2016 # bash expands no setting",
            "settings=(",
            *(f"  {shlex.quote(word)}" for word in settings(study, job, logs)),
            ")",
            "",
            "# What follows is slurm/job.sh.",
            JOB.read_text().removeprefix("#!/bin/bash\n"),
        ]
    )


def study_script(study: Study) -> str:
    """Returns slurm/<study>.slurm, a small job that submits the runs of the study."""
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name={percent_encode(os.fsencode(study.name))}",
            "#SBATCH --ntasks=1",
            "#SBATCH --time=00:10:00",
            "#SBATCH --output=%x-%j.out",
            "",
            f"# {words(study.question)}",
            "# Submits the runs of this study, and of the other scripts that it is given.",
            '[[ -f slurm/study.sh ]] || { echo "submit from the repository\'s root" >&2; exit 2; }',
            f'{MARK} {shlex.quote(shown(study.path))} "$@"',
            "",
        ]
    )


def estimate(study: Study, names: list[str]) -> list[str]:
    """Returns lines on what the named runs ask for, cost at worst and leave out."""
    cluster = cluster_of(study)
    jobs = [job_of(study, name) for name in names]
    for job in jobs:
        header(study, job, Path("logs"))
    total = sum(job.gpu_hours for job in jobs)
    wide = max((len(job.run) for job in jobs), default=3)
    hours_wide = len(cluster.hours) + 10
    lines = [f"{'run':{wide}}  nodes  ranks/node  time limit   {cluster.hours} at worst"]
    lines += [
        f"{job.run:{wide}}  {job.nodes:5}  {job.ranks_per_node:10}  {job.ask.time:>10}"
        f"  {job.gpu_hours:{hours_wide}.2f}"
        for job in jobs
    ]
    lines.append(f"{len(jobs)} runs on {cluster.name}: {total:.2f} {cluster.hours} at worst")
    if most := max((job.ask.max_restarts for job in jobs if job.ask.requeue), default=0):
        lines.append(f"with requeue, max_restarts are counted: {most} of a run at most")
    return lines + study.assumed + [f"left out: {line}" for line in by_reason(study.left_out)]


def study_parser(command: str, doc: str) -> Parser:
    """Returns a parser of studies and the flags that every command about them has."""
    parser = Parser(prog=f"python -m {command}", description=doc)
    parser.add_argument(
        "--cluster", metavar="NAME", help="the cluster of clusters.toml (default: the study's own)"
    )
    parser.add_argument(
        "--logs",
        type=named_folder,
        default=Path("logs"),
        metavar="DIR",
        help="runs are in DIR/<study>/<run>, below the repository's root (default: logs)",
    )
    parser.add_argument(
        "studies", type=Path, metavar="TOML", nargs="+", help="study files, or their scripts"
    )
    return parser


def study_files(paths: list[Path]) -> list[Path]:
    """Returns the study of each path: slurm/<study>.slurm stands for its study. slurm/*.toml names
    the clusters' file too, which is none."""
    paths = [path.with_suffix(".toml") if path.suffix == ".slurm" else path for path in paths]
    return [
        path
        for path in dict.fromkeys(paths)
        if len(paths) == 1 or os.path.realpath(path) != str(CLUSTERS)
    ]


def load_studies(arguments: argparse.Namespace) -> list[Study]:
    """Reads the studies that `study_parser`'s arguments name."""
    return [load(path, arguments.cluster) for path in study_files(arguments.studies)]


def load(path: Path, cluster: str | None) -> Study:
    """Reads a study. The data and the DeepSpeed JSON that it names are below the repository's root,
    where its jobs run."""
    path = path if Path.cwd() == ROOT else path.absolute()
    with contextlib.chdir(ROOT):
        return load_study(path, cluster)


def each(studies: list[Study]) -> Iterator[Study]:
    """Yields the studies; where there are several, the name of each is printed before it."""
    for study in studies:
        if len(studies) > 1:
            print(f"{shown(study.path)}:")
        yield study


@command_line("slurm.render")
def main(argv: list[str] | None = None) -> int:
    parser = study_parser("slurm.render", __doc__)
    parser.add_argument("--list", action="store_true", help="print the runs' names alone")
    parser.add_argument("--run-name", metavar="NAME", help="print the script of this run")
    parser.add_argument("--dry-run", action="store_true", help="write nothing; print the estimate")
    add_force_flag(parser)
    arguments = parser.parse_args(argv)
    studies = load_studies(arguments)
    if arguments.run_name and len(studies) > 1:
        raise UsageError(f"--run-name names a run of one study, not of {len(studies)}")
    for study in each(studies):
        if arguments.run_name:
            study.run(arguments.run_name)  # or a UsageError that lists the names
            print(script(study, arguments.run_name, arguments.logs), end="")
        elif arguments.list:
            print("\n".join(study.runs))
        else:
            print("\n".join(estimate(study, list(study.runs))))
            path = study.path.with_suffix(".slurm")
            check_output(path, MARK, arguments.force, [study.path])
            if not arguments.dry_run:
                with output(path, MARK, arguments.force, [study.path]) as file:
                    file.write_text(study_script(study))
                print(f"wrote {shown(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
