"""utils/check.py reports mistakes that people make in editing a script, and accepts the unedited scripts."""

import pytest

from tests.checked import ForkedCheck, copy_project
from tests.runs import DROPOUT, PROJECT, arguments, write_corpus
from utils.check import Check

MODEL = '    model = CausalLMLoss(build_model(args, "causal", tokenizer))'
OPTIMIZER = "    optimizer = build_optimizer(model, args)"
SCHEDULE = "    schedule = build_schedule(optimizer, args, steps.last)"
GUARD = "    guard = UpdateGuard("
GIVEN = "        log=log,\n"
EVALUATED = "                log.evaluation(step, record, samples)\n"
EVALUATING = "                    losses.append(model(batch)[1])"
BACKWARD = "accelerator.backward(loss / "
SEED = "        steps.seed(step)  # random numbers depend only on (seed, step, process)\n"
STEP = "        optimizer.step()\n"
CLIP = "        grad_norm = accelerator.clip_grad_norm_("
LOADER = "steps.rows_before(steps.last))\n    batches = iter"
PADDING = "[row_numbers.cpu() >= 0]"
READ = "log.train(step, learning_rate"
MAIN = "\n\n@entry_point\n"

SKIPPED_BLOCK = """    block = model.lm.model.layers[1]
    as_it_is = block.forward
    block.forward = lambda x, *a, **k: as_it_is(x, *a, **k) if COND else x
"""
# A trained parameter outside lm, which the exported model lacks.
SECOND_HEAD = '''

class SecondHead(CausalLMLoss):
    def __init__(self, lm):
        super().__init__(lm)
        self.shift = torch.nn.Parameter(torch.full([lm.config.hidden_size], 0.5))
        lm.base_model.norm.register_forward_hook(lambda module, args, out: out + self.shift)
'''
AVERAGE = """

class Average:
    def __init__(self, model):
        self.weights = [weight.detach() for weight in model.parameters()]  # no clone

    def update(self, model):
        for average, weight in zip(self.weights, model.parameters(), strict=True):
            average.lerp_(weight.detach(), 0.1)

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        for average, weight in zip(self.weights, state["weights"], strict=True):
            average.copy_(weight)
"""
# Averages the weights of the last fifth of the steps.
LATE_AVERAGE = """        if step + 1 > 0.8 * steps.last:
            average.update_parameters(accelerator.unwrap_model(model).lm)
"""
SECOND_BACKWARD = """\
        lm = accelerator.unwrap_model(model).lm
        accelerator.backward(lm(input_ids=micro_batches[-1]["input_ids"]).logits.square().mean())
"""
PLATEAU = "    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1)"
NOISE = """        small = accelerator.reduce(small_norm**2, "mean")
        noise = (small - guard.norm**2) / (1 / args.per_device_train_batch_size - 1 / 8)
"""
NOISY = "lambda batch: {**batch, 'input_ids': batch['input_ids'].roll(torch.randint(9, ()).item(), 1)}"
RESUMED, STOPPED = "killed, resumed", "stopped, resumed"
BOTH = [RESUMED, STOPPED]
# Mistake: [(text of the script, replacement)], flags, checks that must fail
FAULTS = {
    "a counter set on lm": (
        [(SEED, SEED + "        lm = accelerator.unwrap_model(model).lm\n"
                       "        lm.seen = getattr(lm, 'seen', 0) + 1\n"),
         (BACKWARD, "accelerator.backward(loss * (1 + lm.seen) / ")], {}, BOTH),
    "eval() left on": (
        [(EVALUATED, EVALUATED + "                accelerator.unwrap_model(model).lm.eval()\n")],
        DROPOUT, [RESUMED]),
    "a schedule of another optimizer": (
        [(SCHEDULE, SCHEDULE + "\n    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)")], {},
        ["one checkpoint"]),
    "random numbers in collate": (
        [(LOADER, f"steps.rows_before(steps.last), {NOISY})\n    batches = iter")], {}, [RESUMED]),
    "random numbers in the evaluation": (
        [(EVALUATING, EVALUATING.replace("model(batch)[1]", "model(batch)[1] * torch.rand(()).item()"))],
        {}, ["two processes"]),
    "a generator of one's own": (
        [(GUARD, "    noise = torch.Generator().manual_seed(args.seed)\n" + GUARD),
         (BACKWARD, "accelerator.backward(loss * torch.rand((), generator=noise) / ")], {}, BOTH),
    "a head beside lm": (
        [(MAIN, SECOND_HEAD + MAIN), (MODEL, MODEL.replace("CausalLMLoss", "SecondHead"))], {},
        ["the saved model"]),
    "an average without a clone": (
        [(MAIN, AVERAGE + MAIN), (GUARD, "    average = Average(model)\n" + GUARD),
         (GIVEN, GIVEN.replace("log=log,", "log=log, average=average,")),
         (STEP, STEP + "        average.update(model)\n")], {}, ["one checkpoint"]),
    "an answer that differs by process": (
        [(EVALUATED, EVALUATED + "                if step == 5 and not accelerator.is_main_process:\n"
                                 "                    steps.last = step\n")], {}, ["two processes"]),
    "an average of the last steps": (
        [(GUARD, "    average = AveragedModel(accelerator.unwrap_model(model).lm)\n" + GUARD),
         (MAIN, "\n\nfrom torch.optim.swa_utils import AveragedModel\n" + MAIN),
         (STEP, STEP + LATE_AVERAGE)], {}, [STOPPED]),
    "the best loss in a local variable": (
        [(GUARD, "    best = math.inf\n" + GUARD),
         (EVALUATED, EVALUATED + "                best = min(best, record['loss/eval'])\n")], {},
        [RESUMED]),
    "a parameter beside the model": (
        [(OPTIMIZER, "    scale = torch.nn.Linear(1, 1, bias=False)\n" + OPTIMIZER
                     + "\n    optimizer.add_param_group({'params': [*scale.parameters()]})"),
         (BACKWARD, "accelerator.backward(loss * (1 + scale.weight.sum() * row_losses[0]) / "),
         (GIVEN, GIVEN.replace("log=log,", "log=log, scale=scale,"))], {}, ["two processes"]),
    "a second backward, with dropout": ([(CLIP, SECOND_BACKWARD + CLIP)], DROPOUT, ["two processes"]),
    "padding rows in an evaluation": ([(PADDING, "")], {}, ["two processes"]),
    "a gradient for the log": (
        [(CLIP, CLIP.replace("        grad_norm", """\
        if steps.due(step + 1, args.logging_steps):
            accelerator.backward(model(micro_batches[0])[0])
        grad_norm"""))], {}, ["other steps"]),
    "dropout in the evaluation": ([("        model.eval()\n", "")], DROPOUT, ["--eval_only"]),
    "a block skipped on one process": (
        [(OPTIMIZER, SKIPPED_BLOCK.replace("COND", "accelerator.is_main_process") + OPTIMIZER)], {},
        ["two processes"]),
}  # fmt: skip
# Correct edit: [(text of the script, replacement)], flags, text of the output
RIGHT = {
    "a clock in the log": (
        [(READ, READ + ", minutes=torch.tensor(time.monotonic() / 60)"),
         ("import sys\n", "import sys\nimport time\n")],
        {}, "not compared, as different before the stop, too: minutes"),
    "a metric of micro-batches": (
        [("            losses += ", "            if micro_step == 1:\n"
          "                small_norm = 2 * torch.nn.utils.get_total_norm(\n"
          "                    [weight.grad for weight in model.parameters() if weight.grad is not None])\n"
          "            losses += "),
         (STEP, NOISE + STEP), (READ, READ + ", noise=noise")],
        {}, "not compared: noise, which depends on the size of a micro-batch"),
    "dropout on embeddings": (
        [(OPTIMIZER, """\
    model.lm.get_input_embeddings().register_forward_hook(
        lambda module, args, out: torch.nn.functional.dropout(out, 0.1, module.training))
""" + OPTIMIZER)],
        {}, "not compared after step 0"),
    "an evaluation that sets the rate": (
        [(SCHEDULE, PLATEAU),
         (EVALUATED, EVALUATED + "                schedule.step(record['loss/eval'])\n"),
         ("        schedule.step()\n", "")], {}, "not compared, as evaluations decide"),
}  # fmt: skip
FAST = ("the best loss in a local variable", "a parameter beside the model", "a metric of micro-batches")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    return {"dataset_name": write_corpus(folder / "corpus.jsonl"), "cache_dir": folder / "cache"}


@pytest.mark.parametrize("script", ["train_clm.py", "train_mlm.py"])
def test_unedited_scripts_pass(script, corpus, tmp_path, capsys):
    check = ForkedCheck(copy_project(tmp_path), script, corpus)
    assert check.run_all() == []
    output = capsys.readouterr().out
    assert output.count("holds: ") == 8 and "not compared" not in output
    assert "largest relative difference 0, the same bits in checkpoints" in output


@pytest.mark.slow
def test_default_model_passes_at_its_default_rates(corpus, tmp_path):
    flags = arguments(corpus | {"keywords": ["none"], "vocab_size": 1000})
    assert Check(PROJECT / "train_clm.py", flags, tmp_path).run_all() == []


@pytest.mark.slow
def test_next_sentence_prediction_passes(corpus, tmp_path):
    flags = {"next_sentence": True, "model_type": "bert", "text_column": "content"}
    assert ForkedCheck(copy_project(tmp_path), "train_mlm.py", corpus, **flags).run_all() == []


def edited(folder, edits):
    """A copy of the project with an edited train_clm.py."""
    copy_project(folder)
    text = (folder / "train_clm.py").read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "train_clm.py").write_text(text)
    return folder


def names(table):
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in table]


@pytest.mark.parametrize("name", names(RIGHT))
def test_correct_edit_passes(name, corpus, tmp_path, capsys):
    edits, flags, text = RIGHT[name]
    check = ForkedCheck(edited(tmp_path, edits), "train_clm.py", corpus, **flags)
    assert check.run_all() == [], capsys.readouterr().out
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("name", names(FAULTS))
def test_mistake_is_reported(name, corpus, tmp_path, capsys):
    edits, flags, failing = FAULTS[name]
    folder = edited(tmp_path, edits)
    limit = {"limit": 60} if failing == ["two processes"] else {}  # it may hang
    failed = ForkedCheck(folder, "train_clm.py", corpus, **limit, **flags).run_all()
    assert set(failing) <= set(failed), (failed, capsys.readouterr().out)
    assert "undisturbed" not in failed
