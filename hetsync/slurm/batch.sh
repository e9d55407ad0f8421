# shellcheck shell=bash
# What every HetSync job under SLURM does. Set before:
#
#   program        the program of a rank and its arguments, an array
#   run_dir        the run folder; empty where the program's is not known
#   launcher       mpirun, or srun for an MPI that was built for the site's PMIx
#   venv           the Python environment; nothing is ever installed into it here
#   apptainer, pyxis   an image instead, one of them; empty otherwise
#   max_restarts   a job that is requeued more often than this has failed
#   max_crashes    so many in a row, without a checkpoint between them, are not mended by another start
#
# TOLERATE in the environment: the others go on when a rank dies (mpirun of Open MPI 5).

stopped=85 too_few=86 mistake=2       # hetsync/errors.py
killed_by_usr1=138                    # a request that came before training had begun: nothing is lost
# The number of an array's last task is also the whole array's.
number=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
crash_count=hetsync-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}.crashes

begun=$(date +%FT%T)

say() { printf '%s: job %s: %s\n' "$(date '+%F %T')" "$SLURM_JOB_ID" "$*" >&2; }

fail() {
    say "$@"
    rm -f "$crash_count"
    exit 1
}

# Complete ones alone: others are what is left of a removal.
newest_checkpoint() { { compgen -G "$run_dir/checkpoints/samples-*/state.json" || true; } | sort | tail -n 1; }

# A number for the summary of a run that was stopped, which may be an earlier start's; nothing for any other.
stop() {
    if [[ -n $run_dir ]] && grep -qs '"status": "stopped"' "$run_dir/summary.json"; then cksum <"$run_dir/summary.json"; fi
}

# scontrol's answer. It is asked for a minute, in which another controller of SLURM's may take over.
ask() {
    local tried
    for ((tried = 0; tried < 30; tried++)); do
        if answer=$(scontrol "$@" 2>&1); then return; fi
        sleep 2
    done
    return 1
}

requeue() {
    ((${SLURM_RESTART_COUNT:-0} < max_restarts)) || fail "$1, but was requeued $max_restarts times already"
    trap '' TERM # SLURM ends this script while it requeues the job
    ask requeue "$number" || fail "$1, but could not be requeued in a minute: $answer"
    say "$1, and requeued"
    sleep 60
}

crash() {
    local crashes=0 newest_then='' newest without=' without a new checkpoint'
    newest=$(newest_checkpoint)
    if [[ -e $crash_count ]]; then { read -r crashes && read -r newest_then; } <"$crash_count"; fi
    # A mistake may come again after each checkpoint.
    if [[ $newest != "$newest_then" && $1 != "$mistake" ]]; then crashes=0; fi
    if [[ -z $run_dir || $1 == "$mistake" ]]; then without=''; fi
    printf '%s\n' $((++crashes)) "$newest" >"$crash_count"
    ((crashes < max_crashes)) || fail "crashed with status $1, $crashes times in a row$without"
    requeue "crashed with status $1"
}

job='' asked=''
trap 'asked=1; interrupted=1; [[ -z $job ]] || kill -USR1 "$job" 2>/dev/null || true' USR1

if [[ -n $venv ]]; then
    "$venv/bin/python" -c '' 2>/dev/null ||
        fail "$venv has no Python that runs on $(hostname): make it by launch/environment, or give another, where all nodes see it"
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
fi
if [[ -n $run_dir ]]; then (umask o-w && mkdir -p "$run_dir"); fi # that containers see it
if [[ ${program[0]} == hetsync-train ]]; then
    program+=(--run.dir "$run_dir") # the last one counts
    if [[ -n $(newest_checkpoint) ]]; then program+=(--resume "$run_dir"); fi
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

# The ranks of a group of nodes, and with what cores; there are several in a heterogeneous job.
of_group() {
    local value=$1${SLURM_HET_SIZE:+_HET_GROUP_$2}
    printf '%s' "${!value:-}"
}

# SLURM tells the number of tasks where --ntasks is given; from --ntasks-per-node only some versions reckon it.
ranks=0
for ((group = 0; group < ${SLURM_HET_SIZE:-1}; group++)); do
    tasks=$(of_group SLURM_NTASKS $group)
    if [[ -z $tasks ]]; then tasks=$((SLURM_JOB_NUM_NODES * ${SLURM_NTASKS_PER_NODE%%'('*})); fi
    ((ranks += tasks))
done

by_mpirun() {
    local flags=()
    [[ -z ${SLURM_HET_SIZE:-} ]] || fail "mpirun reaches one group of nodes only: take srun as the launcher"
    [[ -z ${SLURM_GPUS_PER_TASK:-} ]] ||
        fail "--gpus-per-task would give all ranks of a node one GPU under mpirun: give --gpus-per-node, or take srun"
    read -ra flags <<<"${MPIRUN_FLAGS:-}"
    if [[ -n ${TOLERATE:-} ]]; then
        flags+=(--with-ft ulfm --mca pml ob1 --prtemca state_base_recoverable 1)
    fi
    command=(mpirun -n "$ranks" "${flags[@]+"${flags[@]}"}")
    if [[ $(mpirun --version 2>&1) == *"Open MPI"* ]]; then
        command+=(--bind-to none --mca mpi_yield_when_idle 1)
        if [[ $(id -u) == 0 ]]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
    fi
    command+=("${program[@]}")
}

by_srun() {
    [[ -z ${TOLERATE:-} ]] || fail "under srun a rank's death ends the job: take mpirun as the launcher, or leave TOLERATE empty"
    local group cpus seen=$PWD:$PWD${run_dir:+,$run_dir:$run_dir} options=(--mpi=pmix --kill-on-bad-exit=1) within=()
    if [[ -n $pyxis ]]; then
        options+=(--container-image="$pyxis" --container-mounts="$seen" --container-workdir="$PWD")
    fi
    # The prefix and the security mode let Open MPI from PyPI work with the site's PMIx; a site's own ignores them.
    within=(env PMIX_SECURITY_MODE=native)
    if [[ -n $venv && -x $venv/bin/mpirun ]]; then within+=(OPAL_PREFIX="$venv"); fi
    if [[ -n $apptainer ]]; then within+=(apptainer exec --nv --bind "$seen" "$apptainer"); fi
    command=(srun)
    for ((group = 0; group < ${SLURM_HET_SIZE:-1}; group++)); do
        if ((group > 0)); then command+=(:); fi
        if [[ -n ${SLURM_HET_SIZE:-} ]]; then command+=(--het-group="$group"); fi
        cpus=$(of_group SLURM_CPUS_PER_TASK "$group") # which srun takes from nobody
        command+=("${options[@]}" ${cpus:+--cpus-per-task="$cpus"} "${within[@]}" "${program[@]}")
    done
}

case $launcher in
    mpirun) by_mpirun ;;
    srun) by_srun ;;
    *) fail "the launcher is '$launcher'; it can be mpirun or srun" ;;
esac

[[ -z $asked ]] || requeue "stopped on request before its start"
where=$SLURM_JOB_NODELIST${SLURM_HET_SIZE:+ and others}${run_dir:+, the run is in $run_dir}
say "start ${SLURM_RESTART_COUNT:-0}, $ranks ranks on $where"
stop_before=$(stop) newest_before=$(newest_checkpoint)
"${command[@]}" &
job=$!
[[ -z $asked ]] || kill -USR1 "$job" 2>/dev/null || true # it came between the two lines above

interrupted=1
while [[ -n $interrupted ]]; do # a signal ends `wait`, and not the job
    interrupted=
    status=0
    wait "$job" || status=$?
done

# mpirun returns 0 where a node is lost.
if ((status == 0)) && [[ -n $run_dir ]] && ! grep -q '"status": "finished"' "$run_dir/summary.json" 2>/dev/null; then
    say "ended with 0, but $run_dir/summary.json says of no finished run"
    status=1
fi

# When one rank crashes, srun ends the others by TERM, and may return the greater status, which is theirs. A job that was
# cancelled runs no more; ranks that were sent TERM themselves have saved, and say so in a summary of this start.
crashed_under_srun() {
    local now
    now=$(stop)
    [[ $launcher == srun ]] && ((status == 143)) && [[ -z $now || $now == "$stop_before" ]] &&
        # Of each group; nothing where the call has failed, which tells of no cancellation.
        [[ $(squeue --noheader --jobs="$number" --format=%T 2>/dev/null | sort -u) =~ ^(RUNNING)?$ ]]
}

# SLURM sends srun's ranks TERM at a pre-emption, in place of USR1 to this script, unless the site sets send_user_signal.
preempted() {
    ((status == 143)) && ask show job "$number" &&
        [[ $answer =~ " PreemptTime="([0-9T:-]+) && ! ${BASH_REMATCH[1]} < $begun ]] # an earlier one may stand there, too
}

if preempted; then
    rm -f "$crash_count"
    requeue "stopped at a pre-emption"
elif crashed_under_srun; then
    status=1
fi
case $status in
    0) rm -f "$crash_count" ;;
    "$stopped" | "$killed_by_usr1")
        rm -f "$crash_count"
        requeue "stopped on request"
        ;;
    "$too_few")
        rm -f "$crash_count"
        requeue "saved with too few ranks left"
        ;;
    "$mistake")
        # A recipe that led to a checkpoint works: a file could not be read for a moment, say. Otherwise it is to be mended.
        if [[ $(newest_checkpoint) == "$newest_before" ]]; then rm -f "$crash_count"; else crash "$status"; fi
        ;;
    129 | 130 | 143) rm -f "$crash_count" ;; # cancelled
    *) crash "$status" ;;
esac
exit "$status"
