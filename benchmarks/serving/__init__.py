"""Stock vLLM with and without lazystate on one GPU: the same tokens, and the time of a step."""
