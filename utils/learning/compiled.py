"""Regional compilation: torch.compile of the model's blocks and the loss's softmax, in place, so that weights
keep their names. And a record of what was compiled, how often, in how many seconds."""

import time

import torch
from accelerate.utils import DynamoBackend
from torch import nn

from utils.learning.configuration import one_line
from utils.learning.fused_head import ChunkSoftmax, CompilerSoftmax

GRAPHS = 64  # per function: all blocks share Module._call_impl, and evaluation has graphs of its own
SETTLED = 10  # steps; a graph that is compiled later means that shapes or types still change


def compile_blocks(accelerator, model):
    """Compile blocks if the launcher's YAML asks for that. Call it before `prepare`, which compiles the whole
    model if the YAML asks for that. If blocks fail to compile, a warning is printed and they run eagerly."""
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO:
        return
    import torch._dynamo

    model.chunk_softmax = ChunkSoftmax() if accelerator.device.type == "cpu" else CompilerSoftmax()
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    if not plugin.use_regional_compilation:
        return
    blocks, options = _blocks(model), plugin.to_kwargs()
    plugin.use_regional_compilation, plugin.disable = False, True  # nothing is left for `prepare`
    parts = [*blocks, model.chunk_softmax]
    for part in parts:
        part._compiled_call_impl = _or_eager(part, parts, options, accelerator.print)
    names = ", ".join(dict.fromkeys(type(block).__name__ for block in blocks))
    what = f"{len(blocks)} x {names} and the loss, with {options['backend']}"
    accelerator.print(f"compiles   {what}; --dynamo_backend no turns it off")


def _blocks(module):
    """The modules in the outermost ModuleLists."""
    if isinstance(module, nn.ModuleList):
        return [*module]
    return [block for child in module.children() for block in _blocks(child)]


def _or_eager(part, parts, options, say):
    from torch._dynamo.exc import TorchDynamoException

    compiled = torch.compile(part._call_impl, **options)

    def call(*args, **kwargs):
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            for each in parts:
                each._compiled_call_impl = None
            say(f"warning: not compiled, {type(part).__name__} failed: {one_line(error)}")
            return part._call_impl(*args, **kwargs)

    return call


class Compilations:
    """The graphs that this process compiles, from torch's own records; with no compiler all is empty."""

    def __init__(self, accelerator):
        self.active = accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
        self.newest, self.graphs, self.seconds = time.time(), 0, 0.0
        self.steps, self.evaluated = 0, False

    def first_evaluation(self):
        """Its graphs are new also where it comes late, in a resumed run."""
        if not self.evaluated:
            self.steps, self.evaluated = 0, True

    def news(self):
        """Lines about what was compiled since the last call. Call it once per step."""
        self.steps += 1
        if not self.active:
            return []
        from torch._dynamo.utils import get_compilation_metrics

        recorded = (one for one in get_compilation_metrics() if not one.fail_type)
        new = [one for one in recorded if (one.start_time or 0) > self.newest]
        if not new:
            return []
        seconds = sum(one.duration_us or 0 for one in new) / 1e6
        self.newest, self.seconds = max(one.start_time for one in new), self.seconds + seconds
        self.graphs += len(new)
        if self.steps <= SETTLED:
            return [f"compiled   {len(new)} graphs in {seconds:,.0f} s"]
        reason = next((one.recompile_reason for one in new if one.recompile_reason), "a first call")
        late = f"{len(new)} graphs were compiled anew, {self.steps} steps after the first, {seconds:,.0f} s"
        return [f"warning: {late}: {' '.join(str(reason).split())[:300]}"]

    def summary(self):
        return {"compiled graphs": f"{self.graphs} in {self.seconds:,.0f} s"} if self.active else {}
