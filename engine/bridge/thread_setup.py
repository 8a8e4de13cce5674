"""Preparation of a thread for its first work on a device."""

from __future__ import annotations

import errno
import os

import jax
import numpy as np


def prepare_thread() -> None:
    """Put a number on a device. Raises OSError if the process has no file descriptor left.

    A thread's first operation opens /dev/urandom for XLA's random numbers. On a prepared thread a step opens no file,
    so it cannot fail halfway for lack of a descriptor.
    """
    try:
        jax.device_put(np.zeros(1, np.float32)).block_until_ready()
    except (ValueError, RuntimeError) as error:
        if "random_device" not in str(error):
            raise
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
