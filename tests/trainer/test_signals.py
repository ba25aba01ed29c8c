import os
import signal

import pytest

from trainer.signals import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_sets_the_flag_and_nothing_else(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop.is_set
        os.kill(os.getpid(), number)
        assert stop.received is number
    assert signal.getsignal(number) is before
