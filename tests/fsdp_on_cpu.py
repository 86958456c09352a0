"""accelerate's own FSDP2 on CPU processes. It engages FSDP on GPUs only, so this one line says "a GPU".

    ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/fsdp.yaml --num_processes 2 \
        --mixed_precision no tests/fsdp_on_cpu.py train_clm ...
"""

import importlib
import sys
from pathlib import Path

from accelerate.state import PartialState
from accelerate.utils import DistributedType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_XPU
importlib.import_module(sys.argv.pop(1)).main()
