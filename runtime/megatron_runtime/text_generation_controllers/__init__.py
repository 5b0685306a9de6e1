"""From text to tokens, from a step to its samples, and back to text."""
