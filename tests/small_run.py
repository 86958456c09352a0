"""A minimal run for tests of checkpoints, with a real Accelerator, model, optimizer and schedule.

    run = SmallRun(folder)      # a new run, or the one in the folder is resumed
    run.train(6)                # to step 6
    run.checkpoints.save(6)
    run.outcome()               # {name: full tensor, float64} of weights and the other state
"""

from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM

from utils.learning.muon import PRECISION, MuonAdamW
from utils.state.checkpoints import Checkpoints

# Muon in float32 is the same on every CPU. Rounding to bfloat16 moves a matrix by 4e-5; then small gradients
# of the embeddings differ, AdamW divides them by their size, and an embedding moves by 2e-4 to 8e-4.
PRECISION["cpu"] = torch.float32
MAY_CHANGE = ["output_dir", "resume_from_checkpoint", "save_total_limit"]


@dataclass
class Args:
    output_dir: str = "out"
    resume_from_checkpoint: str = "auto"
    model_name_or_path: str | None = None
    save_total_limit: int = 2
    learning_rate: float = 1e-2
    max_train_steps: int = 10
    num_train_epochs: float = 1.0
    keywords: list[str] = field(default_factory=list)
    eval_dataset_name: list[str] = field(default_factory=list)


class Steps:
    def __init__(self, last, rows):
        self.last, self.rows = last, rows

    def rows_before(self, step):
        return step * self.rows


class Loss(torch.nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, tokens):
        return self.lm(input_ids=tokens, labels=tokens).loss


class Counter:
    """A user's state: a number, and tensors nested in containers."""

    def __init__(self):
        self.count, self.sums = 0, torch.zeros(3)

    def state_dict(self):
        return {"count": self.count, "sums": self.sums, 3: (1.5, None, [self.sums * 2])}

    def load_state_dict(self, state):
        self.count, self.sums = state["count"], state["sums"].clone()
        rate, nothing, [double] = state[3]
        assert (rate, nothing) == (1.5, None) and double.equal(self.sums * 2)


def build(width, sharded, optimizer_type, rate):
    """A model with tied weights, and its optimizer: weight decay on matrices, Muon for those of blocks."""
    config = AutoConfig.for_model(
        "qwen3", vocab_size=300, hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, intermediate_size=48, tie_word_embeddings=True,
    )  # fmt: skip
    model = Loss(AutoModelForCausalLM.from_config(config))
    if sharded:
        for layer in model.lm.model.layers:
            fully_shard(layer)
        fully_shard(model)
    named = dict(model.named_parameters())
    blocks = [p for name, p in named.items() if p.ndim > 1 and "layers" in name and optimizer_type == "muon"]
    groups = [{"params": blocks, "momentum": 0.95, "lr": 1e-3}] if blocks else []
    for matrices in (True, False):
        group = [p for p in named.values() if (p.ndim > 1) == matrices and not any(p is b for b in blocks)]
        groups.append({"params": group, "weight_decay": 0.1 * matrices})
    kind = MuonAdamW if blocks else torch.optim.AdamW
    return model, kind(groups, lr=rate, fused=True)


class SmallRun:
    def __init__(self, folder, sharded=False, optimizer_type="adamw", rows=12, width=32, fingerprint="rows",
                 extra_state=None, **settings):  # fmt: skip
        self.args = Args(output_dir=str(folder), **settings)
        self.accelerator, last = Accelerator(cpu=True), self.args.max_train_steps
        torch.manual_seed(1)
        model, optimizer = build(width, sharded, optimizer_type, self.args.learning_rate)
        if not sharded:
            model, optimizer = self.accelerator.prepare(model, optimizer)
        self.model, self.optimizer, self.rows = model, optimizer, rows
        bare = getattr(optimizer, "optimizer", optimizer)
        self.schedule = LambdaLR(bare, lambda step: 1 - step / last)
        self.counter, self.generator = Counter(), torch.Generator().manual_seed(5)
        state = dict(model=model, optimizer=optimizer, schedule=self.schedule, counter=self.counter)
        state |= dict(generator=self.generator) | (extra_state or {})
        steps = Steps(last, rows)
        self.checkpoints = Checkpoints(self.args, self.accelerator, steps, fingerprint, MAY_CHANGE, **state)
        self.step = self.checkpoints.load()

    def train(self, upto, save_steps=0):
        """Train to step `upto` and save at each multiple of save_steps."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        while self.step < upto:
            generator = torch.Generator().manual_seed(self.step)
            tokens = torch.randint(0, 300, (self.rows, 16), generator=generator)
            loss = self.model(tokens.chunk(processes)[rank])
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.counter.count += 1
            self.counter.sums += torch.rand(3, generator=self.generator)
            self.step += 1
            if save_steps and self.step % save_steps == 0:
                self.checkpoints.save(self.step)
        return self

    def save(self, **options):
        self.checkpoints.save(self.step, **options)
        return self

    def outcome(self):
        named = {name.split("module.")[-1]: p for name, p in self.model.named_parameters()}
        tensors = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in named.items()}
        tensors |= {"sums": self.counter.sums, "rates": torch.tensor(self.schedule.get_last_lr())}
        return {name: tensor.detach().cpu().double().clone() for name, tensor in tensors.items()}
