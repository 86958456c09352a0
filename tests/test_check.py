"""utils/check.py tells mistakes that people make in editing a script, and holds the scripts as they are."""

import pytest

from tests.checked import ForkedCheck, copy_project
from tests.runs import DROPOUT, PROJECT, arguments, write_corpus
from utils.check import Check

MODEL = '    model = CausalLMLoss(build_model(args, "causal", tokenizer))'
OPTIMIZER = "    optimizer = build_optimizer(model, args)"
SCHEDULE = "    schedule = build_schedule(optimizer, args, steps.last)\n"
GUARD = "    guard = UpdateGuard("
GIVEN = "guard=guard, means=means,\n"
EVALUATED = "                    log.evaluation(step, record, samples)\n"
EVALUATING = "                    losses.append(model(batch)[1])"
BACKWARD = "accelerator.backward(loss / "
SEED = "        steps.seed(step)  # from here on random numbers are a function of (seed, step, process)\n"
STEP = "        optimizer.step()\n"
CLIP = "        grad_norm = accelerator.clip_grad_norm_("
LOADER = "steps.rows_before(steps.last))\n    batches = iter"
MAIN = "\n\n@entry_point\n"

SKIPPED_BLOCK = """    block = model.lm.model.layers[1]
    as_it_is = block.forward
    block.forward = lambda x, *a, **k: as_it_is(x, *a, **k) if COND else x
"""
# A head of its own for the last prediction of each row, trained and evaluated, that output_dir does not get.
SECOND_HEAD = '''

class SecondHead(CausalLMLoss):
    def __init__(self, lm):
        super().__init__(lm)
        self.shift = torch.nn.Parameter(torch.full([lm.config.hidden_size], 0.5))
        lm.base_model.embedding_norm.register_forward_hook(lambda module, args, out: out + self.shift)
'''
AVERAGE = """

class Average:
    def __init__(self, model):
        self.weights = [weight.detach() for weight in model.parameters()]  # no clone

    def update(self, model):
        for mine, weight in zip(self.weights, model.parameters(), strict=True):
            mine.lerp_(weight.detach(), 0.1)

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        for mine, weight in zip(self.weights, state["weights"], strict=True):
            mine.copy_(weight)
"""
NOISY = "lambda batch: {**batch, 'input_ids': batch['input_ids'].roll(torch.randint(9, ()).item(), 1)}"
RESUMED, BOTH = "killed, resumed", ["killed, resumed", "stopped, resumed"]
# What was done: [(text of the script, what stands there instead)], flags, what must be told
FAULTS = {
    "a counter set on lm": (
        [(SEED, SEED + "        lm = accelerator.unwrap_model(model).lm\n"
                       "        lm.seen = getattr(lm, 'seen', 0) + 1\n"),
         (BACKWARD, "accelerator.backward(loss * (1 + lm.seen) / ")], {}, BOTH),
    "a counter set on a block": (
        [(SEED, SEED + "        block = accelerator.unwrap_model(model).lm.model.layers[0]\n"
                       "        block.seen = getattr(block, 'seen', 0) + 1\n"),
         (BACKWARD, "accelerator.backward(loss * (1 + block.seen) / ")], {}, BOTH),
    "a counter set on accelerator": (
        [(SEED, SEED + "        accelerator.seen = getattr(accelerator, 'seen', 0) + 1\n"),
         (BACKWARD, "accelerator.backward(loss * (1 + accelerator.seen) / ")], {}, BOTH),
    "a counter of the module": (
        [(MAIN, "\n\nSEEN = [0]\n" + MAIN), (SEED, SEED + "        SEEN[0] += 1\n"),
         (BACKWARD, "accelerator.backward(loss * (1 + SEEN[0]) / ")], {}, BOTH),
    "eval() left on": (
        [(EVALUATED, EVALUATED + "                    accelerator.unwrap_model(model).lm.eval()\n")],
        DROPOUT, [RESUMED]),
    "an early stop in a dictionary": (
        [("    while True:\n", "    seen = {'best': math.inf, 'worse': 0}\n    while True:\n"),
         (EVALUATED, EVALUATED + """\
                    seen['worse'] += record['loss/eval'] > seen['best'] - 5
                    seen['best'] = min(seen['best'], record['loss/eval'])
                    if seen['worse'] == 2:
                        steps.last = step
""")], {}, [RESUMED]),
    "a schedule of another optimizer": (
        [(SCHEDULE, SCHEDULE + "    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)\n")], {},
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
         (GIVEN, GIVEN.replace("means=means,", "means=means, average=average,")),
         (STEP, STEP + "        average.update(model)\n")], {}, ["one checkpoint"]),
    "an answer that differs by process": (
        [(EVALUATED, EVALUATED + "                    if step == 5 and not accelerator.is_main_process:\n"
                                 "                        steps.last = step\n")], {}, ["two processes"]),
    "a gradient that is not reduced": (
        [(CLIP, CLIP.replace("        grad_norm", """\
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad += 1e-6 * accelerator.process_index
        grad_norm"""))], {}, ["two processes"]),
    "a block skipped on one process": (
        [(OPTIMIZER, SKIPPED_BLOCK.replace("COND", "accelerator.is_main_process") + OPTIMIZER)], {},
        ["two processes"]),
}  # fmt: skip
FAST = ("a counter set on lm", "a schedule of another optimizer", "an answer that differs by process")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    return {"dataset_name": write_corpus(folder / "corpus.jsonl"), "cache_dir": folder / "cache"}


@pytest.mark.parametrize("script", ["train_clm.py", "train_mlm.py"])
def test_the_scripts_as_they_are_hold(script, corpus, tmp_path, capsys):
    check = ForkedCheck(copy_project(tmp_path), script, corpus)
    assert check.whole() == []
    told = capsys.readouterr().out
    assert told.count("holds: ") == 7 and "not compared" not in told
    assert "largest relative difference 0, the same bits in checkpoints" in told


@pytest.mark.slow
def test_the_default_model_at_its_own_rates_holds(corpus, tmp_path):
    flags = arguments(corpus | {"keywords": ["none"], "vocab_size": 1000})
    assert Check(PROJECT / "train_clm.py", flags, tmp_path).whole() == []


@pytest.mark.slow
def test_next_sentence_prediction_holds(corpus, tmp_path):
    flags = {"next_sentence": True, "model_type": "bert", "text_column": "content"}
    assert ForkedCheck(copy_project(tmp_path), "train_mlm.py", corpus, **flags).whole() == []


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in FAULTS])  # fmt: skip
def test_a_fault_is_told(name, corpus, tmp_path, capsys):
    edits, flags, told = FAULTS[name]
    folder = copy_project(tmp_path)
    text = (folder / "train_clm.py").read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "train_clm.py").write_text(text)
    limit = {"limit": 60} if told == ["two processes"] else {}  # it may hang
    failed = ForkedCheck(folder, "train_clm.py", corpus, **limit, **flags).whole()
    assert set(told) <= set(failed), (failed, capsys.readouterr().out)
    assert "undisturbed" not in failed
