"""Models from a Hugging Face hub: `hf:ORG/NAME[@REVISION]`.

api.py speaks HTTP, transfer.py gets one file whole, resuming and checking it; fetch.py gets a repository into a
directory with a manifest of digests; cache.py is where the directories of references are. No torch.
"""
