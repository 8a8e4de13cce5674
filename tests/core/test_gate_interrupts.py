"""Ctrl-C while a gate takes a contribution."""

import signal

from limits import in_thread

from penstock.core.gate import Gate

AGAIN_S = 0.05  # the interrupt comes again where a callback of the garbage collector swallowed it


def test_an_interrupt_anywhere_in_a_change_leaves_the_gate_usable():
    gate, caught = Gate(1 << 60), 0

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for microseconds in range(20, 420):
            try:
                signal.setitimer(signal.ITIMER_REAL, microseconds / 1e6, AGAIN_S)
                while True:
                    gate.change(gate.count_contribution, None)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
                caught += 1
            assert in_thread(lambda: gate.change(gate.count_contribution, None) is None)()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert caught == 400
