"""From logits to tokens: counter-based random numbers and the filters of a request. No torch."""
