"""What is special to a model: the form of its prompts, and the formats of its tool calls and reasoning.

chat_format.py is the seam, table.py the table of tool formats, recognition.py chooses from it, parser.py has the
buffer and the events that all parsers share.
"""
