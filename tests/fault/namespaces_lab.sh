#!/usr/bin/env bash
# Several hosts on this machine, behind links of a rate of their own, for test_two_hosts.py, benchmarks/planes.py and
# benchmarks/slow_hosts.py. Each is a network namespace with one interface, on a switch that reaches nothing else. Needs
# root, iproute2 and util-linux.
#
#   namespaces_lab.sh up FOLDER HOSTS [RATE]   starts hosts h0, h1 ... at 10.77.0.1 and so on; RATE as tc has it,
#                                              of each host's link, in each direction (1gbit, 100mbit); without it, free
#   namespaces_lab.sh cut FOLDER HOST          cuts its link, without a word to anybody on either side
#   namespaces_lab.sh mend FOLDER HOST
#   namespaces_lab.sh crash FOLDER HOST        cuts its link, and ends what runs on it
#   namespaces_lab.sh hasten FOLDER            makes hosts give connections up after seconds without an answer, and not
#                                              after a quarter of an hour
#   namespaces_lab.sh carried FOLDER HOST      bytes that its link has carried so far, both ways
#   namespaces_lab.sh pids FOLDER              what runs on the hosts
#   namespaces_lab.sh down FOLDER              ends what runs there, and removes them
#
# FOLDER/on HOST COMMAND...   runs a command on a host, as ssh does
# FOLDER/mpirun -np N ...     Open MPI's mpirun on h0, with a rank on each host, over their links; or on HOSTS, such as
#                             h1:2,h0:3, which is the order of the ranks; over INTERFACES, where others are given
set -euo pipefail

action=${1:?what to do} base=$(readlink -f "${2:?a folder}")
tag=lab$(cksum <<<"$base" | cut -d' ' -f1) # namespaces have names of the whole machine
switch=$tag-sw network=10.77.0.0/24

write_commands() { # for so many hosts
    cat >"$base/on" <<ON
#!/usr/bin/env bash
while [[ \$1 == -* ]]; do shift; done
host=\$1
shift
exec nsenter --net=/run/netns/$tag-\$host unshare --uts --mount sh -c \
    "mount --bind '$base/hosts' /etc/hosts; hostname \$host; \$*"
ON
    cat >"$base/mpirun" <<MPIRUN
#!/usr/bin/env bash
exec $base/on h0 exec mpirun --prtemca plm_ssh_agent $base/on --prtemca prte_if_include $network \
    --host \${HOSTS:-$(seq -f h%g -s, 0 $(($1 - 1)))} --bind-to none --mca pml ob1 --mca btl tcp,self \
    --mca btl_tcp_if_include \${INTERFACES:-$network} --mca mpi_yield_when_idle 1 "\$@"
MPIRUN
    chmod +x "$base/on" "$base/mpirun"
}

shape() { # both ends of a link: a queue shapes what leaves
    tc -n "$1" qdisc add dev "$2" root handle 1: htb default 10 r2q 1000
    tc -n "$1" class add dev "$2" parent 1: classid 1:10 htb rate "$3" ceil "$3" burst 32k cburst 32k
}

up() {
    local count=$1 rate=${2:-} i
    mkdir -p "$base"
    write_commands "$count"
    echo "127.0.0.1 localhost" >"$base/hosts"
    ip netns add "$switch"
    ip -n "$switch" link add br0 type bridge
    ip -n "$switch" link set br0 up
    for ((i = 0; i < count; i++)); do
        echo "10.77.0.$((i + 1)) h$i" >>"$base/hosts"
        ip netns add "$tag-h$i"
        ip -n "$switch" link add "p$i" type veth peer name eth0 netns "$tag-h$i"
        ip -n "$switch" link set "p$i" master br0 up
        ip -n "$tag-h$i" addr add "10.77.0.$((i + 1))/24" dev eth0
        ip -n "$tag-h$i" link set eth0 up
        ip -n "$tag-h$i" link set lo up
        if [[ $rate ]]; then
            shape "$tag-h$i" eth0 "$rate"
            shape "$switch" "p$i" "$rate"
        fi
    done
}

link() { # a remote shell's client would be on the other side, and hear nothing of what ends here
    local host=$1 to=$2 signal=$3
    ip -n "$switch" link set "p${host#h}" "$to"
    signal "$signal" "$host" sh
}

crash() {
    link "$1" down STOP
    signal KILL "$1" '[^s]*'
}

signal() { # what is called like this
    local pid
    for pid in $(ip netns pids "$tag-$2"); do
        # shellcheck disable=SC2053 # a pattern
        if [[ $(ps -o comm= "$pid") == $3 ]]; then kill "-$1" "$pid" 2>/dev/null || true; fi
    done
}

hosts() { ip netns list | cut -d' ' -f1 | grep "^$tag-h" || true; }

hasten() {
    local name
    for name in $(hosts); do nsenter --net="/run/netns/$name" sysctl -qw net.ipv4.tcp_retries2=3; done
}

carried() {
    local counters=/sys/class/net/eth0/statistics received sent # of the namespace whose /sys it is
    { read -r received && read -r sent; } < <("$base/on" "$1" "mount -t sysfs sysfs /sys; cat $counters/[rt]x_bytes")
    echo $((received + sent))
}

pids() {
    local name
    for name in $(hosts); do ip netns pids "$name"; done
}

down() {
    local name pids
    for name in $(ip netns list | cut -d' ' -f1 | grep "^$tag-" || true); do
        pids=$(ip netns pids "$name")
        [[ -z $pids ]] || kill -KILL $pids 2>/dev/null || true
        ip netns del "$name"
    done
}

case $action in
    up) up "${3:?a number of hosts}" "${4:-}" || { down && exit 1; } ;;
    cut) link "${3:?a host}" down STOP ;;
    mend) link "${3:?a host}" up CONT ;;
    crash | carried) "$action" "${3:?a host}" ;;
    hasten | pids | down) "$action" ;;
    *) echo "namespaces_lab.sh: $action is none of its actions, which its head lists" >&2 && exit 2 ;;
esac
