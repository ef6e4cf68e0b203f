"""No garbage is collected meanwhile, and it is as before afterwards."""

from __future__ import annotations

import gc

import pytest

from moesim.host import collector


def test_the_collector_is_paused_and_comes_back() -> None:
    assert gc.isenabled()
    with collector.paused():
        assert not gc.isenabled()
        with collector.paused():
            pass
        assert not gc.isenabled()  # as the inner one found it
    assert gc.isenabled()


def test_the_collector_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="wrong"), collector.paused():
        raise ValueError("wrong")
    assert gc.isenabled()
