"""Wrong commands as people type them: one message, exit status 2, no traceback and no new file.

Each row runs in a process of its own in an empty folder, forked from a process that has imported torch.
"""

import shlex
from pathlib import Path

import pytest

from tests import forked
from tests.runs import PATIENCE, PROJECT, environment

CLM, MLM, PREPARE, TOKENIZER = "train_clm.py", "train_mlm.py", "data.prepare", "data.tokens.tokenizer"
TEXT = "--dataset_name ../corpus.jsonl --keywords none"  # for rows of a script without --dataset_name

# command and ACCELERATE_ variables | flags | parts of its message (!: the message does not have this part)
TABLE = """
# settings
CLM | --learning_rate=--                                | --learning_rate=--: the value is missing.
CLM | --learning_rat 1                                  | --learning_rat: no such setting. Did you mean --learning_rate?
CLM | --learning_rate fast                              | invalid float value: 'fast'
CLM | --learning_rate 0 --weight_decay -1e-3 --max_train_steps -5 --adam_beta2 1 --seed 4294967296 --save_total_limit 0 --block_size 0 | learning_rate: must be greater than 0, is 0.0. && weight_decay: must be 0 (off) or greater && max_train_steps: must be 0 (off) or greater, is -5. && adam_beta2: must be less than 1 && seed: must be less than 4,294,967,296 && save_total_limit: must be greater than 0 && block_size: must be greater than 0 && !warmup
CLM | --learning_rate nan --num_train_epochs inf --seed -1 --save_steps -1 --num_warmup_steps nan --max_train_steps 10000000000000000000000 --per_device_train_batch_size 0 --gradient_accumulation_steps 0 | learning_rate: must be a finite number, is nan. && num_train_epochs: must be a finite number, is inf. && seed: must be 0 (off) or greater && save_steps: must be 0 (off) or greater && num_warmup_steps: must be a finite number && max_train_steps: must be less than 9,223,372 && per_device_train_batch_size: must be greater than 0 && gradient_accumulation_steps: must be greater than 0
CLM | --num_train_epochs 0 --max_train_steps 0          | both are 0, set one of them
CLM | --max_train_steps 1e3                             | invalid int value: '1e3'
CLM | --block_size 1                                    | block_size: must be more than 1, is 1.
MLM | --block_size 2                                    | block_size: must be more than 2, is 2.
MLM | --mlm_probability 1 --vocab_size 0 --validation_fraction 1 | mlm_probability: must be less than 1 && vocab_size: must be greater than 0 && validation_fraction: must be less than 1
MLM | --next_sentence true --model_type bert --block_size 3 | block_size
MLM | --next_sentence true --model_type bert --max_train_samples 5 | max_train_samples && sentence pairs
CLM | --lr_scheduler_type cosin                         | lr_scheduler_type, 'cosin': cosin is not a valid SchedulerType, please select one of ['linear', 'cosine'
CLM | --lr_scheduler_type reduce_lr_on_plateau          | lr_scheduler_type, 'reduce_lr_on_plateau': AttributeError: 'ReduceLROnPlateau' object has no
CLM | --lr_scheduler_type warmup_stable_decay           | missing 1 required positional argument: 'num_decay_steps'
CLM | --lr_scheduler_type cosine --lr_scheduler_kwargs min_lr_rate=0.1 | unexpected keyword argument 'min_lr_rate'
CLM | --lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs num_decay_steps=0.995 | num_warmup_steps: 72 must be 0 to 9, as the run has 1800 steps
CLM | --preset codeparrot --dataset_name ../corpus.jsonl --eval_dataset_name ../corpus.jsonl --tokenizer_name ../words --max_train_steps 12 | below 1 it is a share of them
CLM | --prompts 'import os' ' '                         | prompts: holds a blank text
CLM | --dataset_name '' --model_type ' '                | dataset_name, model_type: holds a blank text
CLM | --preset codeparot                                | --preset codeparot: unknown. Known presets: laptop, hour, gpt2, codeparrot
CLM | --eval_only true                                  | eval_only: no model in output_dir
CLM | --data_dir ../empty                               | --data_dir: no such setting; --dataset_name takes files and folders
MLM | --lr 1                                            | --lr: no such setting; use --learning_rate.
CLM | --fp16 true                                       | --mixed_precision, or accelerate_configs
CLM | --report_to wandbb                                | report_to: 'wandbb' is not an installed tracker
CLM | --report_to 'none, wandb'                         | report_to: 'none, wandb' is not an installed tracker && separated by spaces
CLM | --keywords a --keywords=b --seed 1                | --keywords: given twice; one flag takes all values
CLM | --push_to_hub maybe                               | Truthy value expected: got maybe
# data
CLM | --dataset_name none                               | dataset_name: none is given
CLM | --dataset_name ../corpus.jsonl --dataset_config_name en | dataset_config_name: en is for a dataset of the Hub
CLM | --dataset_name ../no.jsonl                        | dataset_name '../no.jsonl': no such file
CLM | --dataset_name texts/                             | dataset_name 'texts/': no such file, folder
CLM | --dataset_name ../empty                           | no such file, folder
CLM | --dataset_name ../image.png                       | holds no file of the types
CLM | --dataset_name ../folder.py                       | holds no file of the types && by a glob, such as
CLM | --dataset_name ../empty.jsonl                     | holds no readable documents
CLM | --dataset_name ../corpus.jsonl --text_column body | no column 'body'; choose --text_column from
CLM | --keywords nosuchword --tokenizer_name ../words --cache_dir ../home/cache | keywords
CLM | --dataset_name ../a.jsonl --tokenizer_name ../words --cache_dir ../home/cache | less than a row
CLM | --dataset_name ../corpus.jsonl --eval_dataset_name ../no.jsonl | '../no.jsonl': no such file
CLM | --dataset_name no/such-data-set                   | dataset_name 'no/such-data-set' cannot be loaded
CLM | --dataset_name nosuch://bucket/x                  | nosuch://bucket/x cannot be opened
CLM | --dataset_name s3://KEY:SECRET/x@bucket/it         | s3://***@bucket/it cannot be opened: credentials cannot be part
MLM | --validation_fraction 0 --mlm_probability 0       | validation_fraction: must be greater than 0 && mlm_probability: must be greater than 0
CLM | --dataset_name ../corpus.jsonl ../corpus.jsonl     | mixture: 0 shares for 2 datasets
CLM | --dataset_name ../a.jsonl ../no.jsonl --mixture 0.0005 0.9995 | mixture: 0.0005 is not a share && '../no.jsonl': no such file
CLM | --dataset_name ../a.jsonl ../no.jsonl --mixture 0.5 0.5 --text_column a b | b: no such setting
CLM | --dataset_name ../a.jsonl ../no.jsonl --mixture 0.5 0.5 --max_train_samples 3 --tokenizer_name no/where | max_train_samples: does not work with && tokenizer_name 'no/where'
CLM | --dataset_name ../corpus.jsonl ../no.jsonl --mixture 0.9 0.2 | mixture: the shares sum to 1.1 && '../no.jsonl': no such file
# tokenizer
CLM | --tokenizer_name ../no-words                      | no-words
CLM | --tokenizer_name no/such-tokenizer                | no/such-tokenizer
CLM | --tokenizer_name ../unnamed                       | this folder has no tokenizer
CLM | --model_name_or_path ../unnamed                   | '../unnamed': its weights cannot be read
CLM | --tokenizer_name ../words/tokenizer.json          | is a file: name the folder that it is in
MLM | --tokenizer_name ../words --dataset_name ../corpus.jsonl --keywords none | has no pad, mask, cls, sep token
# model
CLM | --model_type gpt22                                | model_type, 'gpt22': unknown to transformers (similar: gpt2
CLM | --optimizer_type sgd                             | 'sgd' is unknown, give adamw or muon
CLM | --lr_scheduler_type constant --lr_scheduler_kwargs power=2 | lr_scheduler_kwargs: the schedule constant has no options
CLM | --model_type gpt2 --config_overrides n_layr=3,foo | gpt2 has no n_layr (similar: n_layer), foo; give name=value
CLM | --model_name_or_path ../old --config_overrides n_layer=2 | cannot go with model_name_or_path; leave it out
CLM | --model_type ctrl --config_overrides n_layer=2 --gradient_checkpointing true | gradient_checkpointing: ctrl does not support it; leave it out
CLM | --model_type gpt2 --config_overrides n_layer | Field 'n_layer' expected int
CLM | --model_type gpt2 --config_overrides '{"n_positions": [2]}' | Field 'n_positions' expected int, got list
MLM | --prompts 'no mask here' 'a [MASK]'                | prompts: 'no mask here' has no [MASK]
MLM | --next_sentence true                              | with next_sentence take --model_type bert
MLM | --config_overrides num_hidden_layers=nan          | Field 'num_hidden_layers' expected int, got str (value: 'nan')
CLM | --model_type gpt2 --config_overrides n_head=5,n_embd=192 | n_head=5,n_embd=192': && divisible
CLM | --model_type gpt2 --config_overrides n_positions=64,vocab_size=1 --tokenizer_name ../words | vocab_size 1 && block_size, 128: needs n_positions of at least 128
CLM | --model_type gpt2 --config_overrides {n_head        | JSONDecodeError
CLM | --model_name_or_path ../no                        | model_name_or_path, '../no': there is no such folder
CLM | --model_name_or_path ../old --tokenizer_name none | set tokenizer_name too
# the Hub
CLM | --push_to_hub true --dataset_name ../corpus.jsonl --keywords none | push_to_hub: found no Hub token
# settings of the launcher
CLM MIXED_PRECISION=fp8 | --seed 1                        | mixed_precision: 'fp8' is unknown, give no, bf16 or fp16.
CLM MIXED_PRECISION=fp16 | --seed 1                       | mixed_precision: fp16 needs an accelerator
CLM DYNAMO_BACKEND=inducto | --seed 1                     | dynamo_backend: 'inducto' is unknown, give no or inductor.
CLM GRADIENT_ACCUMULATION_STEPS=4 | --seed 1              | unset it, and give --gradient_accumulation_steps 4
# disk
CLM | --output_dir ../corpus.jsonl                      | output_dir: ../corpus.jsonl cannot be written && is a file
CLM | --output_dir ../corpus.jsonl/run                  | corpus.jsonl is a file, not a folder. Name another folder
CLM | --output_dir gs://bucket/run --cache_dir hf://x   | output_dir: gs://bucket/run is a URL && Mount it && `rclone copy` or `hf sync`: docs/resuming.md && cache_dir: hf://x is a URL
CLM | --cache_dir ../corpus.jsonl                       | cache_dir: ../corpus.jsonl cannot be written && is a file
# preparation
PREPARE | --output_dir shards --dataset_name ../corpus.jsonl | arguments are required: --tokenizer_name
PREPARE | --output_dir shards --dataset_name ../no.jsonl --tokenizer_name ../words | '../no.jsonl': no such file
PREPARE | --output_dir shards --tokenizer_name ../words --block_size 1 | unrecognized arguments: --block_size 1
PREPARE | --output_dir shards --tokenizer_name ../words --shard_mb nan --validation_fraction nan | shard_mb: must be 1e-06 or greater, and less than 2**63, is nan && validation_fraction: must be in [0, 1)
PREPARE | --output_dir shards --tokenizer_name ../words --shard_mb inf --validation_fraction 2 | shard_mb: must be && is inf. && validation_fraction: must be
PREPARE | --output_dir LONG --dataset_name ../corpus.jsonl --tokenizer_name ../words | File name too long
PREPARE | --output_dir shards --tokenizer_name ../words --streaming true | --streaming: leave it out: datasets of the Hub are always streamed here
PREPARE | --output_dir shards --tokenizer_name x --dataset_nam x | unrecognized arguments: --dataset_nam
PREPARE | --tokenizer_name ../words                      | the following arguments are required: --output_dir
PREPARE | --output_dir .. --dataset_name ../corpus.jsonl --tokenizer_name ../words | is not empty and holds no shards
PREPARE | --output_dir ../home/shards --dataset_name ../corpus.jsonl --tokenizer_name ../words --keywords absent | gives nothing to train on
TOKENIZER | --output_dir words --dataset_name ../no.jsonl | '../no.jsonl': no such file
TOKENIZER | --output_dir words --dataset_name ../corpus.jsonl --text_column words | no column 'words'
TOKENIZER | --output_dir LONG --dataset_name ../corpus.jsonl | cannot be written: && File name too long
TOKENIZER | --output_dir words --dataset_name ../corpus.jsonl --max_bytes 0 --vocab_size -1 | max_bytes: must be 1 or greater && vocab_size: must be 1
TOKENIZER | --output_dir gs://bucket/words --dataset_name ../corpus.jsonl | output_dir: gs://bucket/words is a URL; name a folder
TOKENIZER | --output_dir words --streaming               | --streaming: leave it out
TOKENIZER | --output_dir words --algorithm bpee          | invalid choice: 'bpee'
"""  # noqa: E501
ROWS = [[part.strip() for part in row.split(" | ")] for row in TABLE.splitlines() if row and row[0] != "#"]


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """The parent folder of the rows' folders, with the files that rows name."""
    folder = tmp_path_factory.mktemp("around")
    (folder / "corpus.jsonl").write_text('{"content": "import os"}\n' * 3)
    (folder / "a.jsonl").write_text('{"content": "a"}\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1")
    (folder / "folder.py").mkdir()
    (folder / "folder.py" / "a.log").write_text("# A title\n")
    (folder / "empty").mkdir()
    (folder / "unnamed").mkdir()
    (folder / "unnamed/model.safetensors").write_bytes(b"")
    (folder / "unnamed/config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    (folder / "old").mkdir()
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<s>").save_pretrained(folder / "words")
    return folder


def list_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "home" not in path.parts)


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[f"{what} {flags}"[:60] for what, flags, _ in ROWS])
def test_bad_input_is_one_message(parent, number):
    what, flags, message = ROWS[number]
    what, *variables = what.split()
    folder, log = parent / f"row-{number}", Path(f"{parent}-{number}.log")
    folder.mkdir()
    before = list_files(parent)
    text = TEXT if what in ("CLM", "MLM") and "--dataset_name" not in flags else ""
    words = shlex.split(f"{text} {flags.replace('LONG', 'x' * 300)}")
    run = globals()[what]
    env = environment(HF_HOME=str(parent / "home"), CUDA_VISIBLE_DEVICES="")
    env |= dict(f"ACCELERATE_{variable}".split("=") for variable in variables)
    env.pop("HF_TOKEN", None)
    script = str(PROJECT / run) if run.endswith(".py") else run
    process = forked.start(PROJECT, script, words, log, env=env, cwd=folder)
    process.join(PATIENCE)
    process.kill()
    output = log.read_text()
    assert process.exitcode == 2, output
    assert "Traceback" not in output and "SECRET" not in output and output.count("error: ") <= 1, output
    for part in message.split(" && "):
        assert (part.removeprefix("!") in output) != part.startswith("!"), output
    assert list_files(parent) == before
