"""One engine over many ranks: who holds what, what they tell each other, and what happens when one is lost."""
