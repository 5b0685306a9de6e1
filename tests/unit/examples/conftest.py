"""The example that runs in this process computes with one thread."""

from one_thread import one_thread as one_thread  # the fixture
