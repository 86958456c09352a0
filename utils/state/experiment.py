"""Whether a checkpoint is one of this experiment: settings, rows and length that it was saved with."""

import json
import math
import shlex

from utils.flags import LENGTH, as_list
from utils.io.secrets import without_secrets
from utils.learning.optim import further_rates
from utils.state.folders import Unfit

OTHER = "holds a run with other settings: repeat them, or choose another --output_dir"


def experiment(args, steps, step: int, rows_fingerprint: str) -> dict:
    """What a checkpoint after `step` steps records of its run."""
    rows = steps.rows_before(step + 1)
    return dict(settings=_plain(vars(args)), rows=rows, last=steps.last, fingerprint=rows_fingerprint)


def changed_settings(saved: dict, args, may_change: set) -> list[str]:
    """A line for each setting that differs. One that the run lacks counts as its default; "x" is ["x"]."""
    now, defaults, lines = _plain(vars(args)), vars(type(args)()), []
    for name in sorted(now.keys() - may_change - LENGTH):  # the steps that follow from those are compared
        was = as_list(saved.get(name, without_secrets(defaults.get(name))))
        if was != (is_now := as_list(now[name])):
            shown = [" ".join(map(str, value)) or "none" for value in (was, is_now)]
            lines.append(f"{name}: {shown[0]} in the run, {shown[1]} now")
    return lines


def check_experiment(state: dict, args, steps, rows_fingerprint: str, may_change: set, schedule=None) -> None:
    """Raises Unfit with what differs from state.json. The length may differ if the learning rate of the step
    is the same, and not end before it."""
    lines, remedy, step = changed_settings(state["settings"], args, may_change), (), state["step"]
    was, is_now = state["rows"], steps.rows_before(step + 1)
    if was != is_now:
        lines.append(f"rows per step: {was / (step + 1):g} in the run, {is_now / (step + 1):g} now")
    if state["last"] != steps.last and (steps.last < step or not _same_rate(schedule, state)):
        rate = f"the learning rate of step {step} depends on it"
        reason = f"{step} are done" if steps.last < step else rate
        lines.append(f"max_train_steps: {state['last']} in the run, {steps.last} now, and {reason}")
        folder = shlex.quote(str(args.output_dir))
        remedy = (f"For all steps anew: --output_dir {folder}-2; for a new run with its weights also "
                  f"--model_name_or_path {folder} {further_rates(args)}",)
    if not lines and state["fingerprint"] != rows_fingerprint:
        lines.append("dataset_name: the rows of the run had other content or another order, or it had "
                     "another tokenizer: restore them")
    if lines:
        raise Unfit("\n".join([OTHER, *lines, *remedy]))


def _plain(settings: dict) -> dict:
    return json.loads(json.dumps(without_secrets(settings), default=str))


def _same_rate(schedule, state: dict) -> bool:
    """Whether this run's schedule has the saved learning rates at the step of the checkpoint."""
    if schedule is None:
        return True
    if not hasattr(schedule, "lr_lambdas"):  # its length is part of its state
        return False
    saved = state["things"].get("schedule", {}).get("state", {}).get("_last_lr")
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    rates = [base * factor(state["step"]) for base, factor in pairs]
    return isinstance(saved, list) and len(saved) == len(rates) and all(map(math.isclose, rates, saved))
