"""Model-specific formats: prompts, tool calls and reasoning.

chat_format.py defines the interface, table.py lists the tool formats, recognition.py chooses one, and parser.py has the
buffer and the events that all parsers share.
"""
