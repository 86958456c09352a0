#!/bin/bash
# Several GPU nodes under Slurm, from the project's folder:
#   sbatch --dependency=singleton accelerate_configs/slurm.sh train_clm.py --preset gpt2-124m
# Five minutes before the time limit every process saves and ends. The same command continues, so submit it as
# often as the run needs: `singleton` starts one at a time, and a finished run ends at once.
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1     # one launcher per node; it starts one process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300       # to every process of the step; the trap below keeps launchers alive
#SBATCH --requeue               # a node that fails is replaced
#SBATCH --open-mode=append

export NODES=$SLURM_JOB_NUM_NODES PROCESSES=$((SLURM_JOB_NUM_NODES * SLURM_GPUS_ON_NODE))
export MAIN_IP=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PORT=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node do not share it

# --kill-on-bad-exit: when one node fails the others end at once instead of waiting for it
srun --kill-on-bad-exit=1 bash -c 'trap "" USR1; exec accelerate launch \
    --config_file accelerate_configs/multi_node.yaml --num_machines "$NODES" --num_processes "$PROCESSES" \
    --machine_rank "$SLURM_NODEID" --main_process_ip "$MAIN_IP" --main_process_port "$PORT" "$@"' launch "$@"
