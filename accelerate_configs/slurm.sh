#!/bin/bash
# Several GPU nodes under Slurm, from the project's folder:
#   sbatch --dependency=singleton accelerate_configs/slurm.sh train_clm.py --preset gpt2-124m
# Five minutes before the time limit all processes save and end. The same command continues, so submit it as
# often as the run needs: `singleton` starts one at a time, and a finished run ends at once.
# When a node fails, the others go on from the newest checkpoint (clusters/elastic.sh). When the first one fails,
# where they meet and this script runs, Slurm starts the job again. Rows per step stay those of PROCESSES, or of
# all GPUs, with one micro-batch each.
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1     # one launcher per node; it starts one process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300     # to this script alone
#SBATCH --no-kill               # a node that fails does not end the job
#SBATCH --requeue
#SBATCH --open-mode=append

export NODES=1:$SLURM_JOB_NUM_NODES GPUS=$SLURM_GPUS_ON_NODE RESTARTS=$SLURM_JOB_NUM_NODES
export PROCESSES=${PROCESSES:-$((SLURM_JOB_NUM_NODES * SLURM_GPUS_ON_NODE))}
export HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PORT=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node do not share it
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240  # seconds that launchers give the processes to save in

srun --no-kill --kill-on-bad-exit=0 bash accelerate_configs/clusters/elastic.sh "$@" &
trap 'kill -TERM $!' USR1  # srun passes it on to the launchers, and these to the processes
wait $! || wait $!  # the first ends when the signal comes
