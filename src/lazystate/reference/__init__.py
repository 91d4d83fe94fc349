"""What the fast code is compared with: equations followed one token at a time, in FP64.

Nothing here knows of windows, rings, folds or views; it imports PyTorch and the spec, and nothing
else of the package.
"""
