"""One engine on many ranks: step plans and orders travel from rank 0 to all ranks."""
