"""tests/mutations.py, which is run by hand, finds what it changes: each text stands once in its file."""

from tests.mutations import FAULTS
from tests.runs import PROJECT


def test_every_fault_can_be_made():
    found = {fault.name: (PROJECT / fault.file).read_text().count(fault.old) for fault in FAULTS}
    assert len(FAULTS) == 12 and set(found.values()) == {1}, found
