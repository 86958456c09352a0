"""Mistakes that people make in editing the script: each ends with a line that says what to do."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.forked import start_all
from tests.runs import PROJECT, TINY, metrics, write_corpus

JUDGE = "        skipped = guard.check(grad_norm)"
CLIP = "        grad_norm = accelerator.clip_grad_norm_("
STEP = "        optimizer.step()\n"
ADD = "            means.add(loss, row_losses.mean())\n"
WARMUP = "    warmup, decay ="
EVALUATE = "            run.evaluate"
COUNTED = '{"loss/eval": (row_losses * rows * predicted, rows * predicted)}'
START = "    if not run.start("
NOISE = """        for weight in model.parameters():
            weight.grad.add_(1e-3 * torch.randn(weight.shape GENERATOR))
"""
SIGN = """    class Sign(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for weight in self.param_groups[0]["params"]:
                SKIP
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                weight.sub_(self.param_groups[0]["lr"] * momentum.lerp_(weight.grad, 0.1).sign())

    optimizer = Sign(model.parameters(), {"lr": 1e-3})
"""
SAM = """        for weight in model.parameters():  # to where the loss is higher, and back
            away = weight.grad * (0.0 if run.step < 4 else float("inf"))
            weight.data.add_(away).sub_(away)
"""
NOISE_OF_ALL = NOISE.replace(" GENERATOR", ", generator=run.generator")
ONCE = "        if run.step == 1:\n            lm.get_input_embeddings().weight.requires_grad_(False)\n"
OWN_WEIGHT = """    scale = torch.nn.Parameter(torch.ones(()))
    optimizer.add_param_group({"params": [scale], "lr": 0.1})
"""
SCALED = "accelerator.backward(loss / len(micro_batches))"
TIED = "    lm.tie_weights()"
BUFFER = """
    lm.register_buffer("seen", torch.zeros(()), persistent=False)
    lm.tie_weights()"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("careless")
    return {"dataset_name": write_corpus(folder / "corpus.jsonl"), "cache_dir": folder / "cache"}


def launch(corpus, folder, edits: dict, processes=1, **flags) -> tuple[int, str]:
    """Exit status and output of the script with each text of `edits` replaced."""
    for part in ("data", "utils"):
        if not (folder / part).exists():
            (folder / part).symlink_to(PROJECT / part)
    text = (PROJECT / "train_clm.py").read_text().replace("import math\n", "import math\nimport torch\n", 1)
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "train_clm.py").write_text(text)
    flags = TINY | corpus | {"output_dir": folder / "run", "preflight": True, "eval_at_start": False} | flags
    flags |= {"per_device_train_batch_size": 8 // processes, "gradient_accumulation_steps": 2}
    started = start_all(folder, "train_clm.py", flags, folder / "log", processes)
    for process in started:
        process.join(120)
    return max(process.exitcode for process in started), (folder / "log").read_text()


OWN = NOISE.replace(" GENERATOR", ", generator=noise")
CASES = {
    "add twice": ({ADD: ADD + ADD}, 1, "add was called 4 times in a step of 2 micro-batches: call it"),
    "noise": ({CLIP: NOISE.replace(" GENERATOR", "") + CLIP}, 2, "different weights. .*from run.generator"),
    "frozen": ({CLIP: ONCE + CLIP}, 2, "requires_grad of lm.model.embed_tokens.weight changed in the loop"),
    "grad is None": ({WARMUP: SIGN.replace("SKIP", "pass") + WARMUP}, 1,
                     "update: fails where the gradient is not finite .*grad is None"),
    "generator": ({CLIP: OWN + CLIP, START: "    noise = torch.Generator()\n" + START}, 1,
                  "update changes noise, .*keep=dict[(]..., noise=noise[)], as a torch.Generator"),
    "own weight": ({WARMUP: OWN_WEIGHT + WARMUP, SCALED: SCALED.replace("loss /", "loss * scale /")}, 1,
                   "keep: optimizer trains 1 weights that no checkpoint holds"),
    "unsaved buffer": ({TIED: TIED + BUFFER, CLIP: "        lm.seen.add_(1)\n" + CLIP}, 1,
                       "update changes model.lm.seen, and load_state_dict .*as a persistent buffer"),
    "eval mode": ({EVALUATE + "()": EVALUATE + "()\n            model.eval()"}, 1,
                  "update: the model is in eval mode, without dropout.* with model.train"),
    "padding": ({COUNTED: COUNTED.replace("row_losses * rows", "row_losses")}, 1,
                "evaluate: counts padding in loss/eval. Where batch"),
    "a mean": ({COUNTED: "{'loss/eval': (row_losses.mean(), torch.ones(()))}"}, 1,
               "counts padding in loss/eval"),
    "no such set": ({EVALUATE + "()": EVALUATE + "(['books'])"}, 1, "no evaluation set books; there are"),
}  # fmt: skip


@pytest.mark.parametrize("edits, processes, message", CASES.values(), ids=CASES)
def test_a_mistake_ends_with_what_to_do(edits, processes, message, corpus, tmp_path):
    status, log = launch(corpus, tmp_path, edits, processes)
    assert status == 2 and "Traceback" not in log, log
    assert re.search(message, log), log


def test_noise_that_is_the_same_on_all_processes_trains(corpus, tmp_path):
    """And is a function of the step: a resumed run draws what would have come."""
    status, log = launch(corpus, tmp_path, {CLIP: NOISE_OF_ALL + CLIP}, 2, save_total_limit=9)
    assert status == 0 and "warning" not in log, log
    whole, lines = load_file(tmp_path / "run/model.safetensors"), metrics(tmp_path / "run")
    middle = tmp_path / "run/checkpoints/step-00000003"
    assert launch(corpus, tmp_path, {CLIP: NOISE_OF_ALL + CLIP}, 2, resume_from_checkpoint=middle)[0] == 0
    again = load_file(tmp_path / "run/model.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole) and metrics(tmp_path / "run") == lines


def test_an_optimizer_written_by_hand_trains_and_is_named(corpus, tmp_path):
    skip = "if weight.grad is None: continue"
    status, log = launch(corpus, tmp_path, {WARMUP: SIGN.replace("SKIP", skip) + WARMUP})
    assert status == 0 and "warning" not in log, log
    assert json.loads((tmp_path / "run/args.json").read_text())["settings"]["optimizer_type"] == "Sign"
    assert 'optimizer_type: "Sign"' in (tmp_path / "run/README.md").read_text()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_script_as_it_is_warns_of_nothing(optimizer, processes, corpus, tmp_path):
    status, log = launch(corpus, tmp_path, {}, processes, optimizer_type=optimizer)
    assert status == 0 and "warning" not in log and "has moved none" not in log, log
    assert re.search(r"memory     [\d,.]+ [MG]iB at the peak of these steps, of [\d,.]+ GiB", log), log
    settings = json.loads((tmp_path / "run/args.json").read_text())["settings"]
    assert settings["optimizer_type"] == optimizer


def test_ends_that_look_like_success_do_not(corpus, tmp_path):
    """A loop without run.save; gradients that are left at a save, but not after the first step."""
    save = "            run.save()"
    status, log = launch(corpus, tmp_path, {save: "            pass"}, preflight=False)
    assert status == 1 and "its last step is not saved: it has no run.save" in log, log
    (folder := tmp_path / "returns").mkdir()
    status, log = launch(corpus, folder, {save: save + "\n            return"})
    assert status == 1 and "main returned from its loop, so nothing waited for saves and pushes" in log, log
    zero = "        optimizer.zero_grad()"
    (folder := tmp_path / "left").mkdir()
    status, log = launch(corpus, folder, {zero: "        if run.step < 2:\n    " + zero})
    assert "warning: update leaves gradients of " in log, log


def test_weights_that_are_not_finite_replace_no_good_ones(corpus, tmp_path):
    edits = {JUDGE: SAM + JUDGE}
    status, log = launch(corpus, tmp_path, edits, preflight=False)
    assert status == 1 and "weights are not finite at step 6 (model.lm.model.embed_tokens.weight)" in log, log
    assert "The last good checkpoint is" in log and "step-00000003" in log
    run = tmp_path / "run"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    for file in (run / "model.safetensors", run / "checkpoints/step-00000003/model.safetensors"):
        assert all(weight.isfinite().all() for weight in load_file(file).values())
    shutil.rmtree(run)
    edits = {JUDGE: SAM.replace('(0.0 if run.step < 4 else float("inf"))', "1e-3") + JUDGE}
    assert "warning: a gradient that is not finite gets into model." in launch(corpus, tmp_path, edits)[1]


LORA = """    class LoRA(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = torch.nn.Parameter(0.02 * torch.randn(4, base.in_features))
            self.up = torch.nn.Parameter(torch.zeros(base.out_features, 4))

        def forward(self, x):
            return self.base(x) + x @ self.down.T @ self.up.T

    for block in lm.model.layers:
        block.self_attn.q_proj = LoRA(block.self_attn.q_proj)
"""


def test_layers_that_transformers_would_not_load_are_told(corpus, tmp_path):
    """It would make new ones in their place, and only print a report."""
    status, log = launch(corpus, tmp_path, {"    model = CausalLMLoss(": LORA + "    model = CausalLMLoss("})
    assert status == 0, log
    told = re.search(r"does not load the saved model as it is: (\d+) weights .* first (\S+);", log)
    assert told and told[2] == "model.layers.0.self_attn.q_proj.base.weight", log
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert int(told[1]) == len(info["missing_keys"]) + len(info["unexpected_keys"]) > 0


def test_one_of_two_evaluation_sets_may_be_evaluated_more_often(corpus, tmp_path):
    """keep_best compares losses of the first set alone, whatever was evaluated last."""
    other = write_corpus(tmp_path / "other.jsonl", 20)
    sets = {"eval_dataset_name": [corpus["dataset_name"], other], "keep_best": True, "learning_rate": 0.3,
            "optimizer_type": "adamw", "max_train_steps": 6, "eval_steps": 2}  # fmt: skip
    edits = {EVALUATE + "()": EVALUATE + "([*data.evals][run.step % 4 > 0:][:1] if run.step < 6 else ())"}
    status, log = launch(corpus, tmp_path, edits, **sets)
    assert status == 0, log
    found, names = {}, ("loss/eval/corpus", "loss/eval/other")
    for line in metrics(tmp_path / "run"):
        losses = {name[10:]: loss for name, loss in line.items() if name in names}
        found |= {line["step"]: losses} if losses else {}
    evaluated = {step: [*losses] for step, losses in found.items()}
    assert evaluated == {2: ["other"], 4: ["corpus"], 6: ["corpus", "other"]}
    best = json.loads((tmp_path / "run/best/best.json").read_text())
    assert best["step"] == min((4, 6), key=lambda step: found[step]["corpus"])


def test_a_resume_that_computes_otherwise_says_so(corpus, tmp_path):
    """Precision, processes, attention, compiler and device stand in args.json, the card, and of each start
    in run.json; the line says what is another one."""
    folder = tmp_path / "run"
    assert launch(corpus, tmp_path, {})[0] == 0
    middle = {"resume_from_checkpoint": folder / "checkpoints/step-00000003"}
    autocast = {"mixed_precision=launcher_precision()": 'mixed_precision="bf16"'}
    status, log = launch(corpus, tmp_path, autocast, **middle)
    assert status == 0 and "precision: float32 in the run so far, bfloat16 autocast now" in log, log
    launches = json.loads((folder / "run.json").read_text())["launches"]
    precisions = [(start["step"], start["precision"]) for start in launches]
    assert precisions == [(0, "float32"), (3, "bfloat16 autocast")]
    assert launches[0].keys() == {"step", "precision", "attention", "compiler", "processes", "device"}
    recorded = json.loads((folder / "args.json").read_text())["launch"]
    assert recorded == {name: value for name, value in launches[1].items() if name != "step"}
    assert "| computed in | bfloat16 autocast, attention by sdpa |" in (folder / "README.md").read_text()
