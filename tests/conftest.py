"""Files in the order of their length: the longest begin, or the workers would not end together; and between
those that compute one that mostly waits, for a Hub."""

import gc
import os
import shutil

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.forked import free_port

LONGEST = """test_readme test_hub test_compiled test_check test_edits test_train_clm test_presets
    test_multi_node test_recipes test_saved_models test_train_mlm test_bad_input test_model_folders
    test_preemption test_losses test_load test_convert test_tokenizer test_pairs test_corpus test_prepare
    test_notebook test_checkpoint test_crash test_fsdp""".split()

os.environ.setdefault("OMP_NUM_THREADS", "1")  # or the threads of all workers would wait for each other
if "GPU" not in os.environ:  # several processes share this machine, and digits are compared with a CPU's
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
gc.disable()  # until all is imported: nothing of it is garbage


def pytest_collection_finish():
    gc.freeze()  # or each collection would go through a million objects again
    gc.enable()


def pytest_collection_modifyitems(items):
    def place(item):
        return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def nothing_of_a_test_before():
    """accelerate keeps its state per process and writes variables; which tests share a process is chance."""
    shared = [os.environ, *(state._shared_state for state in (PartialState, AcceleratorState, GradientState))]
    before = [dict(each) for each in shared]
    yield
    for each, values in zip(shared, before, strict=True):
        if each != values:
            each.clear()
            each.update(values)


@pytest.fixture(scope="session")
def hub_port():
    """Of all Hub servers: the client reads the address when it is imported, so that each other one would need
    a fork server of its own (tests/forked.py)."""
    return free_port()


@pytest.fixture(scope="session")
def _home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def hub_home(_home):
    """HF_HOME of what runs against them, for the same reason one folder; empty at the start of a test."""
    shutil.rmtree(_home)
    _home.mkdir()
    return _home
