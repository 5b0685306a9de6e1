from dataclasses import dataclass


@dataclass
class Logprob:
    logprob: float
    rank: int
