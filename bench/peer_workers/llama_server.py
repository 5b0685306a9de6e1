"""`python llama_server.py FILE.gguf THREADS SEQUENCES PORT` runs llama.cpp's HTTP server from the package xllamacpp."""

import signal
import sys

import xllamacpp

_TOKENS_EACH = 256

file, threads, sequences, port = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path = file
params.hostnames, params.port = ["127.0.0.1"], port
params.n_ctx, params.n_parallel, params.kv_unified = sequences * _TOKENS_EACH, sequences, False
params.n_batch, params.n_ubatch = 2048, 512
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
signal.pause()
