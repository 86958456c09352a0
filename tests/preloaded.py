"""The imports of the fork server of tests/forked.py. It starts no thread and holds no state of a run."""

import gc

gc.disable()  # during imports, which leave no garbage

import io
import os
from pathlib import Path

os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow's memory: see below

import datasets  # noqa: F401  which accelerate imports where there are several processes
import matplotlib.pyplot
import torch
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.run  # noqa: F401
import torch.optim.swa_utils  # noqa: F401
from transformers import conversion_mapping
from transformers.models.bert import modeling_bert  # noqa: F401
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
from transformers.models.modernbert import modeling_modernbert  # noqa: F401
from transformers.models.roberta import modeling_roberta  # noqa: F401

# Imported only for the libraries that they import: each run imports the project's modules again.
import data.batches.masking
import data.load  # noqa: F401
import utils.display.log  # noqa: F401

torch.set_num_threads(1)
conversion_mapping.get_checkpoint_conversion_mapping("gpt2")  # compiles a thousand regular expressions
matplotlib.pyplot.figure().savefig(io.BytesIO())  # finds the fonts
matplotlib.pyplot.close()

gc.freeze()  # or each run's garbage collections would visit half a million objects
gc.enable()

threads = Path("/proc/self/task")
assert not threads.exists() or len([*threads.iterdir()]) == 1, "a fork would not have the other threads"
