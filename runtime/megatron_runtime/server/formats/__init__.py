"""Model-specific formats of prompts, tool calls and reasoning.

chat_format.py defines the interface, table.py lists the tool formats, recognition.py selects a format, and parser.py
contains the buffer and the events that all parsers share.
"""
