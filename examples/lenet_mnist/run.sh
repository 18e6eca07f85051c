#!/usr/bin/env bash
# Train LeNet on this machine: a scheduler and five workers, all running the same train.py.
#
#   bash run.sh [MNIST_DATA_PATH] [arguments of train.py]
#
# Without a path it trains on scikit-learn's digits. Each process runs in a folder of its own,
# run/sched, run/worker_0 ..., with its output in the file `log` there. Variables that change
# something: PYTHON, RUN_DIR, SCRIPT, DATA_PATH, MS_WORKER_NUM, MS_SCHED_HOST, MS_SCHED_PORT.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"
script="${SCRIPT:-$here/train.py}"
run_dir="${RUN_DIR:-$here/run}"
grace_s=5 # for the others to name the cause, after the first failure

data_path="${DATA_PATH:-}"
if [[ $# -gt 0 && "$1" != -* ]]; then
    data_path="$1"
    shift
fi
if [[ -n "$data_path" ]]; then
    if [[ ! -d "$data_path" && " $* " != *" --download "* ]]; then
        echo "run.sh: expected a folder with MNIST at '$data_path', but there is none." >&2
        echo "  Fix: fetch it with  $python $here/data.py --download '$data_path'" >&2
        echo "  (the files can be put there by hand, too), or leave the path out to train on" >&2
        echo "  the small digits set that needs no download." >&2
        exit 2
    fi
    mkdir -p "$data_path"
    data_path="$(cd "$data_path" && pwd)" # every process has a folder of its own
fi
export DATA_PATH="$data_path"

if ! "$python" -c 'import importlib.util as u; raise SystemExit(not u.find_spec("torch"))'; then
    echo "run.sh: $python has no torch, so no graphsplit." >&2
    echo "  Fix: activate its environment (. .venv/bin/activate), or set PYTHON=..." >&2
    exit 2
fi

free_port() {
    "$python" -c 'import socket, sys
with socket.socket() as s:
    s.bind((sys.argv[1], 0))
    print(s.getsockname()[1])' "$MS_SCHED_HOST"
}

export MS_WORKER_NUM="${MS_WORKER_NUM:-5}"
export MS_SCHED_HOST="${MS_SCHED_HOST:-127.0.0.1}"
MS_SCHED_PORT="${MS_SCHED_PORT:-$(free_port)}"
export MS_SCHED_PORT
# The number of threads changes the order of sums, and so the bits: the same everywhere.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONUNBUFFERED=1
# Without these, glibc gives memory back after each step and takes hundreds of page faults.
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1073741824}"
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}"

names=()
pids=()
tail_pid=""

start() { # name, then VARIABLE=value ..., then -- and the arguments of the script
    local name="$1" variables=()
    shift
    while [[ "$1" != -- ]]; do
        variables+=("$1")
        shift
    done
    shift
    mkdir -p "$run_dir/$name"
    : >"$run_dir/$name/log" # tail needs it at once
    (
        cd "$run_dir/$name"
        exec env "${variables[@]}" "$python" "$script" "$@"
    ) </dev/null >"$run_dir/$name/log" 2>&1 &
    names+=("$name")
    pids+=($!)
}

signal_all() {
    local pid
    # Each process leads a group (set -m), so its own children are reached as well.
    for pid in ${pids[@]+"${pids[@]}"}; do
        kill "-$1" -- "-$pid" 2>/dev/null || true
    done
}

any_running() {
    local pid
    for pid in ${pids[@]+"${pids[@]}"}; do
        if kill -0 "$pid" 2>/dev/null; then return 0; fi
    done
    return 1
}

wait_until_none_runs() { # seconds; fails if some process still runs then
    local deadline=$((SECONDS + $1))
    while any_running; do
        if ((SECONDS >= deadline)); then return 1; fi
        sleep 0.1
    done
}

end_all() {
    signal_all TERM
    wait_until_none_runs "$grace_s" || true
    signal_all KILL
}

stop_tail() {
    if [[ -n "$tail_pid" ]]; then
        kill "$tail_pid" 2>/dev/null || true
        wait "$tail_pid" 2>/dev/null || true
        tail_pid=""
    fi
}

on_signal() { # status
    trap '' INT TERM HUP # once is enough: what follows is bounded
    echo "run.sh: interrupted, ending all processes" >&2
    exit "$1"
}
on_exit() {
    stop_tail
    if any_running; then end_all; fi
}
trap on_exit EXIT
trap 'on_signal 130' INT
trap 'on_signal 143' TERM
trap 'on_signal 129' HUP

# Job control gives every process a group of its own, and keeps bash from making it ignore
# SIGINT as it does with the background children of a script.
set -m
start sched MS_ROLE=MS_SCHED -- "$@"
for ((rank = 0; rank < MS_WORKER_NUM; rank++)); do
    start "worker_$rank" MS_ROLE=MS_WORKER "MS_NODE_ID=$rank" -- "$@"
done
tail -n +1 -f "$run_dir/worker_0/log" &
tail_pid=$!
set +m
echo "run.sh: scheduler on $MS_SCHED_HOST:$MS_SCHED_PORT, $MS_WORKER_NUM workers," \
    "logs in $run_dir; this is worker 0:"

status=0
failed=""
fail_deadline=0
collected=() # by index of the process
num_collected=0
while ((num_collected < ${#pids[@]})); do
    # Workers before the scheduler, whose failure is only ever the echo of theirs.
    for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
        if [[ -n "${collected[i]:-}" ]] || kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
        collected[i]=yes
        num_collected=$((num_collected + 1))
        child_status=0
        wait "${pids[i]}" 2>/dev/null || child_status=$?
        if ((child_status != 0 && status == 0)); then
            status=$child_status
            failed="${names[i]}"
            fail_deadline=$((SECONDS + grace_s))
        fi
    done
    if ((status != 0 && SECONDS > fail_deadline)) && any_running; then end_all; fi
    sleep 0.1
done
stop_tail

if ((status != 0)); then
    echo "run.sh: $failed failed with status $status; the end of $run_dir/$failed/log:" >&2
    tail -n 30 "$run_dir/$failed/log" >&2
    exit "$status"
fi
echo
for name in "${names[@]}"; do
    if [[ "$name" == worker_* ]]; then
        sed -n "s/^.*\(Accuracy is:.*\)$/$name: \1/p" "$run_dir/$name/log"
    fi
done
