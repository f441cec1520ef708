"""What a run writes about itself and what reads it back: run folders on disk, not live objects.
Nothing here imports torch.
"""
