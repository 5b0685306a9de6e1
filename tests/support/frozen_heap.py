"""The last module that a fork server imports. It excludes all imported objects from garbage collection."""

import gc

gc.collect()
gc.freeze()
