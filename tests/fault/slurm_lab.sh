#!/usr/bin/env bash
# A SLURM cluster of three unlike nodes on this machine, for test_slurm.py. Needs root, and the packages
# slurm-wlm, slurm-client, munge and, for srun --mpi=pmix, libpmix2 (Debian's names).
#
#   slurm_lab.sh up FOLDER     starts it there; then export SLURM_CONF=FOLDER/slurm.conf
#   slurm_lab.sh down FOLDER   ends its jobs and daemons
#
# Everything lies in FOLDER (keep its path short: there are sockets in it), the ports are its own, and so is
# the munge daemon. On Debian, srun --mpi=pmix also wants a link libpmix.so to libpmix.so.2 in its folder.
set -euo pipefail

action=${1:?up or down} base=$(readlink -f "${2:?a folder}")
export SLURM_CONF=$base/slurm.conf
PATH=$PATH:/usr/sbin

configure() {
    local host port=$((20000 + RANDOM % 10000)) # of a cluster of its own, beside others
    host=$(hostname -s)
    cat >"$SLURM_CONF" <<CONF
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$base/munge.socket
StateSaveLocation=$base/state
SlurmdSpoolDir=$base/spool/%n
SlurmctldPidFile=$base/run/slurmctld.pid
SlurmdPidFile=$base/run/slurmd-%n.pid
SlurmctldLogFile=$base/log/slurmctld.log
SlurmdLogFile=$base/log/slurmd-%n.log
TmpFS=$base/tmp/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
GresTypes=gpu
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=3
SlurmdTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=4 RealMemory=1000 Feature=fast Gres=gpu:fast:2
NodeName=n[2-3] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 2))-$((port + 3))] CPUs=2 RealMemory=1000 Feature=slow Gres=gpu:slow:1
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=15 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
CONF
    # As /dev/null: SLURM hands these GPUs out and binds them as it does real ones.
    for device in 0 1; do mknod "$base/gpu$device" c 1 3; done
    cat >"$base/gres.conf" <<CONF
NodeName=n1 Name=gpu Type=fast File=$base/gpu[0-1]
NodeName=n[2-3] Name=gpu Type=slow File=$base/gpu0
CONF
}

up() {
    local node
    mkdir -p "$base"/{state,run,log} "$base"/{spool,tmp}/n{1,2,3}
    chmod 755 "$base"
    configure
    (umask 077 && head -c 128 /dev/urandom >"$base/munge.key")
    munged --force --socket="$base/munge.socket" --key-file="$base/munge.key" --pid-file="$base/run/munged.pid" \
        --log-file="$base/log/munged.log" --seed-file="$base/munge.seed"
    slurmctld -i
    for node in n1 n2 n3; do slurmd -N "$node"; done
    for _ in {1..60}; do
        if [[ $(sinfo --noheader --format=%T 2>/dev/null | sort -u) == idle ]]; then return; fi
        sleep 0.5
    done
    echo "slurm_lab.sh: the nodes are not idle after 30 s; see $base/log" >&2
    return 1
}

end() {
    kill "$1" 2>/dev/null || return 0
    for _ in {1..50}; do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$1" 2>/dev/null || true # a slurmd waits for ever for a step that did not start
}

down() {
    local file
    timeout 10 scancel --user=root 2>/dev/null || true
    for _ in {1..6}; do
        [[ -n $(timeout 5 squeue --noheader 2>/dev/null) ]] || break
        sleep 0.5
    done
    for file in "$base"/run/slurmd-n*.pid "$base"/run/slurmctld.pid "$base"/run/munged.pid; do
        [[ ! -e $file ]] || end "$(<"$file")"
    done
}

case $action in
    up) up || { down && exit 1; } ;;
    down) down ;;
    *) echo "slurm_lab.sh: up FOLDER or down FOLDER" >&2 && exit 2 ;;
esac
