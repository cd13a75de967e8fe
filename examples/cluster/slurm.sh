#!/bin/bash
# A study on the nodes of a Slurm job: a Ray cluster is started on them, and the controller on the first one.
#
#   sbatch examples/cluster/slurm.sh STUDY.toml --workers 8
#
# The folder that it is submitted from is shared by all nodes, and so is the environment with ppo-tuner[ray] in it.
# Before the time is up, running trials save; the job is queued again and resumes the study. See docs/scaling.md.
#
#SBATCH --job-name=ppo-tuner
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
set -euo pipefail

study=${1:?usage: sbatch slurm.sh STUDY.toml [flags of ppo-tuner run]}
shift
port=${RAY_PORT:-6379}
export RAY_ADDRESS="$(hostname -I | cut -d' ' -f1):$port"
# Whoever can reach a Ray cluster can run programs on it: only who has this token is let in.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(openssl rand -hex 16)}

has=(--num-cpus="${SLURM_CPUS_PER_TASK:-1}" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats --block)
ray start --head --port="$port" --include-dashboard=false "${has[@]}" &
others=$((SLURM_JOB_NUM_NODES - 1))
if ((others > 0)); then
    srun --nodes="$others" --ntasks="$others" --exclude="$(hostname)" ray start --address="$RAY_ADDRESS" "${has[@]}" &
fi
trap 'kill $(jobs -p) 2>/dev/null' EXIT

python - "$SLURM_JOB_NUM_NODES" <<'PYTHON'
import sys, time
import ray

until, wanted = time.monotonic() + 300, int(sys.argv[1])
while True:
    try:
        ray.init(log_to_driver=False, logging_level="error")
        there = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
    except ConnectionError:
        there = 0
    if there >= wanted:
        break
    if time.monotonic() > until:
        sys.exit(f"{there} of {wanted} nodes have come after 5 minutes")
    time.sleep(1)
PYTHON

ppo-tuner run "$study" --engine ray "$@" &
controller=$!
trap 'kill -TERM $controller' TERM
# A wait ends when the signal comes; the controller ends once its trials have saved.
status=0
wait $controller || status=$?
if kill -0 $controller 2>/dev/null; then
    status=0
    wait $controller || status=$?
fi
if ((status == 130)) && [[ -n ${SLURM_JOB_ID:-} ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
