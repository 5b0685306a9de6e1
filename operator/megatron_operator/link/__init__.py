"""The control connection to one coordinator: what it says about itself, and the signals it is sent."""
