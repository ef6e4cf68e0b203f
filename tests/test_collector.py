"""What is set aside from the garbage collector comes back, unless it was set aside for good."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

from moesim.host import collector


class Node:
    """Something that only the collector can free."""

    def __init__(self) -> None:
        self.own = self


def test_what_was_there_before_is_collected_after_the_context_and_what_is_new_at_once() -> None:
    old = Node()
    seen = weakref.ref(old)
    with collector.set_aside():
        del old
        new = Node()
        fresh = weakref.ref(new)
        del new
        gc.collect()
        assert fresh() is None
        assert seen() is not None
    gc.collect()
    assert seen() is None


def test_what_is_set_aside_for_good_stays_so() -> None:
    code = "import gc; from moesim.host import collector as c; c.set_aside_for_good(); n = gc.get_freeze_count()\nwith c.set_aside(): pass\nprint(n > 1000, gc.get_freeze_count() == n)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["True", "True"]
