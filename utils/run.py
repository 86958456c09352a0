"""One run in one folder, as the scripts see it: it counts steps, and has things done when they are due.

It holds an object for each of its parts: `Resume` (where it continues), `Report` (what is logged and shown),
`Publication` (the saved model and its pushes), `EditCheck` (what an edit of update forgot). None of them
touches the model's update: gradients and steps stay in the script, and a test sees to it.
"""

import json
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist
from accelerate.utils import set_seed

from utils import xla
from utils.display.doctor import announce, check_launch, launch_facts, report
from utils.display.report import Report
from utils.display.throughput import flops_per_token
from utils.entry import NEVER_FREED
from utils.evaluations import Evaluations
from utils.flags import as_list, command_line
from utils.io.secrets import without_secrets
from utils.learning.compiled import compilations
from utils.learning.optim import stable_steps
from utils.publishing.publication import Publication
from utils.resume import Resume
from utils.state.checkpoint import restore_modules
from utils.state.edit_check import EditCheck, optimizer_warnings, optimizers_of, refuse_prepared_schedules
from utils.state.preemption import StopSignals, exit_status
from utils.state.rehearsal import rehearsal, rehearse_updates
from utils.state.room import disk_space
from utils.tasks import Task


class Run:
    """Made after the Accelerator; `start` gives it what is trained. All processes make the same calls."""

    def __init__(self, args, accelerator, task: Task):
        """ValueError where processes form no group, or a push could not work."""
        check_launch(accelerator)
        if accelerator.num_processes > 1:
            NEVER_FREED.append(self)  # with the accelerator, and the model in it
            if accelerator.device.type == "cpu":  # accelerate's wants a GPU for each, if there is one
                accelerator.wait_for_everyone = dist.barrier
        self.args, self.accelerator, self.task = args, accelerator, task
        self.settings = without_secrets(asdict(args))
        dataset = ", ".join(as_list(self.settings["dataset_name"]))
        self.publication = Publication(args, accelerator, task, self.settings, dataset)
        self.generator = torch.Generator("cpu" if accelerator.device.type == "xla" else accelerator.device)
        self.evaluated = lambda record: False  # yours: takes each evaluation's numbers, True ends the run
        self.state = {"step": 0, "seconds": 0.0, "skipped_updates": 0, "eval": {}, "evaluation_due": False,
                      "export_due": False, "seen": []}  # data sets of a mixture, once
        self.failure = None  # why the run cannot go on
        # Given by `describe`, and by `start` or `evaluate_only`
        self.config = self.flops = self.model = self.data = self.steps = self.keep = self.evaluations = None
        self.resume = self.report = self.edits = self.stop = None
        announce(args, self.settings, dataset, accelerator.is_main_process)

    # ---- Before the first step

    def describe(self, lm, predicted: float = 1.0) -> None:
        """Of the model, before it is prepared, which may shard it. predicted: the share of positions that
        pass the head."""
        self.config, self.flops = lm.config, flops_per_token(lm, self.args.block_size, head_share=predicted)
        self.publication.facts = {"model_type": lm.config.model_type, "parameters": lm.num_parameters()}

    def evaluate_only(self, model, evaluate, data, keep: dict) -> None:
        """Prints the numbers of the evaluation sets as JSON; writes nothing. Modules in keep, such as an
        average of the weights, are restored from the newest checkpoint where the model is output_dir's."""
        folder = self.args.output_dir if self.args.model_name_or_path == self.args.output_dir else None
        for name in restore_modules(folder, model, keep):
            warning = f"warning: no checkpoint here has {name}: evaluated as new"
            self.accelerator.print(warning, file=sys.stderr)
        evaluations = Evaluations(self.accelerator, self.task, model, keep, evaluate, data, [])
        self.accelerator.print(json.dumps(evaluations.measure()))

    def start(self, model, update, evaluate, data, steps, keep: dict) -> bool:
        """Begin, or continue where the newest checkpoint is. False: nothing is left to do.

        keep: {name: what has state_dict and load_state_dict} beside the model is saved, restored, rehearsed.
        ValueError where the checkpoint does not fit, and where update changes what is not in keep."""
        args, accelerator, publication = self.args, self.accelerator, self.publication
        self.model, self.data, self.steps, self.keep = model, data, steps, keep
        self.evaluations = Evaluations(accelerator, self.task, model, keep, evaluate, data, args.prompts)
        refuse_prepared_schedules(keep)
        stable = stable_steps(args, steps)
        models = publication.plan_milestones(args, steps, stable[1])
        disk = disk_space(args.output_dir, model, keep, args.save_total_limit, models)
        publication.launch = launch = launch_facts(accelerator, self.config._attn_implementation)
        place = publication.publisher.checkpoints
        self.resume = Resume(args, accelerator, steps, data, stable, launch, place)
        if saved := self.resume.load(model, keep):
            self.state = self.resume.state_of(saved)
            data.load_state_dict(saved["stream"])
        publication.start(0 if self.resume.origin else self.step, args.resume_from_checkpoint == "auto")
        if self._done:
            return publication.finished_before(self.step, self.state["eval"], args.hub_timeout)
        shown = publication.name_optimizers(optimizers_of(keep))
        self.resume.save_args(shown, self.state.get("origin"))
        offset, publisher = self.resume.metrics_offset, publication.publisher
        known = args, accelerator, steps, self.state, self.flops
        self.report = Report(*known, launch, shown, offset, publisher)
        name = args.model_name_or_path or args.model_type
        block = report(accelerator, steps, self.step, launch, name, publication.facts["parameters"])
        accelerator.print(block, f"disk       {disk}", *optimizer_warnings(keep), sep="\n")
        self.report.changes(self.step, self.resume.changes())
        known = data, steps, args, self, self.generator
        self.edits = EditCheck(update, model, keep, args, known, collate=data.collate)
        self.stop = StopSignals(accelerator)
        if args.preflight and not saved:
            self._rehearse(update)
        self._keep_milestone()  # wanted only now, or lost with another machine
        if args.eval_at_start and not saved:
            self.state["evaluation_due"] = True  # the origin of the curves
        return self._catch_up()

    def _rehearse(self, update) -> None:
        accelerator, data = self.accelerator, self.data
        with rehearsal(accelerator, self.model, self.keep, self.resume.checkpoints, self.edits) as folder:
            if failure := self.publication.write(self.model, data.tokenizer, folder):
                raise RuntimeError(f"preflight: the model cannot be saved: {failure}")
            if not xla.is_xla():  # there it would be graphs of its own, and the first step comes at once
                first = next(data.batches(self.steps, self.step))
                seconds = rehearse_updates(accelerator, update, first, self.seed_step, self.edits)
                self.report.rehearsed(seconds)
            self.evaluations.rehearse()

    def _catch_up(self) -> bool:
        """The evaluation at the start, or one that a stop interrupted; the last model, for which a full disk
        had no room. False: nothing is left after that."""
        if due := self.state["evaluation_due"]:
            self.evaluate(due if isinstance(due, list) else ())
            if self.state["evaluation_due"]:  # and another signal: all is saved, or not yet begun
                raise SystemExit(exit_status(self.stopping))
        elif not (self._ended and self.state.get("export_due")):
            return True
        if self._ended:
            self.save()
            self.finish()
        return not self._ended

    # ---- In the loop

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state["step"]

    @property
    def stopping(self) -> int:
        """The stop signal that all processes have agreed on, or 0; the step at which `evaluated` ends it."""
        return self.stop.answer or self.state.get("ended") or 0

    @property
    def _ended(self) -> bool:
        return self.step >= self.steps.last or bool(self.state.get("ended"))

    @property
    def _done(self) -> bool:
        return self._ended and not (self.state["evaluation_due"] or self.state.get("export_due"))

    def seed_step(self) -> None:
        """Random numbers are a function of (seed, step, process), those of `generator` of (seed, step)."""
        seed = self.args.seed * 1_000_003 + self.step * 4099
        set_seed((seed + self.accelerator.process_index) % 2**32)
        self.generator.manual_seed(seed)

    def next_step(self) -> None:
        """One more step is done: counted, shown, a milestone kept, and all processes agree about stopping."""
        self.state["step"] += 1
        self.edits.check_step(self.accelerator)
        for line in compilations.news():
            self.report.progress.write(line)
        self.report.progress.update(self.step)
        self._keep_milestone()
        self.stop.agreed()

    def due(self, steps: int) -> bool:
        """Every so many steps (0: every epoch), after the last one, and before the learning rate falls."""
        ends = self.steps.last, self.resume.checkpoints.kept_step
        return self.step in ends or self.step % self.steps.every(steps) == 0

    def log(self, record: dict, skipped=()) -> None:
        """A line of training. skipped: for each update since the last line 1 if it was skipped, else 0."""
        self.edits.check_settings()
        epochs = self.data.epochs(self.steps.rows_before(self.step))
        self.report.training(self.step, self.state, record, skipped, epochs)

    def evaluate(self, names=()) -> None:
        """Evaluation sets (these, or all), samples, curves. A stop signal ends it early, still due."""
        self.seed_step()  # for what draws in it: the same after a resume
        with self.report.throughput.apart("evaluation"):
            record = self.evaluations.measure(names, self.stop.agreed)
            self.state["evaluation_due"] = (list(names) or True) if record is None else False
            if record is None:
                return
            self.state["eval"] = {**(self.state["eval"] if names else {}), **record}
            if self.evaluated(record):
                self.state["ended"] = self.step
            tokens = self.steps.tokens_before(self.step)  # for dashboards, as an axis
            self.report.numbers({"step": self.step, "tokens": tokens, **record})
            if self.args.keep_best:
                self.publication.keep_best(self.model, self.data, self.state, record)
            self.report.show(self.evaluations.samples())

    def save(self) -> None:
        """A checkpoint to continue from, the model for from_pretrained, and their push."""
        if message := self.edits.changed():  # only now, or the first step would have ended the run
            self.report.progress.write(f"warning: {message}")
        self.resume.refuse_bad_weights(self.edits.check_weights(self.accelerator), self.step)
        with self.report.throughput.apart("save"):
            self.state["seconds"] = self.report.throughput.seconds
            failure = self.publication.save_model(self.model, self.data.tokenizer, self.state, self.steps)
            final, self.state["export_due"] = bool(self._ended or self.stopping), bool(failure)
            offset, settings = self.report.metrics.offset, self.settings
            self.resume.save(self.state, self.model, self.keep, settings, self.config, offset, final)
            if not failure:
                self.publication.push(self.step, self.state["eval"])
            elif final:
                message = f"error: the last model was not saved: {failure}; make room, then run the same"
                self.accelerator.print(f"{message} command again", file=sys.stderr)
                raise SystemExit(1)

    def _keep_milestone(self) -> None:
        with self.report.throughput.apart("milestone"):
            publisher = self.publication.publisher
            publisher.keep_milestone(self.accelerator, self.model, self.data.tokenizer, self.step)

    # ---- The end

    def give_up(self, skipped: int) -> None:
        """So many updates in a row were skipped that the run cannot go on: `finish` raises RuntimeError."""
        cause = f"{skipped} updates in a row were skipped, as their gradients are not finite"
        file = f"{self.args.output_dir}/metrics.jsonl"
        self.failure = f"{cause}. Lower learning_rate, or look at the samples that {file} names."

    def finish(self) -> None:
        """Nothing is left in flight; the summary, or the exit status of a stop."""
        last, accelerator = self.steps.last, self.accelerator
        self.report.progress.close()
        self.resume.checkpoints.wait()
        arrived = self.publication.publisher.finish(20 if self.stop.requested else self.args.hub_timeout)
        self.report.pushes(self.step)
        if self.failure:
            raise RuntimeError(self.failure)
        stopped_by = 0 if self._done else self.stopping  # too late to stop anything
        if not (self.step == last or self._done or stopped_by):
            raise RuntimeError(f"the loop ended at step {self.step} of {last}: its data did, or a "
                               "break of yours; docs/edits/early-stopping.diff ends a run early")
        accelerator.end_training()
        self.stop.close()
        if self.state.get("ended"):
            accelerator.print(f"Ended at step {self.step} of {last}, by its last evaluation.")
        if stopped_by:
            accelerator.print(f"Stopped at step {self.step} of {last} and saved; run it again to resume.")
            raise SystemExit(exit_status(stopped_by))
        if accelerator.is_main_process:
            told = self.report.throughput.seconds, command_line(self.args)
            print(self.publication.summary(self.state, self.steps, self.data.tokenizer, *told))
        if not arrived:
            raise SystemExit(1)
