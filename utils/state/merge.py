"""Makes a folder for from_pretrained of a checkpoint that several processes wrote (FSDP).

    python -m utils.state.merge runs/clm/checkpoints/step-00001000 FOLDER
"""

import shutil
import sys
from pathlib import Path

import torch

from utils.io.files import verify_checksums, write_file
from utils.io.mistakes import user_mistakes
from utils.state.tensors import read_tensors, safetensors_chunks, tensors_of


@user_mistakes()
def main(checkpoint: str, folder: str) -> None:
    checkpoint, folder = Path(checkpoint), Path(folder)
    if problem := verify_checksums(checkpoint):
        raise ValueError(f"{checkpoint} is no valid checkpoint: {problem}")
    model = {name: item for name, item in tensors_of(checkpoint).items() if "/" not in name}
    tensors = {name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in model.items()}
    read_tensors(checkpoint, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    for file in {*checkpoint.glob("*.json")} - {checkpoint / "state.json", checkpoint / "manifest.json"}:
        shutil.copy(file, folder)
    chunks = safetensors_chunks({name: (tensor, None) for name, tensor in tensors.items()})
    write_file(folder / "model.safetensors", chunks)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
