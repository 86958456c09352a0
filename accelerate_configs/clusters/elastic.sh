#!/bin/bash
# 1 to 4 machines of 8 GPUs that join and leave, with torchrun only. Run the same line on each of them:
#   HOST=node1 bash accelerate_configs/clusters/elastic.sh train_clm.py --preset gpt2-124m
# node1 must stay: it hosts the rendezvous, and when it ends, all end. All machines mount the folder of
# output_dir.
# When a machine joins or leaves, all processes restart from the newest checkpoint. Rows per step stay those of
# PROCESSES with one micro-batch each. If the number of processes does not divide PROCESSES, the job waits for
# machines to join or leave. 32 works for 1, 2 and 4 machines, 96 also for 3.
export PROCESSES=${PROCESSES:-32}
export ACCELERATE_MIXED_PRECISION=${ACCELERATE_MIXED_PRECISION:-bf16}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or workers may get the addresses of dead ones (torch 2.13)

exec torchrun --nnodes="${NODES:-1:4}" --nproc_per_node="${GPUS:-8}" --max-restarts="${RESTARTS:-100}" \
    --rdzv-backend=c10d --rdzv-endpoint="$HOST:${PORT:-29400}" --rdzv-id=pretrain \
    --rdzv-conf="${RENDEZVOUS:-last_call_timeout=30}" \
    --no-python bash -c 'if ((PROCESSES % WORLD_SIZE)); then
        echo "PROCESSES: $PROCESSES is no multiple of $WORLD_SIZE, waiting for machines to come or go" >&2
        sleep 600; exit 1  # then a new rendezvous
    fi; exec python "$@" --gradient_accumulation_steps $((PROCESSES / WORLD_SIZE))' launch "$@"
