#!/bin/bash
# The job of one run: it archives what the run is made of, starts torchrun on every node, and
# records how the run ended.
#
# Slurm gets this text with two things above it, which slurm/render.py writes: the #SBATCH lines and
# the array `settings`. To read, change or submit such a script alone:
#   python -m slurm.render STUDY --run-name RUN
# Bash treats every setting as data. Only the lines of `setup` and `teardown` are run.
set -uo pipefail

# Raise this number when the settings below change, or when this script asks something new of the
# Python modules that it calls. A job that was queued before then ends with one line.
version=10

# The settings, one NAME=VALUE a word. Those that are lists here may be given several times.
study_file=""   # the study, from the repository's root
study_folder="" # where its runs are recorded
clusters_file=""
comment=""      # of every job of this study
ranks=1         # on each node
lead=60         # seconds before the time limit at which the run is told to save and end
requeue=0       # 1: start again when the run has saved before its time limit
max_restarts=0
python=.venv/bin/python # outside a container; PYTHON in the environment overrides it
environment_tar=""      # a tar of the environment in which ranks run from each node's /tmp
gpus=0                  # 1: the job asks for GPUs
scratch=""              # a folder for compiled extensions
master_addr_suffix=""   # added to the first node's name
container_runtime=""    # apptainer, singularity, pyxis or charliecloud; "" for none
container_image=""
container_command=()    # container_command=WORD: in place of a runtime and its image
container_python=python3
nsys=0 nccl_logs=0 torchrun_logs=0
preflight=0             # 1: measure the nodes before training
calibration=""          # of the cluster, which the preflight compares with
run=""                  # NAME PLANNED: the run, and what it is in JSON
setup=()        # setup=LINE: run before Python
teardown=()     # teardown=LINE: run after the run
exports=()      # export=NAME=VALUE
mounts=()       # mount=FOLDER or mount=FOLDER:WHERE: in the container
srun_options=() # srun=OPTION
torchrun_options=() # torchrun=OPTION
declare -a settings

# slurm.status and slurm.record_end read this file, also where no Python works. The first reason
# counts. The kinds are those of parallel/record/ends.py.
write_end() { # KIND REASON: leave in the run folder why this script ends the run
  [[ -e $folder/$attempt.end ]] || printf '%s\n' "$1" "${2//$'\n'/ }" >"$folder/$attempt.end"
}

note_failure() { # REASON [STATUS [KIND]]
  setting_up=""
  echo "slurm: failed: $1"
  write_end "${3:-refused}" "$1"
  "$python" -m slurm.record_end "$folder" "$attempt" "${2:-1}"
  echo "${2:-1}" >"$folder/$attempt.exit"
}

fail() { # REASON [STATUS [KIND]]: end this job before its run, and say why
  note_failure "$@"
  exit "${2:-1}"
}

refuse() { # REASON: end this job before it has a folder
  printf 'slurm: %s\n' "$1" >&2
  exit 2
}

skip() { # REASON: end this job, which has nothing to do
  echo "slurm: not run: $1"
  ((restart > 0)) || mv -n -- "$folder/$attempt.out" "$folder/$job.skipped" 2>/dev/null
  exit 0
}

read_settings() { # NAME=VALUE...
  local word
  for word in "$@"; do
    case $word in
      setup=*) setup+=("${word#*=}") ;;
      teardown=*) teardown+=("${word#*=}") ;;
      export=*) exports+=("${word#*=}") ;;
      container_command=*) container_command+=("${word#*=}") ;;
      mount=*) mounts+=("${word#*=}") ;;
      srun=*) srun_options+=("${word#*=}") ;;
      torchrun=*) torchrun_options+=("${word#*=}") ;;
      *)
        [[ -v ${word%%=*} ]] ||
          refuse "slurm/job.sh version $version knows no setting ${word%%=*}: render the script again"
        printf -v "${word%%=*}" %s "${word#*=}"
        ;;
    esac
  done
}

# Slurm opened this job's log before its run folder was there. The log keeps the same open file when
# it is linked into the folder. On another file system the folder gets a symbolic link, and a copy at
# the end.
open_folder() {
  mkdir -p -- "$folder" || exit 2
  log=$SLURM_JOB_NAME-$job.out
  if [[ -f $log ]] && ln -- "$log" "$folder/$attempt.out" 2>/dev/null; then
    rm -- "$log"
  elif [[ -f $log ]]; then
    mv -- "$log" "$PWD/.$SLURM_JOB_NAME-$attempt.out" && log=$PWD/.$SLURM_JOB_NAME-$attempt.out
    ln -s -- "$log" "$folder/$attempt.out"
  fi
  trap at_exit EXIT
}

# shellcheck disable=SC2317 # the trap calls it
at_exit() {
  local kept failed=$setting_up
  [[ -z $failed ]] || note_failure "setup: $failed: it ended the job" # a file may call exit
  for kept in "$folder/$attempt.out" "$folder/$job.skipped"; do
    [[ ! -L $kept ]] || { cp --remove-destination -- "$log" "$kept" && rm -- "$log"; }
  done
  [[ -z $failed ]] || exit 1
}

# Environment Modules before version 4 ends with 0 when there is no such module.
check_set_up() { # STATUS: end the job if the line of set-up failed
  local errors=$folder/$attempt.setup
  cat -- "$errors" >&2
  [[ -s $errors ]] || rm -- "$errors"
  if (($1 != 0)) || { [[ $setting_up =~ ^(module|ml)[[:space:]] ]] && grep -qs ERROR: "$errors"; }; then
    fail "setup: $setting_up: status $1: $(grep -sv '^[[:space:]]*$' "$errors" | tail -n 1)"
  fi
}

check_version() {
  local here
  here=$(sed -n 's/^version=\([0-9]*\)$/\1/p' slurm/job.sh)
  [[ $here == "$version" ]] ||
    fail "queued with version $version of slurm/job.sh, but the repository has version ${here:-none}: submit the run again"
}

# Two jobs never share a run folder. A job that Slurm restarted after it had done its work does not
# do it again.
skip_what_is_done() {
  local id its_comment where
  while IFS='|' read -r id its_comment where; do
    [[ $id =~ ^[0-9]+$ && $its_comment == "$comment" && $where -ef . ]] || continue
    ((restart == 0 && id >= job)) || ((id == job)) || skip "job $id is running it"
  done < <(squeue --noheader --me --states=RUNNING --name="$run" --format='%A|%k|%Z' 2>/dev/null)
  if ((restart > 0)) && [[ -f $folder/RUN_COMPLETE.txt ]] && grep -qsx 0 "$folder/$job.exit" "$folder/$job.restart"*.exit; then
    skip "complete before restart $restart"
  fi
}

stop_after_the_last_restart() { # Slurm's own restarts, as of a lost node, count too
  ((restart > max_restarts)) || return 0
  echo "slurm: not run: restarted $max_restarts times already (max_restarts)"
  fail "max_restarts: $max_restarts used up" 75 unknown
}

# Slurm's view of the job, the code, and without secrets this script, the study, the clusters and the
# environment.
archive() {
  local mask
  local -a archived=("$folder/$attempt".{slurm,study.toml,clusters.toml})
  export GIT_OPTIONAL_LOCKS=0
  mask=$(umask)
  git rev-parse HEAD >"$folder/$attempt.commit" 2>/dev/null || rm -- "$folder/$attempt.commit"
  umask 077
  cp --remove-destination -- "$0" "${archived[0]}" # an older one would keep its mode
  cp --remove-destination -- "$study_file" "${archived[1]}"
  cp --remove-destination -- "$clusters_file" "${archived[2]}"
  if [[ -f $folder/$attempt.commit ]]; then
    archived+=("$folder/$attempt.diff")
    git diff HEAD -- . ':(exclude)logs' >"$folder/$attempt.diff"
  else
    echo "slurm: no commit is archived: git knows none here"
  fi
  umask "$mask"
  "$python" -m parallel.record.environment "$folder/$attempt.env" --hide "${archived[@]}" ||
    fail "no working Python: $python ended with status $?"
  SLURM_TIME_FORMAT=%s scontrol show job "$job" >"$folder/$attempt.job" # Unix times: no time zone
}

expand() { # WHAT TEXT: set `expanded` to the text with the value of each ${NAME}
  local text=$2 rest="" name
  while [[ $text =~ ^(.*)\$\{([A-Za-z_][A-Za-z0-9_]*)\}(.*)$ ]]; do
    name=${BASH_REMATCH[2]}
    [[ -n ${!name:-} ]] || fail "$1: $name is not set"
    text=${BASH_REMATCH[1]} rest=${!name}${BASH_REMATCH[3]}$rest
  done
  expanded=$text$rest
}

find_master() {
  # The first node is the master. A test cluster's node names are in no DNS; Slurm has the address.
  local first
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  MASTER_ADDR=$first$master_addr_suffix
  if ! getent hosts "$MASTER_ADDR" >/dev/null; then
    [[ -z $master_addr_suffix ]] ||
      fail "master_addr_suffix: no host is called $MASTER_ADDR"
    MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  fi
  # Below the kernel's ephemeral ports, far from the ports of other jobs on this node, and not taken.
  MASTER_PORT=$((20000 + (job * 7 + restart) % 12000))
  while (exec 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do
    MASTER_PORT=$((MASTER_PORT + 1))
  done
  export MASTER_ADDR MASTER_PORT
}

# The whole launch enters the container once on each node: srun, container, forward_signals,
# torchrun, ranks. The repository and the study's folder have the same paths inside. What runs
# outside, before and after, needs Python 3.11 but no torch.
enter_container() { # sets `launch`, and adds to srun's options where srun itself enters it
  local mount place word
  for word in "${container_command[@]}"; do
    expand "container command" "$word"
    launch+=("$expanded")
  done
  [[ -n $container_runtime ]] || return 0
  local -a bound=("$PWD:$PWD")
  expand "container image" "$container_image"
  local image=$expanded
  place=$(realpath -- "$study_folder") # a preflight keeps its rates there
  for mount in "$place" ${scratch:+"$scratch"} "${mounts[@]}"; do
    expand "container mount" "$mount"
    [[ $expanded == *:* ]] || expanded=$expanded:$expanded
    [[ $expanded == "$PWD"/*:"$PWD"/* ]] || bound+=("$expanded")
  done
  case $container_runtime in
    apptainer | singularity)
      launch=("$container_runtime" exec --pwd "$PWD")
      ((gpus == 0)) || launch+=(--nv)
      for mount in "${bound[@]}"; do launch+=(--bind "$mount"); done
      launch+=("$image")
      ;;
    pyxis)
      srun_options+=("--container-image=$image" "--container-workdir=$PWD")
      srun_options+=("--container-mounts=$(IFS=,; echo "${bound[*]}")")
      ;;
    charliecloud)
      export USER="${USER:-$(id -un)}" # ch-run asks for it
      launch=(ch-run --cd "$PWD")
      for mount in "${bound[@]}"; do launch+=(--bind "$mount"); done
      launch+=("$image" --)
      ;;
  esac
}

on_each_node() { # COMMAND...
  srun "--nodes=$SLURM_JOB_NUM_NODES" "--ntasks=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "$@"
}

# A parallel file system reads one large file fast, and the thousands that each rank imports slowly.
# Nodes of a test cluster may share /tmp: each unpacks into its own folder, and the first renames it.
unpack_environment() { # sets `unpacked`
  local command
  expand environment_tar "$environment_tar"
  unpacked=/tmp/gpt-environment-$job.$restart
  sbcast --force "$expanded" "$unpacked.tar" || fail "environment_tar: sbcast of $expanded failed"
  # shellcheck disable=SC2016 # each node expands it
  command='own=$0.$SLURMD_NODENAME; mkdir -m 700 "$own" && tar -xf "$0.tar" -C "$own" || exit
    mv -nT "$own" "$0"; rm -rf "$own"; [[ -O $0 && -x $0/bin/python ]]'
  on_each_node bash -c "$command" "$unpacked" ||
    fail "environment_tar: $expanded gave no bin/python in $unpacked on every node"
}

build_command() { # what srun starts on each node, in `launch`
  local python=$python inside=""
  launch=()
  if [[ -n $container_runtime || ${#container_command[@]} -gt 0 ]]; then
    enter_container
    inside=1
    python=$container_python
  elif [[ -n $environment_tar ]]; then
    python=$unpacked/bin/python
  fi
  launch+=("$python" -m slurm.forward_signals)
  if [[ $NSYS == 1 && -z $inside ]] && ! command -v nsys >/dev/null; then
    echo "slurm: skipped the profile: no nsys here"
  elif [[ $NSYS == 1 ]]; then
    mkdir -p -- "$folder/$attempt.profiles"
    launch+=(nsys profile "--trace=cuda,nvtx,osrt" --force-overwrite=true
      "--output=$folder/$attempt.profiles/nsys_${job}_%h")
  fi
  launch+=(
    "$python" -m torch.distributed.run "--nnodes=$SLURM_JOB_NUM_NODES" "--nproc-per-node=$ranks"
    --max-restarts=0 --rdzv-backend=c10d "--rdzv-id=$job.$restart"
    "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT"
    --monitor-interval=1 # torchrun looks once a second: after it no peer can read how a rank ended
  )
  if [[ $TORCHRUN_LOGS == 1 ]]; then
    launch+=(--log-dir "$folder/$attempt.torchrun" --redirects 3 --tee 3)
  fi
  launch+=("${torchrun_options[@]}")
}

# Before the time limit every rank gets SIGUSR1 (forward_signals passes it on): it may save and end.
# A rank that does not handle it gets SIGTERM when two thirds of the remaining time are over.
# shellcheck disable=SC2317 # the traps call it
stop() { # SIGNAL KIND REASON
  stopped=${stopped:-$2}
  write_end "$2" "$3"
  echo "slurm: $3"
  kill "-$1" "$step" 2>/dev/null
}

# shellcheck disable=SC2317
before_the_limit() {
  stop USR1 "time limit" "time limit: stopped $lead s or more before it"
  (sleep $((lead * 2 / 3)); kill -TERM "$step") &>/dev/null &
  patience=$!
}

run_step() { # -m MODULE ARGUMENT...: sets `status`, and `stopped` to the kind of end where a signal came
  step="" stopped="" patience="" status=0
  trap before_the_limit USR1
  trap 'stop TERM signal "SIGTERM: cancelled, preempted or requeued"' TERM
  srun "--nodes=$SLURM_JOB_NUM_NODES" "--ntasks=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} --kill-on-bad-exit=1 "${srun_options[@]}" \
    "${launch[@]}" "$@" &
  step=$!
  wait "$step" || status=$?
  while kill -0 "$step" 2>/dev/null; do # a signal interrupted wait: the step is still ending
    status=0
    wait "$step" || status=$?
  done
  [[ -z $patience ]] || kill "$patience" 2>/dev/null
}

record_end() {
  if ((status != 0)); then
    "$python" -m slurm.record_end "$folder" "$attempt" "$status"
    # torchrun says 1 whatever its ranks said. Theirs is 75 (try again) where they stopped and saved.
    if [[ $folder/status.json -nt $folder/$attempt.job ]] &&
      grep -qsF '"state": "interrupted"' "$folder/status.json"; then
      status=75
    fi
  fi
  printf '%s\n' "$status" >"$folder/$attempt.exit"
}

tear_down() {
  local line
  for line in "${teardown[@]}"; do
    (set +u; eval "$line") || echo "slurm: after the run: $line: status $?"
  done
}

# A run that made steps and saved before its time limit goes on from there, where the study asks for
# it.
requeue_what_can_go_on() {
  ((requeue && status == 75)) && [[ $stopped == "time limit" ]] &&
    [[ $folder/steps.csv -nt $folder/$attempt.job ]] || return 0
  if ((restart < max_restarts)); then
    scontrol requeue "$job"
  else
    echo "slurm: not started again: restarted $max_restarts times already (max_restarts)"
  fi
}

# What happens, in order.
read_settings "${settings[@]}"
[[ -n $run ]] ||
  refuse "no run: python -m slurm.submit STUDY submits a study, python -m slurm.render STUDY --run-name RUN prints a script"
job=${SLURM_JOB_ID:?submit this script with sbatch}
restart=${SLURM_RESTART_COUNT:-0}
attempt=$job
((restart == 0)) || attempt=$job.restart$restart
planned=${run#* } run=${run%% *}
folder=$study_folder/$run
python=${PYTHON:-$python}
setting_up=""
: "${NSYS:=$nsys}" "${NCCL_LOGS:=$nccl_logs}" "${TORCHRUN_LOGS:=$torchrun_logs}"
[[ -f $study_file ]] || refuse "not the repository (no $study_file here): submit from its root"

open_folder
check_version
skip_what_is_done
printf '%s\n' "$planned" >"$folder/$job.submitted"
stop_after_the_last_restart

# Not in a function: what a site's set-up declares must stay.
set +u # and it may use what is not set
for setting_up in "${setup[@]}"; do
  status=0
  eval "$setting_up" 2>"$folder/$attempt.setup" || status=$?
  check_set_up "$status"
done
setting_up=""
set +e -o pipefail # whatever the set-up did
export SLURM_EXPORT_ENV=ALL # after sbatch --export=NONE, srun would pass nothing of this on
for line in "${exports[@]}"; do
  # shellcheck disable=SC2163 # the line is NAME=VALUE
  export "$line" || fail "export ${line%%=*}: not possible"
done
if [[ -n $scratch ]]; then
  expand scratch "$scratch"
  scratch=$expanded
  export TORCH_EXTENSIONS_DIR="$scratch/torch_extensions" TRITON_CACHE_DIR="$scratch/triton"
fi
set -u
python=${PYTHON:-$python}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

archive
find_master
if [[ $NCCL_LOGS == 1 ]]; then
  mkdir -p -- "$folder/$attempt.nccl"
  logs=$(realpath -- "$folder/$attempt.nccl")
  export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH
  export NCCL_DEBUG_FILE="$logs/nccl_rank_%h_%p.log" NCCL_TOPO_DUMP_FILE="$logs/nccl_topo.xml"
fi
[[ -z $environment_tar ]] || unpack_environment
build_command
stopped=""
if ((preflight)); then
  run_step -m parallel.bench "$folder" ${calibration:+--calibration "$calibration"}
  ((status == 0)) || echo "slurm: the preflight ended with status $status"
fi
if [[ -z $stopped ]]; then
  run_step -m parallel.train --planned "$folder/$job.submitted" --out "$folder"
elif ((status == 0)); then
  status=1 # nothing was trained
fi
[[ -z $environment_tar ]] || on_each_node rm -rf "$unpacked" "$unpacked.tar"
for report in "$folder/$attempt.profiles"/*.nsys-rep; do
  [[ ! -f $report ]] || nsys stats "$report" >"${report%.nsys-rep}.txt"
done
record_end
tear_down
requeue_what_can_go_on
exit "$status"
