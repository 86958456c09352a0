#!/bin/bash
# Several GPU nodes under Slurm. Run in the project's folder:
#   sbatch --dependency=singleton accelerate_configs/slurm.sh train_clm.py --preset gpt2-124m
# Five minutes before the time limit all processes save and exit. The same command resumes, so submit it as
# often as the run needs: `singleton` starts one job at a time, and a finished run exits at once.
# If a node fails, the others resume from the newest checkpoint (clusters/elastic.sh). If the first node fails,
# which hosts the rendezvous and this script, Slurm restarts the job. Rows per step stay those of PROCESSES (by
# default the number of all GPUs) with one micro-batch each.
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1     # one launcher per node, which starts one process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300     # sent to this script only
#SBATCH --no-kill               # a failed node does not end the job
#SBATCH --requeue
#SBATCH --open-mode=append

export NODES=1:$SLURM_JOB_NUM_NODES GPUS=$SLURM_GPUS_ON_NODE RESTARTS=$SLURM_JOB_NUM_NODES
export PROCESSES=${PROCESSES:-$((SLURM_JOB_NUM_NODES * SLURM_GPUS_ON_NODE))}
export HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PORT=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node need different ports
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240  # seconds that launchers give the processes to save

srun --no-kill --kill-on-bad-exit=0 bash accelerate_configs/clusters/elastic.sh "$@" &
trap 'kill -TERM $!' USR1  # srun forwards it to the launchers, and these to the processes
wait $! || wait $!  # the first wait returns when the signal arrives
