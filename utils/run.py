"""One run in one folder, as the scripts see it: it counts steps, and logs, evaluates and saves when told to.

It holds `Resume` (where it continues), `Report` (what is logged and shown), `Publication` (the saved model
and its pushes) and `EditCheck` (what an edit of update forgot). None of them updates the model: gradients and
steps stay in the script, and a test checks that.
"""

import json
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist
from accelerate.utils import set_seed

from utils.display.doctor import announce, check_launch, launch_facts, report
from utils.display.metrics import finite
from utils.display.report import Report
from utils.display.throughput import flops_per_token
from utils.entry import IN_LOOP, KEEP_ALIVE
from utils.flags import as_list
from utils.io.secrets import without_secrets
from utils.learning.compiled import compilations
from utils.learning.optim import describe_groups, name_optimizers, stable_steps
from utils.publishing.publication import Publication
from utils.publishing.publisher import open_publisher
from utils.rehearsal import rehearse
from utils.resume import Resume
from utils.settings import save_args
from utils.state.checkpoint import restore_average
from utils.state.edit_check import EditCheck
from utils.state.folders import disk_space
from utils.state.preemption import StopSignals, exit_status
from utils.state.training_state import bare_optimizer
from utils.tasks import Evaluations, Task


class Run:
    """Made after the Accelerator; `start` gives it what is trained. All processes make the same calls."""

    def __init__(self, args, accelerator, task: Task):
        check_launch(accelerator)
        if accelerator.num_processes > 1:
            KEEP_ALIVE.append(self)  # keeps the accelerator and the model alive until the process ends
            if accelerator.device.type == "cpu":  # accelerate's would use GPUs that CPU processes lack
                accelerator.wait_for_everyone = dist.barrier
        self.args, self.accelerator, self.task = args, accelerator, task
        self.settings = without_secrets(asdict(args))
        self.datasets = as_list(self.settings["dataset_name"])
        self.publisher = open_publisher(args, accelerator.is_main_process)
        self.generator = torch.Generator("cpu" if accelerator.device.type == "xla" else accelerator.device)
        self.evaluated = lambda record: False  # hook: gets an evaluation's metrics; True ends the run
        self.state = {"step": 0, "seconds": 0.0, "skipped_updates": 0, "eval": {}, "evaluation_due": False,
                      "export_due": False, "seen": []}  # seen: data sets of a mixture that begin to repeat
        self.failure, self.saved = None, None  # why the run cannot go on; the last step that was saved
        # Given to `start`, and made by it:
        self.model = self.data = self.steps = self.keep = None
        self.evaluations = self.publication = self.resume = self.edits = self.report = self.stop = None
        announce(args, self.settings, self.datasets, accelerator.is_main_process)

    def evaluate_only(self, model, evaluate, data, keep: dict) -> None:
        """Prints the numbers of the evaluation sets as JSON and writes nothing."""
        restore_average(self.args, self.accelerator, model, keep)
        evaluations = Evaluations(self.accelerator, self.task, model, keep, evaluate, data, [])
        self.accelerator.print(json.dumps(finite(evaluations.measure())))

    def start(self, model, update, evaluate, data, steps, keep: dict, predicted: float = 1.0) -> bool:
        """Begin, or resume from the newest checkpoint. False: nothing is left to do.

        keep: {name: what has state_dict and load_state_dict}: saved, restored, rehearsed with the model.
        predicted: share of the positions that have a loss."""
        args, accelerator, task = self.args, self.accelerator, self.task
        self.model, self.data, self.steps, self.keep = model, data, steps, keep
        lm = accelerator.unwrap_model(model, keep_torch_compile=False).lm
        launch, stable = launch_facts(accelerator, lm.config._attn_implementation), stable_steps(args, steps)
        optimizers = [optimizer for thing in keep.values() if (optimizer := bare_optimizer(thing))]
        settings = name_optimizers(self.settings, optimizers)
        self.evaluations = Evaluations(accelerator, task, model, keep, evaluate, data, args.prompts)
        facts = {"model_type": lm.config.model_type, "parameters": lm.num_parameters(), "launch": launch}
        prompts, kept_step = self.evaluations.prompts, stable[1]
        self.publication = Publication(args, accelerator, task, self.publisher, settings, facts,
                                       self.datasets, prompts, steps, kept_step)
        kept = args.save_total_limit + (kept_step < steps.last)  # one from before the decay, too
        disk = disk_space(args.output_dir, model, keep, kept, self.publication.models)
        self.resume = Resume(args, accelerator, steps, data, stable, launch, self.publisher.checkpoints)
        resumed = self.resume.load(model, keep)
        self.state = resumed or self.state
        self.publication.start(0 if self.resume.origin else self.step, args.resume_from_checkpoint == "auto")
        if self._done:
            return self.publication.finished_before(self.step, self.state["eval"], args.hub_timeout)
        self.edits = EditCheck(update, model, keep, args, [data, steps, self, self.generator], data.collate)
        if accelerator.is_main_process:
            save_args(args.output_dir, settings, self.resume.code, launch, self.state.get("origin"))
        flops = flops_per_token(lm, args.block_size, head_share=predicted)
        self.report = Report(args, accelerator, steps, self.state, flops, launch, settings,
                             self.resume.metrics_offset, self.publisher)
        name = args.model_name_or_path or args.model_type
        block = report(accelerator, steps, self.step, launch, name, facts["parameters"])
        groups = [line for optimizer in optimizers for line in describe_groups(optimizer)]
        accelerator.print(block, *groups, f"disk       {disk}", *self.edits.warnings(), sep="\n")
        self.report.changes(self.step, self.resume.changes())
        self.stop = StopSignals(accelerator)
        if args.preflight and not resumed:
            rehearse(self)
        self._keep_milestone()  # a resumed run may want it only now, or lack it on a new machine
        if args.eval_at_start and not resumed:
            self.state["evaluation_due"] = True  # the curves begin with it
        return self._catch_up()

    def _catch_up(self) -> bool:
        """Do what is still due: an evaluation, or saving the last model. False: the run is over."""
        if due := self.state["evaluation_due"]:
            self.evaluate(due if isinstance(due, list) else ())
            if self.state["evaluation_due"]:  # a signal stopped it again; nothing is unsaved
                raise SystemExit(exit_status(self.stop.answer))
        IN_LOOP.append(self)
        self.report.throughput.begin()
        if self._over:
            self.save()
            self.finish()
        return not self._over

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state["step"]

    @property
    def stopping(self) -> bool:
        """Whether this step is the last one, here or for good. The same on all processes."""
        return bool(self.stop.answer or self._over)

    @property
    def _over(self) -> bool:
        return bool(self.step >= self.steps.last or self.state.get("ended"))

    @property
    def _done(self) -> bool:
        return self._over and not (self.state["evaluation_due"] or self.state.get("export_due"))

    def seed_step(self) -> None:
        """Random numbers are a function of (seed, step, process), those of `generator` of (seed, step)."""
        seed = self.args.seed * 1_000_003 + self.step * 4099
        set_seed((seed + self.accelerator.process_index) % 2**32)
        self.generator.manual_seed(seed)

    def next_step(self) -> None:
        """Count a step, check it, show it, keep its milestone, and agree with the others about stopping."""
        self.state["step"] += 1
        self.edits.check_step(self.accelerator)
        for line in compilations.news():
            self.report.progress.write(line)
        self.report.progress.update(self.step)
        self._keep_milestone()
        self.stop.agreed()

    def due(self, steps: int) -> bool:
        """True every `steps` steps (0: an epoch), at the last, and at the last before decay."""
        ends = self.steps.last, self.resume.checkpoints.kept_step
        return self.step in ends or self.step % self.steps.every(steps) == 0

    def log(self, record: dict, skipped=()) -> None:
        """Log a training record. skipped: for each update since the last one 1 if it was skipped, else 0."""
        epochs = self.data.train.epochs(self.steps.rows_before(self.step))
        self.report.training(self.step, self.state, record, skipped, epochs)

    def evaluate(self, names=()) -> None:
        """Evaluate these sets, or all; show samples and curves. If a stop signal ends it, it remains due."""
        self.seed_step()  # a resume evaluates with the same random numbers
        state = self.state
        with self.report.throughput.apart("evaluation"):
            record = self.evaluations.measure(names, self.stop.agreed)
            state["evaluation_due"] = (list(names) or True) if record is None else False
            if record is None:
                return
            state["eval"] = {**(state["eval"] if names else {}), **record}
            if self.evaluated(record):
                state["ended"] = True
            axes = {"step": self.step, "tokens": self.steps.tokens_before(self.step)}  # of dashboards
            self.report.log_record(axes | record)
            if self.args.keep_best:
                self.publication.keep_best(self.model, self.data, state, record)
            trained = self.step or self.args.model_name_or_path  # the samples of an untrained model are noise
            self.report.show(self.evaluations.samples() if trained else [])

    def save(self) -> None:
        """Save a checkpoint and the model for from_pretrained, and push them."""
        self.saved = self.step
        if message := self.edits.lost():  # at the first step an error
            self.report.progress.write(f"warning: {message}")
        self.edits.check_saved(self.resume.checkpoints, self.step)
        with self.report.throughput.apart("save"):
            self.state["seconds"] = self.report.throughput.seconds
            failure = self.publication.save_model(self.model, self.data.tokenizer, self.state, self.steps)
            final, self.state["export_due"] = self.stopping, bool(failure)
            extra = dict(state=self.state, settings=self.settings, metrics_offset=self.report.metrics.offset)
            self.resume.save(self.model, self.keep, extra, final)
            if failure and final:
                self.accelerator.print(f"error: the last model was not saved: {failure}; make room, then run "
                                       "the same command again", file=sys.stderr)
                raise SystemExit(1)
            if not failure:
                self.publication.push(self.step, self.state["eval"])

    def _keep_milestone(self) -> None:
        with self.report.throughput.apart("milestone"):
            self.publication.keep_milestone(self.model, self.data.tokenizer, self.step)

    def give_up(self, skipped: int) -> None:
        """After so many skipped updates in a row the run cannot go on: `finish` raises RuntimeError."""
        self.failure = (f"{skipped} updates in a row were skipped, as their gradients are not finite. Lower "
                        f"learning_rate, or look at their samples: {self.args.output_dir}/metrics.jsonl.")

    def finish(self) -> None:
        """Wait for saves and pushes. Then print the summary, or exit with the status of the stop signal."""
        where, accelerator = f"at step {self.step} of {self.steps.last}", self.accelerator
        IN_LOOP.clear()
        self.report.progress.close()
        self.resume.checkpoints.wait()
        arrived = self.publisher.finish(20 if self.stop.requested else self.args.hub_timeout)
        self.report.pushes(self.step)
        signal = 0 if self._done else self.stop.answer  # after the last step it stops nothing
        if self.saved != self.step and (self._done or signal):
            self.failure = f"the loop ended {where}, and its last step is not saved: it has no run.save"
        if self.failure or not (self._done or signal):
            early = f"the loop ended {where}: its data ended, or an edit breaks it"
            raise RuntimeError(self.failure or f"{early}; docs/edits/early-stopping.diff ends a run early")
        accelerator.end_training()
        if self.state.get("ended"):
            accelerator.print(f"Ended {where}, by its last evaluation.")
        if signal:
            accelerator.print(f"Stopped {where} and saved; run it again to resume.")
            raise SystemExit(exit_status(signal))
        if accelerator.is_main_process:
            print(self.publication.summary(self.state, self.steps, self.data.tokenizer))
        if not arrived:
            raise SystemExit(1)
