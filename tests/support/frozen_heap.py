"""The last module that a fork server imports: no collection of a forked process visits what the imports have made."""

import gc

gc.collect()
gc.freeze()
